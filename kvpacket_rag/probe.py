"""Measures, on the live model, what is cached and how it carries position; proves it, or refuses.

A short random chunk is prefilled at position 0 and at several offsets. Whatever differs between
the two caches is position, and it must be a rotation by one of the model's own frequencies. Then
two laws are checked:

    A  shifting equals encoding at the new position, out to the end of the window;
    B  packets laid end to end and a question give the logits of the model's own forward in which
       each packet sees only itself.

A model that breaks one cannot be served from packets, and is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpacket_rag.assemble import Context, ContextPool
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.rope import Layout, RotaryPlan, Rotation, TensorGroup, realign
from kvpacket_rag.runner import ModelRunner, Snapshot

_LENGTH = 37
_OFFSETS = (1, 3, 11, 64, 500)
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}  # relative error of a row; half precision: 8e-2
_FAR_TOLERANCE = 3e-3  # the model's own float32 angles drift by this much at large positions
_Samples = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        plan: the measured rotary plan, with the positions it holds for.
        one_pass: text and packets in any order can be prefilled in one forward.
        error_shift: largest relative error of law A at the near offsets.
        error_packets: relative error of the logits of law B.
    """

    plan: RotaryPlan
    one_pass: bool
    error_shift: float
    error_packets: float


@torch.inference_mode()
def probe(runner: ModelRunner, seed: int = 0) -> ProbeReport:
    """Measure and prove the plan of a live model; about twenty short forwards.

    Raises:
        UnsupportedModelError: saying what the model caches that cannot be moved, or which law broke.
    """
    inputs, base = _first_snapshot(runner, seed)
    runner.learn_layers(base)
    shifted = {offset: _snapshot(runner, inputs, offset) for offset in _OFFSETS}
    groups, error = _measure(runner, base, shifted)
    if not any(group.rotation for group in groups):
        _check_slots(runner, inputs, base)
    window = _window(runner)
    plan = RotaryPlan(groups, _valid_positions(runner, inputs, base, groups, window))
    error_packets = _check_packets(runner, plan, inputs[:1])
    return ProbeReport(plan, _one_pass_is_exact(runner, plan, inputs[:1]), error, error_packets)


def _first_snapshot(runner: ModelRunner, seed: int) -> tuple[Tensor, Snapshot]:
    """Random token ids short enough for every sliding window, and what they leave in the cache."""
    vocabulary = runner.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, min(vocabulary, 30000), (2, _LENGTH), generator=generator).to(runner.device)
    windows = {getattr(layer, "sliding_window", None) for layer in _snapshot(runner, inputs, 0).layers}
    shortest = min((w for w in windows if isinstance(w, int)), default=_LENGTH + 1)
    inputs = inputs[:, : min(_LENGTH, max(2, shortest - 1))]
    base = _snapshot(runner, inputs, 0)
    if base.states or not base.tensors:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} caches {', '.join(sorted(set(base.states))) or 'nothing by token'}, "
            "a state without a token axis (recurrent, convolutional or compressed); packets cannot be concatenated"
        )
    return inputs, base


def _snapshot(runner: ModelRunner, inputs: Tensor, offset: int) -> Snapshot:
    try:
        return runner.snapshot(inputs, offset)
    except UnsupportedModelError:
        raise
    except Exception as error:  # anything a foreign architecture may do with plain token ids
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} failed on {inputs.shape[1]} plain tokens from position {offset}: {error}"
        ) from error


def _tolerance(runner: ModelRunner) -> float:
    return _TOLERANCES.get(runner.dtype, 8e-2)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double().reshape(-1, tensor.shape[-1])


def row_error(found: Tensor, expected: Tensor) -> float:
    """Median over rows of the relative error; the median, since a flipped expert router must not decide."""
    scale = expected.norm(dim=-1).clamp_min(1e-30)
    return float(((found - expected).norm(dim=-1) / scale).median())


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
        samples = {o: (_rows(tensor), _rows(snap.tensors[layer, name])) for o, snap in shifted.items()}
        rotation, error = _fit(samples, frequencies, _tolerance(runner), f"{name} of layer {layer}")
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
    samples: _Samples, frequencies: list[tuple[float, ...]], tolerance: float, what: str
) -> tuple[Rotation | None, float]:
    """The rotation that turns the base rows into the shifted ones at every offset, and its error."""
    still = max(row_error(a, b) for a, b in samples.values())
    if still < tolerance:
        return None, still
    width = next(iter(samples.values()))[0].shape[-1]
    best: Rotation | None = None
    best_error = still
    for vectors in (frequencies, list(_textbook_frequencies(width))):
        for candidate in _candidates(vectors, width):
            error = _error_of(candidate, samples, best_error)
            if error < best_error:
                best, best_error = candidate, error
        if best is not None and best_error < tolerance and best_error < 0.3 * still:
            return best, best_error
    raise UnsupportedModelError(
        f"the {what} change with position, but not by a rotation at one of the model's frequencies "
        f"(best fit leaves a relative error of {best_error:.1e}, allowed {tolerance:.0e}); packets cannot be moved"
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


def _check_slots(runner: ModelRunner, inputs: Tensor, base: Snapshot) -> None:
    """Models that count cache slots instead of reading position ids look position-free: shift the slots."""
    dummies = 5
    longer = torch.cat([inputs[:, :dummies], inputs], 1)
    mask = torch.ones_like(longer)
    mask[:, :dummies] = 0
    _, cache = runner.forward(longer, None, None, mask)
    for (number, name), tensor in base.tensors.items():
        moved = getattr(cache.layers[number], name).narrow(tensor.dim() - 2, dummies, inputs.shape[1])
        error = row_error(_rows(moved), _rows(tensor))
        if error > _tolerance(runner):
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} places tokens by their cache slot (learned or absolute positions; "
                f"{name} of layer {number} differ by {error:.1e}); packets cannot be moved"
            )


def _window(runner: ModelRunner) -> int:
    config = runner.model.config.get_text_config(decoder=True)
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048)


def _valid_positions(
    runner: ModelRunner, inputs: Tensor, base: Snapshot, groups: tuple[TensorGroup, ...], window: int
) -> int:
    """Law A at growing offsets; the positions up to which it holds."""
    length, tolerance = inputs.shape[1], max(_tolerance(runner), _FAR_TOLERANCE)
    proved, offset = min(window, _OFFSETS[-1] + length), 1000
    offsets = []
    while offset + length < window:
        offsets.append(offset)
        offset *= 2
    if window - length > _OFFSETS[-1]:
        offsets.append(window - length)
    for offset in offsets:
        far = _snapshot(runner, inputs, offset)
        if _shift_error(base, far, groups, offset) > tolerance:
            break
        proved = offset + length
    _snapshot(runner, inputs, 0)  # rotary modules that keep a regime fall back to the short one
    return proved


def _shift_error(base: Snapshot, far: Snapshot, groups: tuple[TensorGroup, ...], offset: int) -> float:
    return max(
        row_error(
            _rows(realign(base.tensors[layer, group.name], group.rotation, offset)),
            _rows(far.tensors[layer, group.name]),
        )
        for group in groups
        for layer in group.layers
    )


def _check_packets(runner: ModelRunner, plan: RotaryPlan, ids: Tensor) -> float:
    """Law B against the model's own cache, where a 2D mask hides the first packet from the second."""
    a, b, question = _thirds(ids)
    _, cache = runner.forward(a, _count(a, 0))
    hidden = torch.cat([torch.zeros_like(a), torch.ones_like(b)], 1)
    _, cache = runner.forward(b, _count(b, a.shape[1]), cache, hidden)
    seen = torch.ones((1, ids.shape[1]), dtype=torch.long, device=ids.device)
    expected, _ = runner.forward(question, _count(question, a.shape[1] + b.shape[1]), cache, seen)
    context = _pool(runner, plan).take(ids.shape[1])
    for packet in (a, b):
        _place_alone(runner, plan, packet, context)
    found = _run_text(runner, context, question)
    error = row_error(_rows(found), _rows(expected[:, -1]))
    if error > _tolerance(runner):
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} answers packets with other logits than its own masked forward "
            f"(relative error {error:.1e}, allowed {_tolerance(runner):.0e}): its attention depends on the absolute position"
        )
    return error


def _one_pass_is_exact(runner: ModelRunner, plan: RotaryPlan, ids: Tensor) -> bool:
    """Text, packet, text in one forward with an explicit mask, against one forward a piece of text."""
    text, packet, question = _thirds(ids)
    step, whole = (_pool(runner, plan).take(ids.shape[1]) for _ in range(2))
    _run_text(runner, step, text)
    _place_alone(runner, plan, packet, step)
    expected = _run_text(runner, step, question)
    first = whole.reserve(text.shape[1])
    _place_alone(runner, plan, packet, whole)
    last = whole.reserve(question.shape[1])
    slots = torch.cat([torch.arange(s.slot, s.slot + s.num_tokens) for s in (first, last)]).to(ids.device)
    try:
        mask = runner.masks(slots, whole.num_slots)
        both = torch.cat([text, question], 1)
        found = runner.bind(whole).run(both, slots, slots[None], whole.num_slots, mask)
    except Exception:  # an architecture that takes no 4D mask; text is then prefilled piece by piece
        return False
    return row_error(_rows(found), _rows(expected)) < _tolerance(runner)


def _thirds(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    third = max(1, ids.shape[1] // 3)
    return ids[:, :third], ids[:, third : 2 * third + 1], ids[:, 2 * third + 1 :]


def _count(ids: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + ids.shape[1], device=ids.device)[None]


def _pool(runner: ModelRunner, plan: RotaryPlan) -> ContextPool:
    return ContextPool(plan, runner.dtype, runner.device)


def _run_text(runner: ModelRunner, context: Context, ids: Tensor) -> Tensor:
    span = context.reserve(ids.shape[1])
    where = slice(span.slot, span.slot + span.num_tokens)
    return runner.bind(context).run(ids, where, _count(ids, span.position), context.num_slots)


def _place_alone(runner: ModelRunner, plan: RotaryPlan, ids: Tensor, context: Context) -> None:
    """Encode a chunk alone from position 0 and realign it into ``context``, as serving does."""
    alone = _pool(runner, plan).take(ids.shape[1])
    _run_text(runner, alone, ids)
    span = context.reserve(ids.shape[1])
    whole = alone.buffers, context.buffers, plan.groups
    for source, target, group in zip(*whole, strict=True):
        rows = slice(span.slot, span.slot + span.num_tokens)
        moved = realign(source[:, 0, :, : ids.shape[1]], group.rotation, span.position)
        target[:, 0, :, rows].copy_(moved)
