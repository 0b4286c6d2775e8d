"""Packets to few bits, through compressed-tensors, the library of the vLLM project."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpacket_rag.compress.quantized import QuantizedTensor, spread
from kvpacket_rag.compress.scheme import Grain, Scheme
from kvpacket_rag.errors import MissingExtraError, PacketError
from kvpacket_rag.rope import TensorGroup


class Quantiser:
    """Quantises the tensors of packets as a scheme says.

    Args:
        scheme: which.

    Raises:
        MissingExtraError: compressed-tensors is not installed.
    """

    def __init__(self, scheme: Scheme) -> None:
        if find_spec("compressed_tensors") is None:
            raise MissingExtraError("quantising packets needs compressed-tensors; pip install 'kvpacket-rag[compress]'")
        self.scheme = scheme

    def quantise(self, tensors: Sequence[Tensor], groups: Sequence[TensorGroup]) -> tuple[Tensor, ...]:
        """The tensors of a packet as they are stored.

        Args:
            tensors: one a group, (layers, heads, tokens, width).
            groups: of the model's plan.

        Returns:
            For each tensor the parts of its :class:`QuantizedTensor`.

        Raises:
            PacketError: a tensor holds numbers that are not finite.
        """
        stored: list[Tensor] = []
        for tensor, group in zip(tensors, groups, strict=True):
            if not tensor.isfinite().all():
                raise PacketError(
                    f"the {group.name} to quantise are not all finite; load the model in another dtype, such as float32"
                )
            grain = self.scheme.grain(group)
            layers = [self._layer(tensor[number : number + 1], grain) for number in range(tensor.shape[0])]
            codes, scale, zero = (torch.cat(parts) for parts in zip(*layers, strict=True))
            whole = QuantizedTensor(_first(tensor), codes, scale, zero)
            stored += [whole.first, whole.codes, whole.scale, whole.zero]
        return tuple(stored)

    def _layer(self, tensor: Tensor, grain: Grain) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zero points of one layer (1, heads, tokens, width), the first token left out."""
        rest = tensor[:, :, 1:].float()
        smallest, largest = _extremes(rest, grain)
        library = _library()
        arguments = library.arguments[grain.bits]
        scale = _round_up(library.find_scales(smallest, largest, arguments)[0])
        low = -(2 ** (grain.bits - 1))  # the smallest code
        zero = (low - smallest / scale.float()).round().clamp(low, -low - 1).to(torch.int8)
        steps = spread(scale.float(), rest.shape), spread(zero.float(), rest.shape)
        codes = library.quantize(rest, *steps, arguments, dtype=torch.int8)
        if grain.bits == 4:
            words = library.pack(codes.flatten(0, 2), 4)
            codes = words.unflatten(0, codes.shape[:3])
        return codes.contiguous(), scale, zero


@dataclass(frozen=True, slots=True)
class _Library:
    """What is taken from compressed-tensors."""

    find_scales: Any
    quantize: Any
    pack: Any
    arguments: dict[int, Any]


@cache
def _library() -> _Library:
    """Loaded when the first packet is made: it takes seconds, and those who only read need none of it."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = {bits: QuantizationArgs(num_bits=bits, symmetric=False, strategy="channel") for bits in (8, 4)}
    return _Library(calculate_qparams, quantize, pack_to_int32, arguments)


def _first(tensor: Tensor) -> Tensor:
    """The first token; in bfloat16 where it took more than 16 bits, for that reaches as far as float32."""
    first = tensor[:, :, :1]
    return (first if first.element_size() == 2 else first.bfloat16()).contiguous()


def _extremes(rest: Tensor, grain: Grain) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of all that shares a scale, and 0; the shared axis divided by the group."""
    axis = 2 if grain.along == "tokens" else 3
    length = rest.shape[axis]
    group = min(grain.group or length, length) or 1
    count = math.ceil(length / group)
    missing = count * group - length
    filled = pad(rest, (0, 0, 0, missing) if axis == 2 else (0, missing))  # with 0, which every range holds anyway
    cells = filled.unflatten(axis, (count, group))
    return cells.amin(axis + 1).clamp(max=0), cells.amax(axis + 1).clamp(min=0)


def _round_up(scale: Tensor) -> Tensor:
    """To bfloat16, never down: a smaller scale would cut off the largest numbers."""
    tiny = torch.finfo(torch.bfloat16).tiny
    rounded = scale.clamp(min=tiny).bfloat16()
    next_larger = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(rounded.float() < scale, next_larger, rounded)
