"""Realignment against angles computed another way."""

from __future__ import annotations

import math

import pytest
import torch

from kvpacket_rag.rope import Layout, Rotation, realign, realign_into

FREQUENCIES = (1.0, 0.31, -0.027, 0.0009)


def by_complex_numbers(tensor: torch.Tensor, rotation: Rotation, shift: int) -> torch.Tensor:
    """The same turn as a multiplication by exp(i x angle), in float64."""
    n, start = len(rotation.frequencies), rotation.start
    first = [start + k if rotation.layout == "half" else start + 2 * k for k in range(n)]
    second = [start + n + k if rotation.layout == "half" else start + 2 * k + 1 for k in range(n)]
    moved = tensor.double().clone()
    for a, b, frequency in zip(first, second, rotation.frequencies, strict=True):
        z = torch.complex(tensor[..., a].double(), tensor[..., b].double())
        z = z * complex(math.cos(frequency * shift), math.sin(frequency * shift))
        moved[..., a], moved[..., b] = z.real, z.imag
    return moved


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("shift", [1, 100, 4000, 1_000_000])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_shift_turns_each_pair_by_its_angle(layout: Layout, start: int, shift: int, dtype: torch.dtype, atol: float):
    rotation = Rotation(layout, start, FREQUENCIES)
    tensor = torch.randn(2, 3, 5, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    moved = realign(tensor, rotation, shift)
    assert moved.dtype == dtype
    torch.testing.assert_close(moved.double(), by_complex_numbers(tensor, rotation, shift), atol=atol, rtol=1e-2)


def test_norms_survive_a_shift_so_nothing_is_scaled_twice():
    tensor = torch.randn(1, 2, 7, 8)
    moved = realign(tensor, Rotation("half", 0, FREQUENCIES), 12345)
    torch.testing.assert_close(moved.norm(dim=-1), tensor.norm(dim=-1), atol=1e-5, rtol=1e-5)


def test_the_source_keeps_its_bits_and_a_second_shift_gives_the_same_bits():
    rotation, tensor = Rotation("interleaved", 1, FREQUENCIES), torch.randn(2, 2, 6, 10)
    before = tensor.clone()
    first, second = realign(tensor, rotation, 77), realign(tensor, rotation, 77)
    assert torch.equal(tensor, before) and torch.equal(first, second)


def test_without_rotation_or_shift_the_bits_are_copied():
    tensor = torch.randn(2, 2, 6, 8)
    assert torch.equal(realign(tensor, None, 500), tensor)
    assert torch.equal(realign(tensor, Rotation("half", 0, FREQUENCIES), 0), tensor)


def test_a_strided_target_is_written_only_where_it_is_shown():
    buffer = torch.full((2, 3, 20, 8), 7.0)
    tensor = torch.randn(2, 3, 5, 8)
    realign_into(buffer[:, :, 4:9], tensor, Rotation("half", 0, FREQUENCIES), 3)
    assert torch.equal(buffer[:, :, 4:9], realign(tensor, Rotation("half", 0, FREQUENCIES), 3))
    assert (buffer[:, :, :4] == 7).all() and (buffer[:, :, 9:] == 7).all()
