"""What one training row reads: a context with chunks in it, and questions that are put to it apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpacket_rag.chat import Message
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import PromptError
from kvpacket_rag.parts import Part, parts_of


@dataclass(frozen=True, slots=True)
class Row:
    """One context and what follows it. Several questions share the cost of one context.

    Attributes:
        context: parts up to and with the last chunk, each with its tokens.
        suffixes: for each question the tokens from there to where the model speaks.
        domain: of the data, for figures apart.
    """

    context: tuple[Part, ...]
    suffixes: tuple[tuple[int, ...], ...]
    domain: str = ""

    @property
    def context_ids(self) -> list[int]:
        """Tokens of the context as full prefill reads them, white space between chunks included."""
        return [token for part in self.context for token in part.ids or ()]

    @property
    def num_tokens(self) -> int:
        """Tokens of context and suffixes."""
        return sum(part.num_tokens for part in self.context) + sum(map(len, self.suffixes))


def make_row(
    encoder: PacketEncoder, chats: Sequence[Sequence[Message]], chunks: Sequence[str], domain: str = ""
) -> Row:
    """A row of chats that differ only behind their last chunk.

    Args:
        encoder: names the packets and knows the tokenizer.
        chats: one a question, each holding every chunk.
        chunks: texts with their edges stripped.
        domain: of the data.

    Raises:
        PromptError: no chunk is long enough for a packet, none stands in a chat, or the chats differ before their
            last chunk.
        DocumentError: a chunk holds no text, or more than the model's window.
    """
    longest = max(len(encoder.identify(chunk)[1]) for chunk in chunks)
    if longest < MIN_MATCH_TOKENS:
        raise PromptError(
            f"the longest of its {len(chunks)} chunks has {longest} tokens, and one of fewer than {MIN_MATCH_TOKENS} "
            "is read as text, so it has no packet; give longer documents, or raise min_chunk_tokens"
        )
    cut = [_split(parts_of(encoder, chat, chunks)) for chat in chats]
    context = cut[0][0]
    if any([p.ids for p in other] != [p.ids for p in context] for other, _ in cut):
        raise PromptError("the chats of one row differ before their last chunk; expected the questions to come last")
    return Row(tuple(context), tuple(suffix for _, suffix in cut), domain)


def _split(parts: Sequence[Part]) -> tuple[list[Part], tuple[int, ...]]:
    last = max((number for number, part in enumerate(parts) if part.packet_id), default=None)
    if last is None or last == len(parts) - 1:
        raise PromptError("the chat holds no chunk with text behind it; expected documents first, then a question")
    suffix = tuple(token for part in parts[last + 1 :] for token in part.ids or ())
    return [replace(part, packet=None) for part in parts[: last + 1]], suffix
