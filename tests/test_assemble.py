"""Memory that contexts are written into."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from kvpacket_rag.assemble import ContextPool
from kvpacket_rag.rope import RotaryPlan, TensorGroup

SLOTS = 4096
PLAN = RotaryPlan((TensorGroup("keys", (0, 1), 2, 64, True, None),), SLOTS)  # 4 MB in float32
SMAPS = Path("/proc/self/smaps")


def is_advised(address: int) -> bool:
    """Whether the system was asked for huge pages at an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no such pages")
def test_large_buffers_ask_for_huge_pages():
    (buffer,) = ContextPool(PLAN, torch.float32, torch.device("cpu")).take(SLOTS).buffers
    if "VmFlags" not in SMAPS.read_text() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system does not tell, or was built without such pages")
    assert buffer.nbytes >= 1 << 22 and is_advised(buffer.data_ptr() + buffer.nbytes // 2)


def test_small_buffers_do_not(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda *_: pytest.fail("asked for huge pages"))
    assert ContextPool(PLAN, torch.float32, torch.device("cpu")).take(64).capacity == 256


def test_systems_without_huge_pages_serve_small_ones(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda *_: pytest.fail("asked for huge pages"))
    assert ContextPool(PLAN, torch.float32, torch.device("cpu")).take(SLOTS).capacity == SLOTS
