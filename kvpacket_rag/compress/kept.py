"""Which tokens of a compressed packet were kept, a bit for each position of its span."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpacket_rag.errors import PacketError

_BITS = 2 ** torch.arange(8, dtype=torch.uint8)


def pack_positions(positions: Tensor, span: int) -> Tensor:
    """Positions as bits.

    Args:
        positions: (layers, heads, kept), from 0 up to below ``span``, each once.
        span: positions there are.

    Returns:
        (layers, heads, octets) uint8; position p is bit p % 8 of octet p // 8.
    """
    bits = torch.zeros((*positions.shape[:2], -(-span // 8) * 8), dtype=torch.uint8).scatter_(2, positions.cpu(), 1)
    octets: Tensor = bits.unflatten(2, (-1, 8)) * _BITS
    return octets.sum(-1, dtype=torch.uint8)


def unpack_positions(octets: Tensor) -> Tensor:
    """The inverse of :func:`pack_positions`: (layers, heads, kept), ascending.

    Raises:
        PacketError: not every head kept the same number of tokens.
    """
    bits = (octets[..., None] & _BITS.to(octets.device)).ne(0).flatten(2)
    kept = bits.sum(-1)
    if len(kept.unique()) != 1:
        raise PacketError(f"its heads keep {int(kept.min())} to {int(kept.max())} tokens, expected one number for all")
    return bits.nonzero()[:, 2].view(*bits.shape[:2], -1)
