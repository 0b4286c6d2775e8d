"""Chunks from packets, some of their tokens read again: the step that all such methods share.

The prompt is laid out with packets in place. Any tokens of it can then be computed by the model at their own
slots and positions, in a forward that sees everything before each of them; their keys and values replace the
cached ones. With all tokens it is full prefill, with text alone it is plain concatenation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpacket_rag.assemble import Assembly, Context
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.evaluation.case import Case, State
from kvpacket_rag.evaluation.flops import Flops, LayerCost, of_rotation
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.narrow import Choice, Narrowing
from kvpacket_rag.evaluation.methods.observe import Watch, observed
from kvpacket_rag.parts import Part
from kvpacket_rag.prefill import Prefiller


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward: the chunk of every token then laid out, the tokens computed, and those left by layer."""

    chunk: Tensor
    numbers: Tensor
    by_layer: Mapping[int, Tensor]
    shown: Tensor | None


class PartialStep:
    """A prompt laid out from bare packets, and what has been computed of it. A token's number is its slot.

    Args:
        backbone: the model.
        parts: with their packets loaded; those without are text and not computed yet.
        room: slots for an answer.
    """

    def __init__(self, backbone: Backbone, parts: Sequence[Part], room: int) -> None:
        self.backbone = backbone
        self.context: Context = backbone.pool.take(sum(part.num_tokens for part in parts) + room)
        self.packet_ids = [part.packet_id for part in parts if part.packet]
        assembly = Assembly(self.context)
        ids: list[int] = []
        chunk: list[int] = []
        for part in parts:
            chunk += [max(chunk, default=-1) + 1 if part.packet else -1] * part.num_tokens
            ids += part.ids or []
            if part.packet:
                assembly.add(part.packet)
            else:
                self.context.reserve(part.num_tokens)
        assembly.write()
        self.ids = torch.tensor(ids, device=backbone.device)
        self.chunk = torch.tensor(chunk, device=backbone.device)
        self.positions = torch.arange(len(ids), device=backbone.device)
        self.bound = backbone.bind(self.context)
        self._room = room
        self._runs: list[_Run] = []

    @property
    def all(self) -> Tensor:
        """Numbers of all tokens."""
        return torch.arange(len(self.ids), device=self.ids.device)

    @property
    def documents(self) -> Tensor:
        """Numbers of the chunks' tokens."""
        return (self.chunk >= 0).nonzero()[:, 0]

    @property
    def question(self) -> Tensor:
        """Numbers of the tokens behind the last chunk."""
        documents = self.documents
        return self.all[int(documents[-1]) + 1 if len(documents) else 0 :]

    @property
    def preamble(self) -> Tensor:
        """Numbers of the tokens before the first chunk."""
        documents = self.documents
        return self.all[: int(documents[0]) if len(documents) else 0]

    def with_text(self, documents: Tensor) -> Tensor:
        """Those tokens of chunks and all tokens of text, ascending."""
        return torch.cat([(self.chunk < 0).nonzero()[:, 0], documents]).sort().values

    def top(self, scores: Tensor, ratio: float) -> Tensor:
        """The share of the chunks' tokens that scores highest, as numbers.

        Args:
            scores: (tokens of chunks,).
            ratio: of tokens, see :meth:`count`.
        """
        return self.documents[scores.topk(self.count(ratio)).indices]

    def count(self, ratio: float) -> int:
        """That share of the chunks' tokens, rounded down."""
        return int(ratio * len(self.documents))

    def run_text(self) -> Tensor:
        """Compute no token of any chunk, as plain concatenation does; (1, vocabulary) logits of the last token."""
        return self.run(self.with_text(self.documents[:0]))

    def views(self, layer: int, name: str | None = None) -> list[Tensor]:
        """What the context holds for a layer, each (heads, slots, width); write to it and it is changed.

        Args:
            layer: number of the decoder layer.
            name: of a group of the plan; None for all.

        Raises:
            UnsupportedModelError: nothing of the kind is cached for that layer.
        """
        found = [
            buffer[group.layers.index(layer), 0]
            for group, buffer in zip(self.backbone.plan.groups, self.context.buffers, strict=True)
            if layer in group.layers and name in (None, group.name)
        ]
        if not found:
            raise UnsupportedModelError(
                f"{self.backbone.name} caches no {name or 'tensors'} in layer {layer}; CacheBlend and SAM-KV need them"
            )
        return found

    def run(self, numbers: Tensor, choices: Mapping[int, Choice] | None = None, shown: Tensor | None = None) -> Tensor:
        """Compute tokens again.

        Args:
            numbers: of the tokens, ascending, with the last of the prompt.
            choices: layer to a function that says which tokens are left from there on; layers the model does not have
                are passed over.
            shown: (tokens of the prompt,), False for those nobody may look at; all by default.

        Returns:
            (1, vocabulary): logits of the last token.
        """
        runner, visible = self.backbone.runner, len(self.ids)
        distance = numbers[:, None] - self.all[None, :]
        allowed = distance >= 0 if shown is None else (distance >= 0) & shown
        mask = runner.additive(allowed, distance)
        layers = self.backbone.model.config.get_text_config(decoder=True).num_hidden_layers
        choices = {layer: choice for layer, choice in (choices or {}).items() if layer < layers}
        narrowing = Narrowing(self.bound, numbers, choices)
        with runner.lock, narrowing.attached():
            logits = self.bound.run(self.ids[numbers][None], numbers, self.positions[numbers][None], visible, mask)
        self._runs.append(_Run(self.chunk, numbers, narrowing.by_layer, shown))
        return logits

    def spent(self, cost: LayerCost) -> tuple[float, Flops]:
        """What all runs took together: tokens of chunks, averaged over the layers, and operations."""
        tokens, flops = 0.0, Flops()
        for run in self._runs:
            numbers = run.numbers
            num_keys = len(run.chunk) if run.shown is None else int(run.shown.sum())
            for layer in range(cost.layers):
                numbers = run.by_layer.get(layer, numbers)
                documents = int((run.chunk[numbers] >= 0).sum())
                others = len(numbers) - documents
                tokens += documents / cost.layers
                flops += Flops(0.0, cost.of_tokens(documents, num_keys), cost.of_tokens(others, num_keys))
        return tokens, flops

    @contextmanager
    def observe(self, layers: Collection[int], watch: Watch) -> Iterator[None]:
        """Watch queries and keys of the runs within; see :func:`observed`."""
        with self.backbone.runner.lock, observed(self.backbone.model, layers, watch):
            yield

    def keep_only(self, numbers: Tensor) -> None:
        """Drop all other tokens from the context; those left move together and are numbered anew.

        Positions stay, so there are gaps in them, and an answer begins where it would have begun.
        """
        pool, old = self.backbone.pool, self.context
        new = pool.take(len(numbers) + self._room)
        for source, target in zip(old.buffers, new.buffers, strict=True):
            target[..., : len(numbers), :] = source[..., numbers, :]
        new.num_slots, new.num_positions = len(numbers), old.num_positions
        self.context, self.bound = new, self.backbone.bind(new)
        self.ids, self.chunk, self.positions = self.ids[numbers], self.chunk[numbers], self.positions[numbers]
        pool.give_back(old)


class PartialMethod(ABC):
    """A method that recomputes part of the chunks.

    Args:
        name: as it is called in tables.
        packets: of an encoder without adapter, so that a packet's tokens are the chunk's.

    Raises:
        UnsupportedModelError: the model takes no mask for tokens that are not next to each other.
    """

    def __init__(self, name: str, packets: CasePackets) -> None:
        if not packets.backbone.report.one_pass:
            raise UnsupportedModelError(
                f"{packets.backbone.name} takes no attention mask of its own; random tokens, EPIC, CacheBlend, A3 "
                "and SAM-KV need one to recompute tokens in the middle of a prompt"
            )
        self.name = name
        self._packets = packets
        self._cost = LayerCost.of(packets.backbone)

    def prepare(self, case: Case) -> None:
        """Encode the chunks."""
        self._packets.prepare(case)

    def prefill(self, case: Case) -> State:
        """See :meth:`Method.prefill`."""
        self.prepare(case)
        packets, parts = self._packets, self._packets.parts(case)
        Prefiller(packets.backbone, packets.encoder, packets.store).check_length(parts, case.max_new_tokens)
        started = time.perf_counter()
        loaded = [self.load(part) for part in parts]
        found = time.perf_counter()
        step = PartialStep(packets.backbone, loaded, case.max_new_tokens)
        assembled = time.perf_counter()
        try:
            with torch.inference_mode():
                logits = self._recompute(step)
            int(logits.argmax(-1))  # waits for the device
        except BaseException:
            packets.backbone.pool.give_back(step.context)
            raise
        ended = time.perf_counter()
        tokens, flops = step.spent(self._cost)
        return State(
            context=step.context,
            bound=step.bound,
            logits=logits,
            recomputed_tokens=tokens,
            packet_bytes=packets.size_bytes(part.packet_id for part in parts if part.packet_id),
            flops=flops + Flops(rotate=of_rotation(packets.backbone.plan, case.num_document_tokens)),
            load_seconds=found - started,
            assemble_seconds=assembled - found,
            prefill_seconds=ended - assembled,
        )

    def load(self, part: Part) -> Part:
        """The part with its packet, if it has one."""
        if part.packet_id is None:
            return part
        return replace(part, packet=self._packets.store.get(part.packet_id, self._packets.encoder.signature))

    @abstractmethod
    def _recompute(self, step: PartialStep) -> Tensor:
        """Compute all text and what the method chooses; (1, vocabulary) logits of the prompt's last token."""
