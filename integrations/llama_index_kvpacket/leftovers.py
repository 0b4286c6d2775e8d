"""Packets that outlive their nodes by a moment.

LlamaIndex changes a document by deleting it and adding it anew. Most of its text is the same then, often all of it,
and would be encoded again for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpacket_rag import KVPacketEngine, KVPacketError, Packet

KEPT_BYTES = 256 * 2**20  # more would take longer to read than a fast device takes to encode


class Leftovers:
    """The packets of nodes that were deleted since nodes were last added.

    They are gone from the store, so no answer can come from them; their tensors stay readable. Not safe for threads:
    the vector store changes one thing at a time.
    """

    def __init__(self, engine: KVPacketEngine) -> None:
        self._engine = engine
        self._packets: dict[str, Packet] = {}

    def collect(self, texts: Iterable[str]) -> None:
        """Read the packets of texts that are about to be deleted, as many as there is room for."""
        size = sum(packet.size_bytes for packet in self._packets.values())
        for text in texts:
            if size >= KEPT_BYTES:
                return
            try:
                name, _ = self._engine.encoder.identify(text)
                packet = self._engine.store.get(name, self._engine.signature)
            except KVPacketError:
                continue
            self._packets[name] = packet
            size += packet.size_bytes

    def put_back(self, texts: Mapping[str, str]) -> None:
        """Store those that are wanted again, by owner and text, and let go of the rest."""
        packets, self._packets = self._packets, {}
        if not packets:
            return
        for owner, text in texts.items():
            packet = packets.get(self._engine.encoder.identify(text)[0])
            if packet is not None:
                self._engine.store.put(packet, text.strip(), owner)

    def clear(self) -> None:
        """Let go of all."""
        self._packets = {}
