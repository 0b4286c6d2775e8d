"""What figures were measured on, and clocks that are fair to both sides."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_REST = 0.005  # seconds; torch's threads spin for 3 ms after their work and would take a core from what comes next


def describe(dtype: torch.dtype, device: torch.device) -> str:
    """Card or processor, threads, number format and versions, in one line."""
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{'Apple GPU, ' if device.type == 'mps' else ''}{_processor()}, {torch.get_num_threads()} threads"
    return f"{place}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of each repeat, begun when the threads of what came before are at rest."""
    found = []
    for _ in range(repeats):
        time.sleep(_REST)
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found


def median_of_turns(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each, measured in turns so that a busy moment hits all alike; one round goes before."""
    for work in works:
        work()
    rounds = [[seconds(work, 1)[0] for work in works] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]
