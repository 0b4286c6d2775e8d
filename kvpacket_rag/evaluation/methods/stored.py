"""Chunks from packets with nothing recomputed: with an adapter, bare, or encoded behind sink tokens.

Which of them it is depends on the encoder alone: *packet* has the trained adapter, or what serving
does without one, *plain* concatenation an
empty one, and *legolink-0* an empty one with four sink tokens before each chunk (EPIC, arXiv 2410.15332).
"""

from __future__ import annotations

from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.served import serve


class StoredPackets:
    """Reads a prompt as serving does.

    Args:
        name: of the method.
        packets: of the encoder that makes the difference.
    """

    def __init__(self, name: str, packets: CasePackets) -> None:
        self.name = name
        self._packets = packets

    def prepare(self, case: Case) -> None:
        """Encode the chunks."""
        self._packets.prepare(case)

    def prefill(self, case: Case) -> State:
        """See :meth:`Method.prefill`."""
        self.prepare(case)
        return serve(self._packets, case, self._packets.parts(case))
