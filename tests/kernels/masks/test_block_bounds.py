"""Positions of blocks, exactly those of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.masks.blocks import block_bounds, block_places
from blocksparse.kernels.masks.blocks_triton import block_bounds_triton, block_places_triton


def positions(*shape: int, device: str, empty: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    position = torch.randint(0, 10**6, shape, generator=generator, dtype=torch.int32)
    return position.masked_fill(torch.rand(shape, generator=generator) < empty, -1).to(device)


def check(q: Tensor, k: Tensor, q_block: int, k_block: int, heads: int) -> None:
    expected = block_bounds.reference(q, k, q_block, k_block, heads)
    for got, exact in zip(block_bounds_triton(q, k, q_block, k_block, heads), expected, strict=True):
        assert got.dtype == exact.dtype
        assert torch.equal(got, exact)


@pytest.mark.parametrize("block", [1, 3, 16, 128])
@pytest.mark.parametrize("blocks", [1, 7, 65])
def test_blocks(block: int, blocks: int, device: str) -> None:
    for empty in (0.0, 0.5, 1.0):
        k = positions(1, 1, 1, block * blocks, device=device, empty=empty)
        check(k[:, :, 0], positions(1, 1, 1, 48, device=device), block, 16, 4)
        check(positions(1, 1, 48, device=device), k, 16, block, 4)


@pytest.mark.parametrize(("H", "heads"), [(1, 6), (2, 6), (6, 6)])
def test_heads_and_groups(H: int, heads: int, device: str) -> None:
    check(positions(2, heads, 96, device=device), positions(2, H, 3, 64, device=device), 32, 16, heads)
    expanded = positions(1, H, 1, 64, device=device).expand(2, H, 3, 64)
    check(positions(1, 1, 96, device=device).expand(2, heads, 96), expanded, 32, 16, heads)


def test_a_block_longer_than_a_tile(device: str) -> None:
    k = positions(1, 2, 1, 3 * 3000, device=device, empty=1e-4)
    check(k[:, :, 0], k, 3000, 3000, 2)


@pytest.mark.parametrize(
    ("M", "N", "offset"), [(64, 64, 0), (50, 50, 0), (50, 83, 33), (5, 83, 78), (16, 64, 48), (70, 40, 0)]
)
@pytest.mark.parametrize("ordered", ["neither", "queries", "keys", "groups"])
def test_positions_of_whole_blocks(M: int, N: int, offset: int, ordered: str, device: str) -> None:
    """In order or by maps, of prompts and chunks of any length; a map that says it all is not copied."""
    q, k = torch.zeros(2, 4, M, 8, device=device), torch.zeros(2, 2, N, 8, device=device)
    q_index = k_index = None
    if ordered == "queries":
        q_index = torch.rand(2, 4, M).argsort(-1).int().to(device)
    if ordered == "keys":
        k_index = torch.rand(2, 2, 1, N).argsort(-1).int().to(device)
    if ordered == "groups":
        q_index = torch.rand(1, 4, M).argsort(-1).int().to(device).expand(2, 4, M)
        k_index = positions(2, 4, 3, 41, device=device)
    for q_block, k_block in ((16, 16), (16, 5), (48, 32)):
        want = block_places.reference(q, k, q_index, k_index, q_block, k_block, offset)
        got = block_places_triton(q, k, q_index, k_index, q_block, k_block, offset)
        for mine, its in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
            assert mine.dtype == its.dtype
            assert torch.equal(mine, its)
        assert (got[0] is q_index) == (want[0] is q_index)
        assert (got[1] is k_index) == (want[1] is k_index)
