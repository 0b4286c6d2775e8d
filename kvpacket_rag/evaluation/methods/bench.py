"""What the methods of one comparison share: the model, and the packets of the case at hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.compress.reduction import UNREDUCED, Reduction
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.engine import SINK
from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.packet import packet_id
from kvpacket_rag.parts import Part
from kvpacket_rag.store import MemoryStore

_SINKS = 4  # as LegoLink-0 has them


class Method(Protocol):
    """A way to read a prompt."""

    @property
    def name(self) -> str:
        """As it is called in tables."""

    def prepare(self, case: Case) -> None:
        """Do what may be done before the question is known; not part of the time to first token."""

    def prefill(self, case: Case) -> State:
        """Read the prompt, prepared or not.

        Raises:
            ContextTooLongError: prompt and answer exceed the model's window.
            UnsupportedModelError: the model gives the method no access to what it needs.
        """


class CasePackets:
    """Packets of one encoder, kept in memory for one case at a time.

    Args:
        encoder: makes them.
    """

    def __init__(self, encoder: PacketEncoder) -> None:
        self.encoder = encoder
        self.backbone = encoder.backbone
        self.store = MemoryStore()
        self._case: Case | None = None

    def prepare(self, case: Case) -> None:
        """Encode the chunks of a case and forget those of the case before."""
        if case is self._case:
            return
        self.store = MemoryStore()
        chunks = {part.packet_id: part for part in self.parts(case) if part.packet_id}
        for packet in self.encoder.encode([(name, part.ids or []) for name, part in chunks.items()]):
            self.store.put(packet, chunks[packet.packet_id].text)
        self._case = case

    def parts(self, case: Case) -> list[Part]:
        """The case's parts, its chunks named as this encoder names them."""
        signature = self.encoder.signature
        return [
            replace(part, packet_id=packet_id(part.ids or [], signature)) if part.packet_id else part
            for part in case.parts
        ]

    def size_bytes(self, names: Iterable[str]) -> int:
        """What the packets of these ids take, each counted once."""
        return sum(self.store.get(name, self.encoder.signature).size_bytes for name in set(names))


class Bench:
    """A model and an adapter, with packets of every kind that methods ask for.

    Args:
        backbone: the model.
        adapter: the one that is measured; None, or an empty one, for packets as they are served without.
    """

    def __init__(self, backbone: Backbone, adapter: Adapter | None = None) -> None:
        self.backbone = backbone
        self._adapter = adapter

    @cached_property
    def bare(self) -> CasePackets:
        """Chunks alone."""
        return CasePackets(PacketEncoder(self.backbone, Adapter.empty(self.backbone.hidden_size)))

    @property
    def preambles(self) -> CasePackets:
        """Text before the first chunk, apart from the chunks that other methods share."""
        return CasePackets(self.bare.encoder)

    @cached_property
    def behind_sinks(self) -> CasePackets:
        """Chunks read behind four sink tokens, which are then left out."""
        return CasePackets(PacketEncoder(self.backbone, Adapter.empty(self.backbone.hidden_size), _SINKS))

    @cached_property
    def adapted(self) -> CasePackets:
        """Chunks as an engine serves them: in the adapter, or behind a sink token where there is none.

        Raises:
            AdapterError: it does not fit the model.
        """
        return self.adapted_and(UNREDUCED)

    def adapted_and(self, reduction: Reduction) -> CasePackets:
        """The same, made smaller.

        Raises:
            AdapterError: the adapter does not fit the model.
            UnsupportedModelError: the model's packets cannot be compressed like that.
        """
        adapter = self._adapter or Adapter.empty(self.backbone.hidden_size)
        sink = SINK if adapter.is_empty else 0
        return CasePackets(PacketEncoder(self.backbone, adapter, sink, reduction=reduction))

    def bare_and(self, reduction: Reduction) -> CasePackets:
        """Chunks alone, made smaller.

        Raises:
            UnsupportedModelError: the model's packets cannot be compressed like that.
        """
        bare = Adapter.empty(self.backbone.hidden_size)
        return CasePackets(PacketEncoder(self.backbone, bare, reduction=reduction))
