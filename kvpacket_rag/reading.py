"""From a prompt to parts: the chunks the store knows, and the text around them, tokenised apart."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvpacket_rag.answer import Miss
from kvpacket_rag.backbone import Backbone, is_unicode
from kvpacket_rag.chat import check_messages
from kvpacket_rag.errors import PacketMissError, PromptError
from kvpacket_rag.finder import ChunkFinder
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.parts import Part, tokenise
from kvpacket_rag.prompt import (
    ChunkPiece,
    Message,
    Piece,
    TextPiece,
    control_strings,
    segment_chat,
    segment_text,
    speaks_control,
)
from kvpacket_rag.store import PacketStore

logger = logging.getLogger(__name__)

Way = Literal["packets", "prefill"]
Policy = Way | Literal["auto"]  # auto: the quicker way
Match = Literal["auto", "hints", "off"]
OnMiss = Literal["prefill", "warn", "error"]
Prompt = str | Sequence[Message]

_UNKNOWN = "the store knows no such chunk"
_NOT_IN_PROMPT = "it was retrieved, but its text is not in the prompt as it was encoded"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which chunks may come from packets, and what happens when one that should does not.

    Attributes:
        match: ``"auto"`` looks for every chunk the store knows, ``"hints"`` for the hinted ones alone, and
            ``"off"`` for none.
        hints: packet ids of what was retrieved for this prompt; one whose chunk the prompt does not hold is a miss.
        on_miss: ``"prefill"`` reads the text and counts the miss, ``"warn"`` logs a warning as well, ``"error"``
            raises PacketMissError before anything is generated.
        texts: of what was retrieved for this prompt, with a packet or without: read apart from what stands around
            them, with control strings as plain text.
    """

    match: Match = "auto"
    hints: tuple[str, ...] = ()
    on_miss: OnMiss = "prefill"
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("match", self.match, get_args(Match)),
            ("on_miss", self.on_miss, get_args(OnMiss)),
        ):
            if value not in allowed:
                raise PromptError(f"{name} is {value!r}, expected {', '.join(map(repr, allowed))}")
        if isinstance(self.hints, str) or not isinstance(self.hints, Sequence):
            raise PromptError(f"hints is a {type(self.hints).__name__}; pass the packet ids one by one, as a tuple")
        if wrong := [hint for hint in self.hints if not isinstance(hint, str)]:
            raise PromptError(f"hints holds {wrong[0]!r}; packet ids are strings, as encode() returns them")

    def act_on(self, misses: Sequence[Miss]) -> None:
        """Do with misses what ``on_miss`` says.

        Raises:
            PacketMissError: there are some, and they are to be an error.
        """
        told = "; ".join(f"chunk {miss.packet_id[:12]} is not reused: {miss.reason}" for miss in misses)
        if told and self.on_miss == "error":
            raise PacketMissError(f"{told}. Encode it first, or allow on_miss='prefill'")
        if told and self.on_miss == "warn":
            logger.warning("%s", told)


class PromptReader:
    """Reads prompts for one engine, and follows what its store knows.

    Args:
        backbone: the model, whose tokenizer and template are used.
        store: whose chunks are looked for.
        signature: packets of another one are not for this reader.
        min_match_tokens: shorter chunks are left to be read as text.
    """

    def __init__(
        self, backbone: Backbone, store: PacketStore, signature: PacketSignature, min_match_tokens: int
    ) -> None:
        self._backbone = backbone
        self._store = store
        self._signature = signature
        self._min_match_tokens = min_match_tokens
        # such as one that composes accents itself: then all normal forms of a chunk have its tokens, and its packet
        self._finder = ChunkFinder(backbone.token_ids("e\u0301") == backbone.token_ids("\u00e9"))
        self._known: dict[str, int] = {}  # packet id to tokens of its text
        self._short: set[str] = set()  # packets of chunks that are not reused
        self._control = control_strings(backbone.tokenizer)
        self._looked_for: set[str] = set()  # those that are reused, and short ones that must not be read as they stand
        self._revision: int | None = None
        self._lock = threading.Lock()
        self._tell_of_foreign_packets()

    def _tell_of_foreign_packets(self) -> None:
        """Warn when the store holds packets and none that can be read here: nothing would be reused, and no miss."""
        found = self._store.signatures()
        if not found or self._signature.to_json() in found:
            return
        others = [PacketSignature.from_json(text) for text in found]
        commonest = max(others, key=lambda other: found[other.to_json()])
        logger.warning(
            "the store holds %d packets and none that %s reads as it was loaded: %s; load it as they were made, "
            "or encode the chunks again",
            sum(found.values()),
            self._backbone.name,
            self._signature.difference(commonest),
        )

    def read(
        self,
        prompt: Prompt,
        template_kwargs: Mapping[str, Any] | None,
        reuse: Reuse = Reuse(),
    ) -> tuple[list[Part], tuple[Miss, ...]]:
        """Find chunks and tokenise.

        Args:
            prompt: a final text, or chat messages.
            template_kwargs: for the chat template.
            reuse: which chunks are looked for.

        Returns:
            The parts in order, and the misses so far: chunks that stand in the prompt in a form no packet fits, and
            hinted ones that do not stand in it.

        Raises:
            PromptError: the prompt is empty, or a message malformed.
        """
        if not isinstance(template_kwargs or {}, Mapping):
            raise PromptError(f"template_kwargs is {template_kwargs!r}; pass arguments of the chat template by name")
        if not isinstance(prompt, str | Sequence):
            raise PromptError(
                f"the prompt is a {type(prompt).__name__}; pass a string, or a list of Message for a chat"
            )
        if not isinstance(prompt, str):
            check_messages(prompt)
        if not all(is_unicode(text) for text in _texts(prompt)):
            raise PromptError("the prompt holds a lone surrogate, which no encoding knows; remove it")
        with self._lock:
            self._refresh()
            finder = self._finder.only(reuse.hints) if reuse.match == "hints" else self._finder
            with finder.also(reuse.texts):
                if isinstance(prompt, str):
                    pieces = self._cut(prompt, finder)
                else:
                    pieces = segment_chat(prompt, finder, self._backbone.tokenizer, template_kwargs=template_kwargs)
            if reuse.match == "off":
                return tokenise(self._backbone, pieces, {}), ()
            known = self._known
            if finder is not self._finder:
                known = {name: known[name] for name in reuse.hints if name in known}
            return tokenise(self._backbone, pieces, known), self._misses(pieces, finder, reuse.hints)

    def without_known(self, text: str, but: Container[str]) -> str:
        """A text with the chunks that the store knows blanked out, save those of the packet ids ``but``."""
        with self._lock:
            self._refresh()
            matches = self._finder.find(text)
        for match in reversed(matches):
            if match.packet_id not in but:
                text = f"{text[: match.start]}\0{text[match.end :]}"
        return text

    def _cut(self, prompt: str, finder: ChunkFinder) -> list[Piece]:
        """A final text at the chunks looked for, then at all others, whose control strings are plain text as well."""
        pieces = segment_text(prompt, finder)
        if finder is self._finder:
            return pieces
        inner = (segment_text(p.text, self._finder) if isinstance(p, TextPiece) else [p] for p in pieces)
        return [piece for cut in inner for piece in cut]

    def _misses(self, pieces: Sequence[Piece], finder: ChunkFinder, hints: Iterable[str]) -> tuple[Miss, ...]:
        """Chunks that should have been found, with the reason why not; each once."""
        found = {piece.packet_id for piece in pieces if isinstance(piece, ChunkPiece)}
        texts = [piece.text for piece in pieces if isinstance(piece, TextPiece)]
        near = [miss for text in texts for miss in finder.near_misses(text) if miss[0] not in found]
        told = found | {name for name, _ in near}
        reused = [piece.text for piece in pieces if isinstance(piece, ChunkPiece)]
        told |= self._short  # they are text by rule
        lost = [name for name in dict.fromkeys(hints) if name not in told and not finder.is_inside(name, reused)]
        reasons = near + [(name, _NOT_IN_PROMPT if name in self._known else _UNKNOWN) for name in lost]
        return tuple(Miss(name, reason) for name, reason in reasons)

    def _refresh(self) -> None:
        """Bring the finder up to what the store knows, if that changed."""
        revision = self._store.revision()
        if revision == self._revision:
            return
        known = list(self._store.known(self._signature))
        now = {chunk.packet_id: chunk for chunk in known if chunk.num_tokens >= self._min_match_tokens}
        self._short = {chunk.packet_id for chunk in known if chunk.packet_id not in now}
        texts = {chunk.packet_id: chunk.text for chunk in now.values()}
        texts |= {chunk.packet_id: chunk.text for chunk in known if speaks_control(chunk.text, self._control)}
        for name in self._looked_for - texts.keys():
            self._finder.discard(name)
        for name, text in texts.items():
            self._finder.add(name, text)  # of no effect but on what is new or was stored again in another form
        self._looked_for = set(texts)
        self._known = {name: chunk.num_tokens for name, chunk in now.items()}
        self._revision = revision


def _texts(prompt: Prompt) -> Iterator[str]:
    """Every text of a prompt, what the assistant called included."""
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt:
        yield message.content
        for call in message.tool_calls:
            yield json.dumps([call.name, call.arguments], ensure_ascii=False, default=str)
