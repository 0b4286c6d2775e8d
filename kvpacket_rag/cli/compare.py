"""One prompt answered twice: from packets, and by full prefill of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpacket_rag.answer import Answer
    from kvpacket_rag.pipeline import KVPacketRAG

_WARM_UP = "What are these documents about?"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt.

    Attributes:
        packets: from packets.
        prefill: by reading the whole prompt.
    """

    packets: Answer
    prefill: Answer

    @property
    def ttft_ratio(self) -> float:
        """How many times sooner the first token came from packets."""
        return self.prefill.timings.ttft_seconds / self.packets.timings.ttft_seconds

    @property
    def same(self) -> bool:
        """Whether both say the same."""
        return self.packets.text.strip() == self.prefill.text.strip()


def warm_up(rag: KVPacketRAG, k: int) -> None:
    """Answer another question both ways, so that neither pays for what a process does only once."""
    from kvpacket_rag.decode import GenerationSettings

    for policy in ("packets", "prefill"):
        rag.ask(_WARM_UP, k, GenerationSettings(max_new_tokens=2), policy)
