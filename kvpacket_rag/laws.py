"""The two laws a model must keep to be served from packets, checked against its own forward.

A  a packet moved by a shift equals the chunk encoded at the new positions, out to the end of the window;
B  packets laid end to end and a question give the logits of the model's own forward in which
   each packet sees only itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpacket_rag.assemble import Context, ContextPool
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.rope import RotaryPlan, TensorGroup, realign
from kvpacket_rag.runner import ModelRunner
from kvpacket_rag.snapshot import Snapshot

_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}  # relative error of a row; half precision: 8e-2
_LOGITS_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}  # half precision: 0.25, as experts may flip
_FAR_TOLERANCE = 3e-3  # the model's own float32 angles drift by this much at large positions
_TAIL = 15  # tokens that decide whether a position is still valid; half of them must be right


def tolerance(runner: ModelRunner) -> float:
    """Relative error a row may have in the model's precision."""
    return _TOLERANCES.get(runner.dtype, 8e-2)


def _logits_tolerance(runner: ModelRunner) -> float:
    return _LOGITS_TOLERANCES.get(runner.dtype, 0.25)


def rows(tensor: Tensor) -> Tensor:
    """(rows, width) on the host in float64."""
    return tensor.detach().cpu().double().reshape(-1, tensor.shape[-1])


def row_error(found: Tensor, expected: Tensor) -> float:
    """Median over rows of the relative error; the median, since a flipped expert router must not decide."""
    scale = expected.norm(dim=-1).clamp_min(1e-30)
    return float(((found - expected).norm(dim=-1) / scale).median())


def snapshot(runner: ModelRunner, inputs: Tensor, offset: int, move_slots: bool = False) -> Snapshot:
    """What the model caches for ``inputs`` from position ``offset``.

    Raises:
        UnsupportedModelError: the model fails on plain token ids.
    """
    try:
        return runner.snapshot(inputs, offset, move_slots)
    except UnsupportedModelError:
        raise
    except Exception as error:  # anything a foreign architecture may do with plain token ids
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} failed on {inputs.shape[1]} plain tokens from position {offset}: {error}"
        ) from error


def check_slots(runner: ModelRunner, inputs: Tensor, base: Snapshot) -> None:
    """Shift the slots of a model that looks position-free.

    Raises:
        UnsupportedModelError: it counts cache slots instead of reading position ids.
    """
    dummies = 5
    longer = torch.cat([inputs[:, :dummies], inputs], 1)
    mask = torch.ones_like(longer)
    mask[:, :dummies] = 0
    _, cache = runner.forward(longer, None, None, mask)
    for (number, name), tensor in base.tensors.items():
        moved = getattr(cache.layers[number], name).narrow(tensor.dim() - 2, dummies, inputs.shape[1])
        error = row_error(rows(moved), rows(tensor))
        if error > tolerance(runner):
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} places tokens by their cache slot (learned or absolute positions; "
                f"{name} of layer {number} differ by {error:.1e}); packets cannot be moved"
            )


def valid_positions(runner: ModelRunner, inputs: Tensor, base: Snapshot, groups: tuple[TensorGroup, ...]) -> int:
    """Law A far away; the positions up to which it holds.

    What changes with the absolute position (frequencies, the temperature of queries) stays changed,
    so the law is tried across the last power of two and at the end of the window, and where it is
    broken the last good position is searched by halving.

    Args:
        runner: of the model.
        inputs: what ``base`` was made of.
        base: the cache at position 0.
        groups: the measured plan.
    """
    length, window = inputs.shape[1], model_window(runner)
    end = max(0, window - length)
    crossing = 2 ** max(0, window.bit_length() - 2) - length // 2
    good = 0
    for offset in (max(0, min(crossing, end)), end):
        if not _holds(runner, inputs, base, groups, offset):
            good = _last_good(good, offset, lambda o: _holds(runner, inputs, base, groups, o))
            return good + length - _TAIL // 2
        good = offset
    return window


def model_window(runner: ModelRunner) -> int:
    """Positions the config allows, within one chunk of chunked attention, whose edges are absolute positions."""
    config = runner.model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    window = int(next((limit for limit in limits if limit), 2048))
    return min(window, int(getattr(config, "attention_chunk_size", None) or window))


def _last_good(good: int, bad: int, holds: Callable[[int], bool]) -> int:
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def _holds(runner: ModelRunner, inputs: Tensor, base: Snapshot, groups: tuple[TensorGroup, ...], offset: int) -> bool:
    """Whether the last tokens of ``inputs`` at ``offset`` are those of ``base``, moved."""
    try:
        far = _far_snapshot(runner, inputs, offset)
    except UnsupportedModelError:  # a table of angles ends here
        return False
    worst = max(
        row_error(
            rows(realign(base.tensors[layer, group.name][..., -_TAIL:, :], group.rotation, offset)),
            rows(far.tensors[layer, group.name][..., -_TAIL:, :]),
        )
        for group in groups
        for layer in group.layers
    )
    return worst <= max(tolerance(runner), _FAR_TOLERANCE)


def _far_snapshot(runner: ModelRunner, inputs: Tensor, offset: int) -> Snapshot:
    try:
        return snapshot(runner, inputs, offset, move_slots=True)
    except UnsupportedModelError:  # distances taken from the mask, as in ALiBi, need the slots to be there
        return snapshot(runner, inputs, offset)


def check_packets(runner: ModelRunner, plan: RotaryPlan, ids: Tensor) -> tuple[float, bool]:
    """Law B against the model's own cache, where a 2D mask hides the first packet from the second.

    Returns:
        The relative error of the logits, and whether they also come out right when text, packet and
        text are put into one forward with an explicit mask.

    Raises:
        UnsupportedModelError: the logits differ.
    """
    a, b, question = _thirds(ids)
    expected = _own_answer(runner, a, b, question)
    packets = [_encode_alone(runner, plan, part) for part in (a, b)]
    context = _pool(runner, plan).take(ids.shape[1])
    for packet in packets:
        _place(packet, context)
    error = row_error(rows(_run_text(runner, context, question)), expected)
    allowed = _logits_tolerance(runner)
    if error > allowed:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} answers packets with other logits than its own masked forward "
            f"(relative error {error:.1e}, allowed {allowed:.0e}): its attention depends on the absolute position"
        )
    try:
        found = _one_pass(runner, a, packets[1], question)
    except Exception:  # an architecture that takes no 4D mask; text is then prefilled piece by piece
        return error, False
    return error, row_error(rows(found), expected) < allowed


def _own_answer(runner: ModelRunner, a: Tensor, b: Tensor, question: Tensor) -> Tensor:
    """Logits after ``question``, which sees ``a`` and ``b``, which see themselves."""
    start, end = a.shape[1], a.shape[1] + b.shape[1]
    _, cache = runner.forward(a, _count(a, 0))
    hidden = torch.cat([torch.zeros_like(a), torch.ones_like(b)], 1)
    _, cache = runner.forward(b, _count(b, start), cache, hidden)
    seen = torch.ones((1, end + question.shape[1]), dtype=torch.long, device=a.device)
    logits, _ = runner.forward(question, _count(question, end), cache, seen)
    return rows(logits[:, -1])


def _one_pass(runner: ModelRunner, text: Tensor, packet: Context, question: Tensor) -> Tensor:
    """Text, packet, text; text in front sees what a packet there sees, so the answer is that of two packets."""
    context = _pool(runner, packet.plan).take(text.shape[1] + packet.num_slots + question.shape[1])
    first = context.reserve(text.shape[1])
    _place(packet, context)
    last = context.reserve(question.shape[1])
    slots = torch.cat([torch.arange(s.slot, s.slot + s.num_tokens) for s in (first, last)]).to(text.device)
    both, mask = torch.cat([text, question], 1), runner.masks(slots, context.num_slots)
    return runner.bind(context).run(both, slots, slots[None], context.num_slots, mask)


def takes_embeddings(runner: ModelRunner, ids: Tensor) -> bool:
    """Whether soft tokens can be fed: embeddings mean what their ids mean, and need be no token's own."""
    embeddings = runner.model.get_input_embeddings()(ids)
    soft = (embeddings + embeddings.flip(1)) / 2
    positions = _count(ids, 0)
    expected, _ = runner.forward(ids, positions, wanted="all")
    try:
        found, _ = runner.forward(torch.cat([embeddings, soft]), positions.repeat(2, 1), wanted="all")
    except Exception:  # an architecture that needs the ids themselves
        return False
    return row_error(rows(found[:1]), rows(expected)) < tolerance(runner)


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


def _encode_alone(runner: ModelRunner, plan: RotaryPlan, ids: Tensor) -> Context:
    """A context that holds one chunk, encoded from position 0 as chunks are: up to the last layer's keys."""
    alone = _pool(runner, plan).take(ids.shape[1])
    span = alone.reserve(ids.shape[1])
    runner.bind(alone).fill(ids, slice(0, span.num_tokens), _count(ids, 0), span.num_tokens)
    return alone


def _place(alone: Context, context: Context) -> None:
    """Realign an encoded chunk to the next slots of ``context``, as serving does."""
    span = context.reserve(alone.num_slots)
    slots = slice(span.slot, span.slot + span.num_tokens)
    for source, target, group in zip(alone.buffers, context.buffers, context.plan.groups, strict=True):
        target[:, 0, :, slots].copy_(realign(source[:, 0, :, : span.num_tokens], group.rotation, span.position))
