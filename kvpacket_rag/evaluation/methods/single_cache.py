"""One cache for all chunks, read together behind the preamble, then made smaller: what compression is meant for.

The cache is of use for one preamble and one choice of chunks in one order, where packets are for any. The preamble
is kept whole, as it is with packets.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.served import serve
from kvpacket_rag.packet import packet_id
from kvpacket_rag.parts import Part
from kvpacket_rag.store import MemoryStore


class SingleCache:
    """Compresses and quantises what full prefill caches of the chunks.

    Args:
        name: of the method.
        packets: of an encoder without adapter, which says how to make them smaller.
    """

    def __init__(self, name: str, packets: CasePackets) -> None:
        self.name = name
        self._packets = packets
        self._case: Case | None = None
        self._parts: list[Part] = []

    def prepare(self, case: Case) -> None:
        """Read preamble and chunks, and keep what is left of the latter."""
        if case is self._case:
            return
        chunks = [number for number, part in enumerate(case.parts) if part.packet_id]
        self._packets.store = MemoryStore()
        self._parts = list(case.parts)
        if chunks:
            first, stop = chunks[0], chunks[-1] + 1
            joint = self._store(_ids(case.parts[:first]), case.parts[first:stop])
            self._parts = [*case.parts[:first], joint, *case.parts[stop:]]
        self._case = case

    def _store(self, preamble: list[int], parts: Sequence[Part]) -> Part:
        encoder, ids = self._packets.encoder, _ids(parts)
        encoder.sink_ids = preamble  # read first and left out
        name = packet_id([*preamble, *ids], encoder.signature)
        (packet,) = encoder.encode([(name, ids)])
        text = "".join(part.text for part in parts)
        self._packets.store.put(packet, text)
        return Part(text, len(ids), name, ids)

    def prefill(self, case: Case) -> State:
        """See :meth:`Method.prefill`."""
        self.prepare(case)
        return serve(self._packets, case, self._parts)


def _ids(parts: Sequence[Part]) -> list[int]:
    return [token for part in parts for token in part.ids or ()]
