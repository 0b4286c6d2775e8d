"""No context: preamble and question without the documents, to see what the model knows by itself."""

from __future__ import annotations

from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.served import serve


class NoContext:
    """Leaves the documents out, and the white space between them.

    Args:
        packets: whose model reads; none of them is used.
    """

    name = "none"

    def __init__(self, packets: CasePackets) -> None:
        self._packets = packets

    def prepare(self, case: Case) -> None:
        """Nothing can be done ahead."""

    def prefill(self, case: Case) -> State:
        """See :meth:`Method.prefill`."""
        return serve(self._packets, case, case.bare)
