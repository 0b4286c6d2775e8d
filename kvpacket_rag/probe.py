"""Measures, on the live model, what is cached and how it carries position; proves it, or refuses.

A short random chunk is prefilled at position 0 and at several offsets. Whatever differs between
the two caches is position, and it must be a rotation by one of the model's own frequencies. Then
the laws are checked (see ``laws``). A model that breaks one cannot be served from packets, and is
refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpacket_rag import laws
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.laws import row_error, rows, snapshot, tolerance
from kvpacket_rag.rope import Layout, RotaryPlan, Rotation, TensorGroup, realign
from kvpacket_rag.runner import ModelRunner
from kvpacket_rag.snapshot import Snapshot

_LENGTH = 37  # tokens; no model has a tensor of this size by accident
_OFFSETS = (1, 11, 500)
_Samples = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        plan: the measured rotary plan, with the positions it holds for.
        one_pass: text and packets in any order can be prefilled in one forward.
        takes_embeddings: soft tokens can be fed; without it the model works with an empty adapter only.
        error_shift: largest relative error of law A at the near offsets.
        error_packets: relative error of the logits of law B.
    """

    plan: RotaryPlan
    one_pass: bool
    takes_embeddings: bool
    error_shift: float
    error_packets: float


@torch.inference_mode()
def probe(runner: ModelRunner, seed: int = 0) -> ProbeReport:
    """Measure and prove the plan of a live model; about fifteen short forwards.

    Raises:
        UnsupportedModelError: saying what the model caches that cannot be moved, or which law broke.
    """
    inputs, base = _first_snapshot(runner, seed)
    runner.learn_layers(base)
    offsets = [o for o in _OFFSETS if o + inputs.shape[1] <= laws.model_window(runner)] or _OFFSETS[:2]
    shifted = {offset: snapshot(runner, inputs, offset) for offset in offsets}
    groups, error_shift = _measure(runner, base, shifted)
    if not any(group.rotation for group in groups):
        laws.check_slots(runner, inputs, base)
    plan = RotaryPlan(groups, laws.valid_positions(runner, inputs, base, groups))
    error_packets, one_pass = laws.check_packets(runner, plan, inputs)
    return ProbeReport(plan, one_pass, laws.takes_embeddings(runner, inputs), error_shift, error_packets)


def _first_snapshot(runner: ModelRunner, seed: int) -> tuple[Tensor, Snapshot]:
    """Random token ids short enough for every sliding window, and what they leave in the cache."""
    vocabulary: int = runner.model.get_input_embeddings().weight.shape[0]  # type: ignore[index, assignment]
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, min(vocabulary, 30000), (1, _LENGTH), generator=generator).to(runner.device)
    base = snapshot(runner, inputs, 0)
    windows = {getattr(layer, "sliding_window", None) for layer in base.layers}
    shortest = min((w for w in windows if isinstance(w, int)), default=_LENGTH + 1)
    if shortest <= _LENGTH:
        inputs = inputs[:, : max(2, shortest - 1)]
        base = snapshot(runner, inputs, 0)
    if base.states or not base.tensors:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} caches {', '.join(sorted(set(base.states))) or 'nothing by token'}, "
            "a state without a token axis (recurrent, convolutional or compressed); packets cannot be concatenated"
        )
    return inputs, base


def _measure(
    runner: ModelRunner, base: Snapshot, shifted: dict[int, Snapshot]
) -> tuple[tuple[TensorGroup, ...], float]:
    """Find every tensor's rotation and stack equal ones into groups, in order of first layer."""
    frequencies = list(_frequencies(runner))
    layers: dict[tuple[str, int, int, bool, Rotation | None], list[int]] = {}
    worst = 0.0
    for (layer, name), tensor in base.tensors.items():
        if not tensor.numel():
            continue
        samples = {o: (rows(tensor), rows(snap.tensors[layer, name])) for o, snap in shifted.items()}
        rotation, error = _fit(samples, frequencies, tolerance(runner), f"{name} of layer {layer}")
        worst = max(worst, error)
        has_heads = tensor.dim() == 4
        key = (name, tensor.shape[1] if has_heads else 1, tensor.shape[-1], has_heads, rotation)
        layers.setdefault(key, []).append(layer)
    groups = tuple(
        TensorGroup(name, tuple(numbers), heads, width, has_heads, rotation)
        for (name, heads, width, has_heads, rotation), numbers in layers.items()
    )
    return groups, worst


def _frequencies(runner: ModelRunner) -> Iterator[tuple[float, ...]]:
    """Every distinct frequency vector the live model keeps, as the values its forward really uses."""
    seen: set[tuple[float, ...]] = set()
    for module in runner.model.modules():
        attributes = dict(module.named_buffers(recurse=False))
        attributes |= {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        for name, value in attributes.items():
            if "inv_freq" in name and value.dim() == 1 and value.numel():
                vector = tuple(value.detach().float().double().cpu().tolist())
                if vector not in seen:
                    seen.add(vector)
                    yield vector


def _textbook_frequencies(width: int) -> Iterator[tuple[float, ...]]:
    """For models that keep a table of sines instead: 10000^(-2k/d) for every rotary width d."""
    for pairs in range(1, width // 2 + 1):
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / (2 * pairs)
        yield tuple((1.0 / (10000.0**exponents)).double().tolist())


def _fit(
    samples: _Samples, frequencies: list[tuple[float, ...]], allowed: float, what: str
) -> tuple[Rotation | None, float]:
    """The rotation that turns the base rows into the shifted ones at every offset, and its error."""
    still = max(row_error(a, b) for a, b in samples.values())
    if still < allowed:
        return None, still
    width = next(iter(samples.values()))[0].shape[-1]
    best: Rotation | None = None
    best_error = still
    for vectors in (frequencies, list(_textbook_frequencies(width))):
        for candidate in _candidates(vectors, width):
            error = _error_of(candidate, samples, best_error)
            if error < best_error:
                best, best_error = candidate, error
        if best is not None and best_error < allowed and best_error < 0.3 * still:
            return best, best_error
    raise UnsupportedModelError(
        f"the {what} change with position, but not by a rotation at one of the model's frequencies "
        f"(best fit leaves a relative error of {best_error:.1e}, allowed {allowed:.0e}); packets cannot be moved"
    )


def _candidates(vectors: list[tuple[float, ...]], width: int) -> Iterator[Rotation]:
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    for vector in vectors:
        if 2 * len(vector) <= width:
            for layout in layouts:
                for start in sorted({0, width - 2 * len(vector)}):
                    yield Rotation(layout, start, vector)
                    yield Rotation(layout, start, tuple(-f for f in vector))


def _error_of(rotation: Rotation, samples: _Samples, give_up: float) -> float:
    worst = 0.0
    for offset in sorted(samples):
        before, after = samples[offset]
        worst = max(worst, row_error(realign(before[None], rotation, offset)[0], after))
        if worst > give_up:
            break
    return worst
