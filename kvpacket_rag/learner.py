"""Packets of retrieved chunks, made when a prompt first holds them: for frameworks that tell what was retrieved.

Such a chunk stands in prompts word for word, or should. One that has no packet gets it then, and one that a prompt
holds in another form is a miss that the user is told of.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvpacket_rag.answer import Answer, Miss
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import KVPacketError, PacketNotFoundError
from kvpacket_rag.packet_writer import PacketWriter
from kvpacket_rag.prompt import control_strings, speaks_control
from kvpacket_rag.reading import PromptReader, Reuse
from kvpacket_rag.store import MemoryStore, PacketStore

logger = logging.getLogger(__name__)

_KEPT_BYTES = 2 * 2**30  # of packets in memory
_PASSING = "retrieved"  # an owner for a moment
_EDGE = 64  # characters at a chunk's start or end by which a part of it is recognised

ENCODED_NOW = "it was retrieved and had no packet, so it was encoded for this prompt; the next one reuses it"
_GONE = "it was retrieved and encoded, and had to make room for others at once; give the store a larger max_bytes"


@dataclass(frozen=True, slots=True)
class Advice:
    """What a framework's users are told of a retrieved chunk that is not reused.

    Attributes:
        not_encoded: it has no packet, and none is made now.
        cut: the prompt holds a part of it alone.
        rewritten: how a chunk looks where the framework rewrites its characters, and what to say then.
    """

    not_encoded: str
    cut: str
    rewritten: tuple[tuple[Callable[[str], str], str], ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was done for a prompt before the engine read it.

    Attributes:
        held: packet ids of the retrieved chunks that it holds as they are and that have packets.
        encoded: packet id to tokens of those that were encoded for it.
        misses: retrieved chunks that the engine cannot find in it.
        seconds: it took.
        texts: of the retrieved chunks that it holds as they are, whether they have packets or not.
    """

    held: tuple[str, ...] = ()
    encoded: Mapping[str, int] = field(default_factory=dict)
    misses: tuple[Miss, ...] = ()
    seconds: float = 0.0
    texts: tuple[str, ...] = ()

    def expected(self, reuse: Reuse) -> Reuse:
        """The same reuse, which now knows what was retrieved.

        Raises:
            PacketMissError: a retrieved chunk is missed, and that is to be an error.
        """
        reuse.act_on([*self._unhinted(reuse), *(Miss(name, ENCODED_NOW) for name in self.encoded)])
        own = reuse.match == "hints" and reuse.hints  # then no others are looked for
        more = [name for name in self.held if not own or name in self.encoded]
        return dataclasses.replace(reuse, hints=(*reuse.hints, *more), texts=(*reuse.texts, *self.texts))

    def counted(self, answer: Answer) -> Answer:
        """The answer, with chunks that were encoded just for it as misses and the time that took as its own."""
        told = {miss.packet_id for miss in answer.usage.misses}
        # one that lies within a longer chunk was not needed after all
        encoded = {name: self.encoded[name] for name in self.encoded if name not in told and name in answer.packet_ids}
        more = [*self.misses, *(Miss(name, ENCODED_NOW) for name in encoded)]
        usage, times = answer.usage, answer.timings
        usage = dataclasses.replace(
            usage,
            packet_tokens=usage.packet_tokens - sum(encoded.values()),
            prefilled_tokens=usage.prefilled_tokens + sum(encoded.values()),
            chunks_reused=usage.chunks_reused - len(encoded),
            misses=(*usage.misses, *(miss for miss in more if miss.packet_id not in told)),
        )
        times = dataclasses.replace(
            times,
            load_seconds=times.load_seconds + self.seconds,
            ttft_seconds=times.ttft_seconds + self.seconds,
            total_seconds=times.total_seconds + self.seconds,
        )
        return dataclasses.replace(answer, usage=usage, timings=times)

    def _unhinted(self, reuse: Reuse) -> list[Miss]:
        """The engine tells of hinted chunks itself."""
        return [miss for miss in self.misses if miss.packet_id not in reuse.hints]


class ChunkLearner:
    """Sees to it that retrieved chunks have packets when a prompt holds them.

    Packets made here have no owner, so only a store in memory gets any: in a folder they would outlive their documents.
    The oldest of them go when the store takes more than 2 GiB.

    Args:
        encoder: makes them.
        store: keeps them.
        reader: knows which chunks it finds in prompts.
        min_tokens: shorter chunks are not looked for in prompts, so they get no packets.
    """

    def __init__(self, encoder: PacketEncoder, store: PacketStore, reader: PromptReader, min_tokens: int) -> None:
        self._encoder = encoder
        self._store = store
        self._reader = reader
        self._writer = PacketWriter(encoder, store)
        self._may_encode = isinstance(store, MemoryStore)
        self._min_tokens = min_tokens
        self._control = control_strings(encoder.backbone.tokenizer)
        self._learned: OrderedDict[str, None] = OrderedDict()  # least recently needed first
        self._lock = threading.Lock()

    @property
    def learned(self) -> frozenset[str]:
        """Ids of the packets that were made here."""
        with self._lock:
            return frozenset(self._learned)

    def prepare(
        self, prompt: str, found: Iterable[str], others: Iterable[str], advice: Advice, *, encode: bool
    ) -> Prepared:
        """Look for retrieved chunks in a prompt.

        Args:
            prompt: all its texts.
            found: chunks that were retrieved for it; one that it holds in another form is a miss.
            others: chunks that were retrieved lately; only those count that it holds as they are.
            advice: what a miss is told by.
            encode: make packets of those that have none.
        """
        started = time.perf_counter()
        own = {text.strip() for text in found} - {""}
        chunks = _longest_first([*own, *others])
        whole, rest = _whole(chunks, prompt)
        lost = [chunk for chunk in chunks if chunk in own and chunk not in whole]
        misses = [
            Miss(name, reason)
            for chunk in lost
            if (reason := _why_lost(chunk, prompt, rest, advice))
            for name, _ in self._name(chunk)
        ]
        held = {name: (text, tokens) for text in whole for name, tokens in self._name(text)}
        self._touch(held)
        missing = {name: chunk for name, chunk in held.items() if name not in self._store}
        present = held.keys() - missing.keys()
        if missing:  # those that stand by themselves, not only as part of longer ones that have packets
            bare = self._reader.without_known(prompt, missing)
            missing = {name: chunk for name, chunk in missing.items() if chunk[0] in bare}
        with self._store.hold(held):  # what it needs does not make room for what else it needs
            may = encode and self._may_encode
            reason = self._encode([text for text, _ in missing.values()]) if may else advice.not_encoded
        encoded = {name: tokens for name, (_, tokens) in missing.items() if name in self._store}
        misses += [Miss(name, reason or _GONE) for name in missing if name not in encoded]
        ready = tuple(name for name in held if name in present or name in encoded)
        seconds = time.perf_counter() - started
        return Prepared(ready, encoded, tuple(misses), seconds, self._apart(whole))

    def read_in_full(self, prompt: str, found: Iterable[str]) -> Prepared:
        """For a prompt that is to be read without packets: it is cut where it would be with them.

        Args:
            prompt: all its texts.
            found: chunks that were retrieved for it or lately.
        """
        whole, _ = _whole(_longest_first(found), prompt)
        return Prepared(texts=self._apart(whole))

    def _apart(self, whole: Iterable[str]) -> tuple[str, ...]:
        """Those of a prompt's chunks that are read apart: which can have packets, or what else could pass for turns."""
        return tuple(text for text in whole if speaks_control(text, self._control) or self._name(text))

    def _name(self, text: str) -> list[tuple[str, int]]:
        """Packet id and tokens of a chunk; nothing for one that can have no packet or is not looked for."""
        try:
            name, ids = self._encoder.identify(text)
        except KVPacketError:
            return []
        return [(name, len(ids))] if len(ids) >= self._min_tokens else []

    def _encode(self, texts: list[str]) -> str:
        """Make packets; why there are not all of them, or nothing."""
        reason = ""
        try:
            if texts:
                self._writer.write_missing(texts)
        except KVPacketError as error:
            logger.warning("retrieved chunks could not be encoded: %s", str(error))
            reason = str(error)
        finally:  # those before an error are stored, whatever it is
            names = [name for text in texts for name, _ in self._name(text) if name in self._store]
            with self._lock:
                self._learned |= dict.fromkeys(names)
            self._make_room()
        return reason

    def _touch(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                if name in self._learned:
                    self._learned.move_to_end(name)

    def _make_room(self) -> None:
        while self._store.size_bytes > _KEPT_BYTES:
            with self._lock:
                if len(self._learned) < 2:
                    return
                oldest, _ = self._learned.popitem(last=False)
            with suppress(PacketNotFoundError):
                self._store.add_owner(oldest, _PASSING)
            self._store.drop_owners([_PASSING])  # deletes it, unless a chunk owns it by now


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted({text.strip() for text in texts} - {""}, key=len, reverse=True)


def _whole(chunks: Sequence[str], prompt: str) -> tuple[set[str], str]:
    """Which chunks, longest first, a prompt holds as they are, and the rest of it; one inside another is part of it."""
    whole = set()
    for chunk in chunks:
        if chunk in prompt:
            whole.add(chunk)
            prompt = prompt.replace(chunk, "\0")
    return whole, prompt


def _why_lost(chunk: str, prompt: str, rest: str, advice: Advice) -> str:
    """In which other form a prompt holds a chunk; nothing if it does not."""
    for rewrite, reason in advice.rewritten:
        if rewrite(chunk[:_EDGE]) not in prompt:  # at most calls, and at a tenth of the cost
            continue
        written = rewrite(chunk)
        if written != chunk and written in prompt:
            return reason
    is_cut = len(chunk) >= 2 * _EDGE and (chunk[:_EDGE] in rest or chunk[-_EDGE:] in rest)
    return advice.cut if is_cut else ""


def as_python(text: str) -> str:
    """As Python writes a text in a list; for :attr:`Advice.rewritten`."""
    return repr(text)[1:-1]


def as_python_beside_quotes(text: str) -> str:
    """The same where both kinds of quotes stand around it, as in a list of texts with metadata."""
    return repr(f"{text}'\"")[1:-4]
