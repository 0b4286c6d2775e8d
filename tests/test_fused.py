"""The compiled realignment against the same work done by torch."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpacket_rag import fused
from kvpacket_rag.assemble import Assembly, ContextPool
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.rope import Layout, RotaryPlan, Rotation, TensorGroup, realign, realign_into

pytest.importorskip("numba")

FREQUENCIES = tuple(10000 ** (-k / 9) for k in range(9))


def done(steps: list[fused.Step]) -> bool:
    """Do the steps, one after another; whether there were any."""
    return bool([step() for step in steps])


def by_torch(source: Tensor, rotation: Rotation, shift: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "turning", lambda *_: [])
        return realign(source, rotation, shift)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loop_agrees_with_torch_to_the_last_rounding(layout: Layout, dtype: torch.dtype, monkeypatch):
    rotation = Rotation(layout, 2, FREQUENCIES)
    source = torch.randn(3, 2, 17, 23, generator=torch.Generator().manual_seed(1)).to(dtype)
    buffer = torch.zeros(3, 1, 2, 40, 23, dtype=dtype)
    target = buffer[:, 0, :, 9:26]
    assert done(fused.turning(target, source, layout, 2, rotation.turn(501, torch.float32, torch.device("cpu"))))
    expected = by_torch(source, rotation, 501, monkeypatch)
    tolerance = {torch.float32: 2e-7, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(target[..., 2:20], expected[..., 2:20], rtol=tolerance, atol=tolerance)


def test_every_bfloat16_survives_a_turn_by_nothing():
    """All 65,536 bit patterns, infinities among them; what is no number stays none."""
    source = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(1, 1, -1, 2)
    target, still = torch.zeros_like(source), (torch.ones(1), torch.zeros(1))
    finite = source.isfinite().all(-1)
    assert done(fused.turning(target, source, "half", 0, still))
    assert torch.equal(target[finite], source[finite])
    assert torch.equal(target.isnan()[source.isnan()], source.isnan()[source.isnan()])


def test_bfloat16_is_rounded_to_nearest_with_ties_to_even():
    """Against torch's own cast, where the products are exact in float32."""
    source = torch.randn(1, 1, 4096, 2, generator=torch.Generator().manual_seed(2)).bfloat16()
    target, factor = torch.zeros_like(source), 1.00390625
    assert done(fused.turning(target, source, "half", 0, (torch.tensor([factor]), torch.zeros(1))))
    assert torch.equal(target, (source.float() * factor).bfloat16())


def test_every_bfloat16_that_is_written_past_the_caches_is_that_of_the_plain_loop(monkeypatch):
    """All 65,536 bit patterns beside each other's; infinities times nothing among them, and ties."""
    source = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(1, 1, -1, 64)
    source = torch.cat([source, source.flip(3)], dim=2).contiguous()
    targets = torch.zeros(2, *source.shape, dtype=source.dtype)
    for turn in ((torch.ones(32), torch.zeros(32)), (torch.arange(32) / 256 + 1, torch.linspace(-1, 1, 32))):
        for target, least in zip(targets, (1 << 40, 1), strict=True):
            monkeypatch.setattr(fused, "_MIN_BYTES_STREAMED", least)
            assert done(fused.turning(target, source, "half", 0, turn))
        plain, streamed = targets
        assert torch.equal(plain.isnan(), streamed.isnan())
        assert torch.equal(plain.nan_to_num(), streamed.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_past_the_caches_is_the_same_but_for_the_last_rounding(dtype: torch.dtype, monkeypatch):
    rotation = Rotation("half", 0, tuple(10000 ** (-k / 32) for k in range(32)))
    source = torch.randn(3, 2, 17, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    source[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    buffers = torch.zeros(2, 3, 1, 2, 40, 64, dtype=dtype)
    turn = rotation.turn(501, torch.float32, torch.device("cpu"))
    for buffer, least in zip(buffers, (1 << 40, 1), strict=True):
        monkeypatch.setattr(fused, "_MIN_BYTES_STREAMED", least)
        assert done(fused.turning(buffer[:, 0, :, 9:26], source, "half", 0, turn))
    tolerance = {torch.float32: 2e-7, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(buffers[1], buffers[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    assert done(fused.copying(buffers[1][:, 0, :, 9:26], source))
    assert torch.equal(buffers[1][:, 0, :, 9:26].nan_to_num(), source.nan_to_num())
    assert not buffers[1][..., :9, :].any() and not buffers[1][..., 26:, :].any()


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_numbers_of_another_format_are_turned_into_a_large_context(kept: torch.dtype, monkeypatch):
    """As packets restored from few bits are: in float32, whatever the context holds."""
    monkeypatch.setattr(fused, "_MIN_BYTES_STREAMED", 1)
    rotation = Rotation("half", 0, tuple(10000 ** (-k / 32) for k in range(32)))
    other = torch.bfloat16 if kept == torch.float32 else torch.float32
    source = torch.randn(3, 2, 17, 64, generator=torch.Generator().manual_seed(5)).to(other)
    target = torch.zeros(source.shape, dtype=kept)
    realign_into(target, source, rotation, 501)
    expected = by_torch(source.float(), rotation, 501, monkeypatch).to(kept)
    torch.testing.assert_close(target, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "first", "start"), [(64, 0, 0), (64, 1, 0), (64, 9, 8), (48, 9, 0), (80, 9, 0), (23, 9, 2)]
)
def test_only_what_fits_whole_vectors_is_written_past_the_caches(width, first, start, monkeypatch):
    """Odd beginnings, widths and rotary parts give what torch gives."""
    monkeypatch.setattr(fused, "_MIN_BYTES_STREAMED", 1)
    pairs = (width - start) // 2
    rotation = Rotation("half", start, tuple(10000 ** (-k / pairs) for k in range(pairs)))
    memory = torch.zeros(3 * 2 * 40 * width + 64)
    buffer = memory[first : first + 3 * 2 * 40 * width].view(3, 2, 40, width)
    source = torch.randn(3, 2, 17, width, generator=torch.Generator().manual_seed(4))
    realign_into(buffer[:, :, 9:26], source, rotation, 501)
    torch.testing.assert_close(buffer[:, :, 9:26], by_torch(source, rotation, 501, monkeypatch), rtol=1e-5, atol=1e-6)
    realign_into(buffer[:, :, 9:26], source, None, 501)
    assert torch.equal(buffer[:, :, 9:26], source) and not buffer[:, :, 26:].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_several_threads_do_every_step_once(threads: int, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found: list[int] = []
    steps: deque[fused.Step] = deque(partial(found.append, number) for number in range(50))
    fused.in_threads(steps, 1 << 40)
    assert sorted(found) == list(range(50)) and not steps


def test_a_few_bytes_are_no_work_for_two(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(fused, "_threads", lambda: pytest.fail("a thread was woken"))
    found: list[int] = []
    fused.in_threads(deque(partial(found.append, number) for number in range(3)), 1 << 10)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("kind", [ZeroDivisionError, IndexError])
def test_what_a_step_raises_is_raised(kind: type[Exception], monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def work(fails: bool) -> None:
        if fails:
            raise kind

    for bad in range(3):
        with pytest.raises(kind):
            fused.in_threads(deque(partial(work, number == bad) for number in range(3)), 1 << 40)


def test_steps_are_done_where_no_thread_can_be_had(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    pool = ThreadPoolExecutor(max_workers=8)
    monkeypatch.setattr(fused, "_threads", lambda: pool)
    start, started = threading.Thread.start, []

    def only_once(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_once)
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.02)
        done.append(number)

    fused.in_threads(deque(partial(work, number) for number in range(20)), 1 << 40)
    assert sorted(done) == list(range(20)) and started
    monkeypatch.undo()
    pool.shutdown()


def test_nobody_is_at_work_any_more_when_a_step_has_failed(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    begun, failing, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            failing.set()
            raise ZeroDivisionError
        begun.set()
        assert failing.wait(60)
        time.sleep(0.2)
        done.set()

    steps: deque[fused.Step] = deque([work, work, lambda: pytest.fail("begun after the failure")])
    with pytest.raises(ZeroDivisionError):
        fused.in_threads(steps, 1 << 40)
    assert done.is_set() and not steps


def packet_of(plan: RotaryPlan, tokens: int) -> Packet:
    tensors = tuple(torch.randn(len(g.layers), g.heads, tokens, g.width) for g in plan.groups)
    return Packet("test", PacketSignature("w", "t", "none", plan.digest, "float32"), tensors, tokens, tokens)


@pytest.fixture
def plan() -> RotaryPlan:
    kinds = (("keys", Rotation("half", 0, FREQUENCIES)), ("values", None))
    return RotaryPlan(tuple(TensorGroup(name, tuple(range(5)), 2, 18, True, turn) for name, turn in kinds), 100)


def test_several_threads_lay_out_together_what_one_lays_out_packet_by_packet(plan: RotaryPlan, monkeypatch):
    packets = [packet_of(plan, tokens) for tokens in (11, 1, 7)]
    pool = ContextPool(plan, torch.float32, torch.device("cpu"))
    alone, shared = pool.take(30), pool.take(30)
    for context in (alone, shared):
        context.reserve(4)
    places = [alone.place(packet) for packet in packets]
    monkeypatch.setattr(fused, "_MIN_BYTES_A_THREAD", 1)
    monkeypatch.setattr(fused, "_MIN_BYTES_A_STEP", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assembly = Assembly(shared)
    assert [assembly.add(packet) for packet in packets] == places
    assembly.write()
    for place in places:
        for one, other in zip(alone.extract(place), shared.extract(place), strict=True):
            assert torch.equal(one, other)


def test_a_packet_is_let_go_of_once_it_is_written(plan: RotaryPlan):
    assembly = Assembly(ContextPool(plan, torch.float32, torch.device("cpu")).take(30))
    alive: list[weakref.ref[np.ndarray]] = []
    seen: list[int] = []

    def look() -> None:
        seen.append(sum(ref() is not None for ref in alive))

    for _ in range(3):
        arrays = [np.ones((5, 2, 7, 18), dtype=np.float32) for _ in range(2)]
        alive += [weakref.ref(array) for array in arrays]
        packet = packet_of(plan, 7)
        assembly.add(replace(packet, tensors=tuple(torch.from_numpy(array) for array in arrays)))
        assembly._steps.append(look)
    del arrays, packet
    assembly.write()
    assert seen == [4, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_only_copied_is_not_left_to_torch(dtype: torch.dtype, monkeypatch):
    source = torch.randn(5, 2, 11, 18).to(dtype)
    buffer = torch.zeros(5, 1, 2, 40, 18, dtype=dtype)
    target = buffer[:, 0, :, 9:20]
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("torch copied"))
    for rotation, shift in ((None, 60), (Rotation("half", 0, FREQUENCIES), 0)):
        target.zero_()
        realign_into(target, source, rotation, shift)
        assert torch.equal(target, source)
    assert not buffer[..., :9, :].any() and not buffer[..., 20:, :].any()
    assert not fused.copying(target.double(), source) and not fused.copying(target, source.transpose(2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_formats_are_left_to_torch(dtype: torch.dtype):
    source = torch.randn(1, 1, 3, 18).to(dtype)
    target = torch.zeros_like(source)
    turn = Rotation("half", 0, FREQUENCIES).turn(5, torch.float32, torch.device("cpu"))
    assert not done(fused.turning(target, source, "half", 0, turn))
    assert not target.any()


def test_without_the_compiler_torch_does_the_work(monkeypatch):
    rotation, source = Rotation("half", 0, FREQUENCIES), torch.randn(2, 2, 6, 18)
    compiled = realign(source, rotation, 9)
    fused._loops.cache_clear()
    monkeypatch.setitem(sys.modules, "kvpacket_rag.fused_loops", None)
    target = torch.zeros_like(source)
    realign_into(target, source, rotation, 9)
    fused._loops.cache_clear()
    torch.testing.assert_close(target, compiled, rtol=1e-6, atol=1e-6)


def test_loops_are_compiled_where_nothing_can_be_kept_on_disk():
    """As for a user who can write neither the package's folder nor a home; in a process of its own."""
    script = (
        "import torch, numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from kvpacket_rag.fused import copying\n"
        "source, target = torch.ones(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)\n"
        "[step() for step in copying(target, source)]\n"
        "assert torch.equal(target, source)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
