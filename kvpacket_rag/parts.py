"""A prompt in parts: text to read, and chunks that packets stand for. Serving, training and evaluation share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.finder import ChunkFinder
from kvpacket_rag.packet import Packet
from kvpacket_rag.prompt import ChunkPiece, Message, Piece, TextPiece, segment_chat


@dataclass(slots=True)
class Part:
    """A piece of a prompt.

    Attributes:
        text: the characters it stands for.
        num_tokens: of that text alone.
        packet_id: the packet that may stand for it; None for plain text.
        ids: the tokens; a chunk is only tokenised when its packet cannot be used.
        packet: filled in when the part is taken from a packet.
    """

    text: str
    num_tokens: int
    packet_id: str | None = None
    ids: list[int] | None = None
    packet: Packet | None = None

    @classmethod
    def of_text(cls, ids: list[int], text: str = "") -> Part:
        """Plain text, tokenised."""
        return cls(text, len(ids), ids=ids)


def tokenise(backbone: Backbone, pieces: Sequence[Piece], known: Mapping[str, int]) -> list[Part]:
    """Pieces of a prompt as parts, each tokenised apart.

    The beginning-of-sequence token comes first, once, if the tokenizer puts one before texts; a chat template may have
    written it already.

    Args:
        backbone: whose tokenizer is used.
        pieces: of the prompt, in order.
        known: packet id to tokens of its text; a chunk that is not in it is read as text.
    """
    parts = [_part(backbone, piece, known, starts=not number) for number, piece in enumerate(pieces)]
    bos = backbone.bos_ids()
    if bos and parts and not _begins(backbone, pieces[0]):
        if parts[0].ids is None:
            parts = [Part.of_text(bos), *parts]
        else:
            parts = [Part.of_text([*bos, *parts[0].ids], parts[0].text), *parts[1:]]
    return [part for part in parts if part.num_tokens]


def _begins(backbone: Backbone, piece: Piece) -> bool:
    """Whether a prompt's first piece holds the beginning-of-sequence token, behind white space at most."""
    written = isinstance(piece, TextPiece) and not piece.plain
    return written and piece.text.lstrip().startswith(str(backbone.tokenizer.bos_token))


def _part(backbone: Backbone, piece: Piece, known: Mapping[str, int], starts: bool) -> Part:
    if isinstance(piece, ChunkPiece):
        if piece.packet_id in known:
            return Part(piece.text, known[piece.packet_id], piece.packet_id)
        return Part.of_text(backbone.token_ids(piece.text), piece.text)
    return Part.of_text(backbone.token_ids(piece.text, piece.plain, starts), piece.text)


def absorb(parts: Sequence[Part]) -> list[Part]:
    """The parts without white space that stands alone between two chunks; adapters are trained to stand for it."""
    inside = [
        before.packet_id and after.packet_id and part.text.isspace()
        for before, part, after in zip(parts, parts[1:], parts[2:], strict=False)
    ]
    return [part for part, absorbed in zip(parts, [False, *inside, False], strict=False) if not absorbed]


def parts_of(
    encoder: PacketEncoder,
    messages: Sequence[Message],
    chunks: Sequence[str],
    min_tokens: int = MIN_MATCH_TOKENS,
) -> list[Part]:
    """A chat in parts, cut at the given chunks, as an engine cuts it that knows these chunks alone.

    Args:
        encoder: names the packets.
        messages: hold the chunks' texts.
        chunks: texts with their edges stripped.
        min_tokens: shorter chunks are read as text, for they occur by chance.

    Returns:
        Parts in order, all with their tokens; white space between chunks is a part of its own still.

    Raises:
        PromptError: a message is malformed or the template refuses it.
        DocumentError: a chunk holds no text, or more than the model's window.
    """
    finder = ChunkFinder()
    tokens: dict[str, list[int]] = {}
    for chunk in chunks:
        name, ids = encoder.identify(chunk)
        if len(ids) >= min_tokens:
            tokens[name] = ids
            finder.add(name, chunk.strip())
    tokenizer = encoder.backbone.tokenizer
    known = {name: len(ids) for name, ids in tokens.items()}
    parts = tokenise(encoder.backbone, segment_chat(messages, finder, tokenizer), known)
    return [replace(part, ids=tokens[part.packet_id]) if part.packet_id else part for part in parts]
