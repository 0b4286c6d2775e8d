"""Makes the packets that a store lacks: prefill in the foreground, writing behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvpacket_rag.device_errors import told
from kvpacket_rag.encode import NO_MEMORY, PacketEncoder
from kvpacket_rag.errors import PacketNotFoundError, PromptError
from kvpacket_rag.packet import Packet
from kvpacket_rag.store import PacketStore

_PENDING_WRITES = 4
OnTokens = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class MissingPacket:
    """A chunk without a packet: the packet's name, the chunk's tokens and text, and who asked for it first."""

    packet_id: str
    ids: list[int]
    text: str
    owner: str | None


class PacketWriter:
    """Encodes chunks and stores their packets.

    Args:
        encoder: makes packets.
        store: keeps them.
        make_room: frees memory when it runs out; see :meth:`PacketEncoder.encode`.
    """

    def __init__(self, encoder: PacketEncoder, store: PacketStore, make_room: Callable[[], None] | None = None) -> None:
        self._encoder = encoder
        self._store = store
        self._make_room = make_room

    def write_missing(
        self, texts: Sequence[str], owners: Sequence[str] | None = None, progress: OnTokens | None = None
    ) -> list[str]:
        """Make sure every chunk has a packet; see :meth:`KVPacketEngine.encode`."""
        asked = self._asked(texts, owners)
        self.write(self._lacking(asked), progress)
        for packet in asked:
            if packet.owner is None:
                continue
            try:
                self._store.add_owner(packet.packet_id, packet.owner)
            except PacketNotFoundError:  # deleted or evicted since we looked
                self.write([packet])
        return [packet.packet_id for packet in asked]

    def replace(self, texts: Sequence[str], owners: Sequence[str], dropped: Iterable[str]) -> list[str]:
        """Make packets of what owners have now, and drop those they had besides.

        Args:
            texts: of the chunks.
            owners: one name a chunk.
            dropped: owners that keep nothing but that; those of the chunks among them.

        Returns:
            Packet ids, one a text.
        """
        guards = [f"{name}\n(changing)" for name in owners]  # no packet that stays is without owner meanwhile
        try:
            self.write_missing(texts, guards)
            self._store.drop_owners(set(dropped))
            return self.write_missing(texts, owners)
        finally:
            self._store.drop_owners(dict.fromkeys(guards))

    def missing_batches(
        self, texts: Sequence[str], owners: Sequence[str], but: Container[str] = ()
    ) -> list[list[MissingPacket]]:
        """What :meth:`write_missing` would encode, forward by forward.

        Numbers depend on what else is in a forward, if only in their last bits. So whoever writes these batches, in
        any order and as often as it takes, stores the bytes that :meth:`write_missing` does.

        Args:
            texts: of the chunks.
            owners: one name a chunk.
            but: packets that are taken for stored.
        """
        lacking = self._lacking(self._asked(texts, owners))
        missing = {packet.packet_id: packet for packet in lacking if packet.packet_id not in but}
        batches = self._encoder.batches([(name, packet.ids) for name, packet in missing.items()])
        return [[missing[name] for name, _ in batch] for batch in batches]

    def write(self, missing: Sequence[MissingPacket], progress: OnTokens | None = None) -> None:
        """Prefill in the foreground while a thread writes what is finished.

        Raises:
            DeviceError: memory ran out, or the device cannot be used any more; what was finished stays.
            StoreFullError: no room; what was stored before stays.
        """
        if not missing:
            return
        chunks = {packet.packet_id: packet for packet in missing}
        done, total = 0, sum(len(packet.ids) for packet in missing)
        pending: deque[tuple[Packet, Future[None]]] = deque()
        wanted = [(name, chunk.ids) for name, chunk in chunks.items()]
        with told(self._encoder.backbone.device, NO_MEMORY), ThreadPoolExecutor(1) as writer:
            for packet in self._encoder.encode(wanted, self._make_room):
                chunk = chunks[packet.packet_id]
                pending.append((packet, writer.submit(self._store.put, packet, chunk.text, chunk.owner)))
                while len(pending) >= _PENDING_WRITES:
                    done = _settle(pending, done, total, progress)
            while pending:
                done = _settle(pending, done, total, progress)

    def _asked(self, texts: Sequence[str], owners: Sequence[str] | None) -> list[MissingPacket]:
        """One a text, whether it is missing or not."""
        _require_strings("texts", texts)
        _require_strings("owners", owners or ())
        if owners is not None and len(owners) != len(texts):
            raise PromptError(f"{len(owners)} owners for {len(texts)} texts; expected one each")
        each = zip(texts, owners if owners is not None else [None] * len(texts), strict=True)
        return [MissingPacket(*self._encoder.identify(text), text.strip(), owner) for text, owner in each]

    def _lacking(self, asked: Sequence[MissingPacket]) -> list[MissingPacket]:
        """Those the store does not have, each once."""
        first: dict[str, MissingPacket] = {}
        for packet in asked:
            first.setdefault(packet.packet_id, packet)
        return [packet for name, packet in first.items() if name not in self._store]


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
