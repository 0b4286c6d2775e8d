"""Memory that runs out and devices that disappear: how torch says so, and what a user is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvpacket_rag.errors import DeviceError


class NoRoomError(DeviceError, MemoryError):
    """Memory ran out even for the smallest piece of some work; it is caught as such where there is another way."""


_NO_MEMORY = ("DefaultCPUAllocator", "out of memory")  # of the host's allocator; of CUDA's driver, of MPS and others
_LOST = ("CUDA error", "HIP error", "device-side assert", "CUDA driver")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the host or of a device. CUDA says so by a class, the others by words alone."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


@contextmanager
def told(device: torch.device, advice: str) -> Iterator[None]:
    """Within it, what befalls a device is said in words a user can act on; other errors pass.

    Args:
        device: of the work.
        advice: what to do where memory runs out.

    Raises:
        DeviceError: memory ran out, or the device cannot be used any more.
    """
    try:
        yield
    except DeviceError:
        raise
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise DeviceError(f"the memory of {device} ran out ({_first_line(error)}); {advice}") from error
        if any(words in str(error) for words in _LOST):
            raise DeviceError(
                f"{device} cannot be used any more ({_first_line(error)}); what lay in its memory is lost, packets on "
                "disk are not. Start the process again, or load the engine on another device"
            ) from error
        raise


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
