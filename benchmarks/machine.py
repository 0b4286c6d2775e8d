"""What the figures were measured on, and small helpers the benchmarks share."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

DOCUMENTS = Path(__file__).resolve().parent.parent / "kvpacket_rag" / "demo" / "corpus"


def describe(dtype: torch.dtype, device: torch.device) -> str:
    """One line: processor or card, threads, versions, number format."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return (
        f"{card}, {torch.get_num_threads()} threads, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, {str(dtype).removeprefix('torch.')}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of each repeat."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found


def median_of_turns(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each, measured in turns so that a busy moment hits all alike."""
    for work in works:
        work()
    rounds = [[seconds(work, 1)[0] for work in works] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def chunks_of(token_ids: Callable[[str], list[int]], decode: Callable[[list[int]], str], tokens: int) -> list[str]:
    """The demo corpus as texts of about ``tokens`` tokens each."""
    ids = [i for path in sorted(DOCUMENTS.glob("*.md")) for i in token_ids(path.read_text(encoding="utf-8"))]
    return [decode(ids[start : start + tokens]).strip() for start in range(0, len(ids) - tokens, tokens)]
