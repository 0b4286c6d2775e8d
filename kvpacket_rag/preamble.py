"""Text before the first packet, kept from earlier prompts as packets of its own: no adapter, position 0, exact."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from kvpacket_rag.assemble import Context, Span
from kvpacket_rag.packet import Packet, PacketSignature, packet_id

_MAX_PREAMBLES = 16
_MAX_BYTES = 128 * 2**20


class Preambles:
    """The preambles of one engine, the oldest let go of first.

    Args:
        signature: of the engine's packets.
    """

    def __init__(self, signature: PacketSignature) -> None:
        self._signature = replace(signature, adapter="none", compression="none", quantization="none")
        self._packets: OrderedDict[tuple[int, ...], Packet] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, ids: list[int]) -> Packet | None:
        """The packet of these tokens, if a prompt began with them before."""
        with self._lock:
            return self._packets.get(tuple(ids))

    def keep(self, ids: list[int], context: Context) -> None:
        """Remember what the first slots of a context hold."""
        tensors = context.extract(Span(0, 0, len(ids)))
        packet = Packet(packet_id(ids, self._signature), self._signature, tensors, len(ids), len(ids))
        with self._lock:
            self._packets[tuple(ids)] = packet
            while len(self._packets) > _MAX_PREAMBLES or self._size_bytes() > _MAX_BYTES:
                self._packets.popitem(last=False)

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._packets.clear()

    def _size_bytes(self) -> int:
        return sum(packet.size_bytes for packet in self._packets.values())
