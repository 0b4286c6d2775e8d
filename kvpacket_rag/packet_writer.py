"""Makes the packets that a store lacks: prefill in the foreground, writing behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import PacketNotFoundError, PromptError
from kvpacket_rag.packet import Packet
from kvpacket_rag.store import PacketStore

_PENDING_WRITES = 4
OnTokens = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Missing:
    """A chunk without a packet: its tokens, its text, and who asked for it first."""

    ids: list[int]
    text: str
    owner: str | None


class PacketWriter:
    """Encodes chunks and stores their packets.

    Args:
        encoder: makes packets.
        store: keeps them.
    """

    def __init__(self, encoder: PacketEncoder, store: PacketStore) -> None:
        self._encoder = encoder
        self._store = store

    def write_missing(
        self, texts: Sequence[str], owners: Sequence[str] | None = None, progress: OnTokens | None = None
    ) -> list[str]:
        """Make sure every chunk has a packet; see :meth:`KVPacketEngine.encode`."""
        _require_strings("texts", texts)
        _require_strings("owners", owners or ())
        if owners is not None and len(owners) != len(texts):
            raise PromptError(f"{len(owners)} owners for {len(texts)} texts; expected one each")
        named = [self._encoder.identify(text) for text in texts]
        missing: dict[str, _Missing] = {}
        for number, ((name, ids), text) in enumerate(zip(named, texts, strict=True)):
            if name not in missing and name not in self._store:
                missing[name] = _Missing(ids, text.strip(), owners[number] if owners else None)
        self._encode_missing(missing, progress)
        for (name, ids), text, owner in zip(named, texts, owners or (), strict=False):
            try:
                self._store.add_owner(name, owner)
            except PacketNotFoundError:  # deleted or evicted since we looked
                self._encode_missing({name: _Missing(ids, text.strip(), owner)}, None)
        return [name for name, _ in named]

    def _encode_missing(self, missing: Mapping[str, _Missing], progress: OnTokens | None) -> None:
        """Prefill in the foreground while a thread writes what is finished."""
        if not missing:
            return
        done, total = 0, sum(len(chunk.ids) for chunk in missing.values())
        pending: deque[tuple[Packet, Future[None]]] = deque()
        with ThreadPoolExecutor(1) as writer:
            for packet in self._encoder.encode([(name, chunk.ids) for name, chunk in missing.items()]):
                chunk = missing[packet.packet_id]
                pending.append((packet, writer.submit(self._store.put, packet, chunk.text, chunk.owner)))
                while len(pending) >= _PENDING_WRITES:
                    done = _settle(pending, done, total, progress)
            while pending:
                done = _settle(pending, done, total, progress)


def _require_strings(name: str, values: Sequence[str]) -> None:
    """Refuse one string in place of several, and what is no string.

    Raises:
        PromptError: it is either.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise PromptError(f"{name} is a {type(values).__name__}; pass a list of strings, one for each chunk")
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise PromptError(f"{name} holds a {type(wrong[0]).__name__}; pass a list of strings, one for each chunk")


def _settle(pending: deque[tuple[Packet, Future[None]]], done: int, total: int, progress: OnTokens | None) -> int:
    """Wait for the oldest write; its error, if any, is the caller's."""
    packet, written = pending.popleft()
    written.result()
    done += packet.num_tokens
    if progress is not None:
        progress(done, total)
    return done
