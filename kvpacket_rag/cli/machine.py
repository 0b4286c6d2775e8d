"""What a run was measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpacket_rag.engine import KVPacketEngine


def describe(engine: KVPacketEngine) -> str:
    """Card or processor, threads, number format and torch version, in one line."""
    import torch

    device = engine.backbone.device
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{'Apple GPU, ' if device.type == 'mps' else ''}{_processor()}, {torch.get_num_threads()} threads"
    return f"{place}, {engine.signature.dtype}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
