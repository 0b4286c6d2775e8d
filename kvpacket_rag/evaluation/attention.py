"""Where the tokens of a question look: attention over ``preamble | packet | packet | … | question``.

The probabilities are the model's own, taken from its eager attention, so that every query head is paired with
the key-value head it has in the model. They are averaged over heads and question tokens; averages of logits,
taken to probabilities afterwards, would be something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.assemble import Context, Span
from kvpacket_rag.attach import decoder_layers
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.evaluation.case import Case
from kvpacket_rag.evaluation.measure import prefilled
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.evaluation.plots import new_figure, save
from kvpacket_rag.parts import Part, absorb
from kvpacket_rag.runner import BoundContext

_KINDS = {"preamble": "#999999", "chunk": "#56B4E9", "soft tokens": "#D55E00", "text": "#000000", "question": "#009E73"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of slots of one kind: ``"preamble"``, ``"chunk"``, ``"soft tokens"``, ``"text"`` or ``"question"``."""

    kind: str
    start: int
    stop: int


def segments(parts: Sequence[Part], adapter: Adapter) -> list[Segment]:
    """What stands where in a context that packets of this adapter and the text between them fill.

    Args:
        parts: of the prompt; the last one is the question.
        adapter: of the packets; chunks without a packet id are text.
    """
    trailer = adapter.trailer.shape[0]
    header = adapter.stored_tokens - trailer
    found: list[Segment] = []
    pieces = absorb(parts) if adapter.absorbs else list(parts)
    for number, part in enumerate(pieces):
        kind = "question" if number == len(pieces) - 1 else "text" if number else "preamble"
        runs = [(kind, part.num_tokens)]
        if part.packet_id is not None:
            runs = [("soft tokens", header), ("chunk", part.num_tokens), ("soft tokens", trailer)]
        for name, count in runs:
            start = found[-1].stop if found else 0
            if count:
                found.append(Segment(name, start, start + count))
    return found


def question_attention(backbone: Backbone, bound: BoundContext, context: Context, question: Sequence[int]) -> Tensor:
    """Attention probabilities of the question's tokens over the whole context.

    The question is read once more at the place where it stands already, which leaves the context as it was, up to
    rounding.

    Args:
        backbone: the model.
        bound: the context as the model takes it.
        context: filled; the question's tokens are its last.
        question: token ids.

    Returns:
        (layers, slots) float32, the mean over heads and question tokens; each row sums to 1.

    Raises:
        UnsupportedModelError: the model does not show its attention probabilities.
    """
    count = len(question)
    place = Span(context.num_slots - count, context.num_positions - count, count)
    with backbone.runner.lock, _recorded(backbone.model) as found:
        backbone.prefill(bound, [(place, list(question))])
    if any(layer.shape[-1] != context.num_slots for layer in found) or not found:
        raise UnsupportedModelError(f"{backbone.name} does not show how it attends to the whole context")
    return torch.stack(found)


@contextmanager
def _recorded(model: Any) -> Iterator[list[Tensor]]:
    """Within it, forwards leave (slots,) mean probabilities of every layer behind, computed the slow way."""
    found: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if isinstance(weights, Tensor) and weights.dim() == 4:  # (batch, heads, queries, keys)
            found.append(weights[0].float().mean((0, 1)).cpu())

    before = model.config._attn_implementation
    hooks = [
        module.register_forward_hook(record)
        for layer in decoder_layers(model)
        for name, module in layer.named_children()
        if "attn" in name or "attention" in name
    ]
    try:
        model.set_attn_implementation("eager")
        yield found
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def mass(attention: Tensor, parts: Sequence[Segment]) -> dict[str, float]:
    """Share of the attention on every kind of segment, the mean over layers."""
    slots = attention.mean(0)
    found: dict[str, float] = {}
    for segment in parts:
        found[segment.kind] = found.get(segment.kind, 0.0) + float(slots[segment.start : segment.stop].sum())
    return found


def draw_attention(backbone: Backbone, case: Case, adapter: Adapter, path: Path) -> None:
    """Measure and draw how the question of a prompt looks at plain concatenation, and at packets of an adapter.

    Args:
        backbone: the model.
        case: the prompt.
        adapter: of the packets.
        path: of the picture.

    Raises:
        UnsupportedModelError: the model does not show its attention probabilities.
        ContextTooLongError: the prompt exceeds the model's window.
        MissingExtraError: matplotlib is not installed.
    """
    bench = Bench(backbone, adapter)
    question = case.parts[-1].ids or []
    panels = {}
    for name, title in (("plain", "Plain concatenation"), ("packet", "Packets")):
        with prefilled(backbone, parse_method(name, bench), case) as state:
            found = question_attention(backbone, state.bound, state.context, question)
        used = adapter if name == "packet" else Adapter.empty(backbone.hidden_size)
        panels[title] = found, segments(case.parts, used)
    plot_attention(panels, path)


def plot_attention(panels: Mapping[str, tuple[Tensor, Sequence[Segment]]], path: Path) -> None:
    """A picture of attention over slots, one panel for each way of building the context.

    Args:
        panels: title to (layers, slots) probabilities and what stands in the slots.
        path: of the picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = new_figure(9, 2.6 * len(panels) + 0.6)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, (attention, places)) in zip(axes, panels.items(), strict=True):
        slots = attention.mean(0)
        for kind, colour in _KINDS.items():
            chosen = [slot for s in places if s.kind == kind for slot in range(s.start, s.stop)]
            if chosen:
                share = float(slots[chosen].sum())
                axis.bar(chosen, slots[chosen].tolist(), width=1.0, color=colour, label=f"{kind} {share:.0%}")
        for segment in places[1:]:
            axis.axvline(segment.start - 0.5, color="#cccccc", linewidth=0.5, zorder=0)
        axis.set(ylabel="probability", xlim=(-0.5, len(slots) - 0.5))
        axis.set_yscale("log")
        axis.set_title(title, loc="left")
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, fontsize="small", frameon=False)
    axes[-1].set_xlabel("slot of the context")
    save(figure, path)
