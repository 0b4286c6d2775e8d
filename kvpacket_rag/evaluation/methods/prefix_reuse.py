"""Prefix reuse: full prefill that finds the text before the first chunk in a cache, as inference servers keep it."""

from __future__ import annotations

from dataclasses import replace

from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.served import serve
from kvpacket_rag.packet import packet_id
from kvpacket_rag.parts import Part
from kvpacket_rag.store import MemoryStore


class PrefixReuse:
    """What can be had without packets: only the preamble is the same from one question to the next.

    Args:
        packets: of this method alone; their encoder has no adapter and makes the preamble's.
    """

    name = "prefix"

    def __init__(self, packets: CasePackets) -> None:
        self._packets = packets

    def prepare(self, case: Case) -> None:
        """Keep the preamble."""
        preamble, *_ = self._parts(case)
        if preamble.packet_id and preamble.packet_id not in self._packets.store:
            self._packets.store = MemoryStore()
            (packet,) = self._packets.encoder.encode([(preamble.packet_id, preamble.ids or [])])
            self._packets.store.put(packet, preamble.text)

    def prefill(self, case: Case) -> State:
        """See :meth:`Method.prefill`."""
        self.prepare(case)
        return serve(self._packets, case, self._parts(case), case.num_document_tokens)

    def _parts(self, case: Case) -> list[Part]:
        """The preamble as a packet, if the prompt has one, and everything else as text."""
        first, *others = case.parts
        if first.packet_id is None:
            first = replace(first, packet_id=packet_id(first.ids or [], self._packets.encoder.signature))
        else:
            first = replace(first, packet_id=None)
        return [first, *(replace(part, packet_id=None) for part in others)]
