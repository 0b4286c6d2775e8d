"""Full prefill: the model reads every token of the prompt, as if there were no packets."""

from __future__ import annotations

from dataclasses import replace

from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.served import serve


class FullPrefill:
    """What the other methods are measured against.

    Args:
        packets: whose model reads; none of them is used.
    """

    name = "full"

    def __init__(self, packets: CasePackets) -> None:
        self._packets = packets

    def prepare(self, case: Case) -> None:
        """Nothing can be done ahead."""

    def prefill(self, case: Case) -> State:
        """See :meth:`Method.prefill`."""
        parts = [replace(part, packet_id=None) for part in case.parts]
        return serve(self._packets, case, parts, case.num_document_tokens)
