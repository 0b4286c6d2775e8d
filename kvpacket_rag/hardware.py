"""Which device and which number format to compute in."""

from __future__ import annotations

from typing import cast

import torch

from kvpacket_rag.errors import UnsupportedModelError


def pick_device(name: str = "auto") -> torch.device:
    """The device of that name; ``"auto"`` takes CUDA, then MPS, then the CPU.

    Raises:
        UnsupportedModelError: torch knows no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModelError(f"device {name!r} cannot be used here: {error}; pass 'auto' or 'cpu'") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The float type of that name; ``"auto"`` takes bfloat16 where the device computes it fast, else float32.

    Raises:
        UnsupportedModelError: no such float type.
    """
    if name == "auto":
        return torch.bfloat16 if _bfloat16_is_fast(device) else torch.float32
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UnsupportedModelError(f"dtype is {name!r}; expected auto, float32, bfloat16, float16 or float64")
    return cast(torch.dtype, dtype)


def _bfloat16_is_fast(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
    return False
