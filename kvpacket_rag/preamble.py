"""Text before the first packet, kept from earlier prompts as packets of its own: no adapter, position 0, exact.

Often only its beginning is the same in all prompts: a framework that writes the metadata of a chunk before it makes the
end another for each best hit. A token's keys and values depend on what stands before it alone, so the beginning can be
kept by itself. To be rounded alike in every prompt, text before the first packet is read in pieces that end at places
which depend on their distance from the beginning alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from torch import Tensor

from kvpacket_rag.assemble import Context, Span
from kvpacket_rag.packet import Packet, PacketSignature, packet_id

_FINE, _COARSE = 32, 256  # pieces are this long, up to the first coarse one and beyond it
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
        """The packet of these tokens, or of the first whole pieces of them, if a prompt began with them before."""
        wanted = tuple(ids)
        with self._lock:
            if found := self._packets.get(wanted):
                return found
            num_tokens, packet = max(
                ((_num_shared(wanted, kept), packet) for kept, packet in self._packets.items()),
                key=itemgetter(0),
                default=(0, None),
            )
        if packet is None or not num_tokens:
            return None
        tensors = tuple(kept[..., :num_tokens, :] for kept in packet.groups if isinstance(kept, Tensor))
        name = packet_id(ids[:num_tokens], self._signature)
        return Packet(name, self._signature, tensors, num_tokens, num_tokens)

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


def pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a preamble of ``end`` tokens begin and end, from the one on that begins at ``start``."""
    while start < end:
        stop = min(start + _length(start), end)
        yield start, stop
        start = stop


def _length(start: int) -> int:
    """Tokens of a whole piece that begins at ``start``."""
    return _FINE if start < _COARSE else _COARSE


def _num_shared(wanted: tuple[int, ...], kept: tuple[int, ...]) -> int:
    """Tokens of the whole pieces with which both preambles begin."""
    shared, most = 0, min(len(wanted), len(kept))
    while (stop := shared + _length(shared)) <= most and wanted[shared:stop] == kept[shared:stop]:
        shared = stop
    return shared
