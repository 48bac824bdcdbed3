"""Blocks that chosen lines cross: the Triton kernel and its reference against the distances of every pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.select.vertical_slash import ChosenRuns, running_count, vertical_slash_blocks
from tests.kernels.block_grids import KINDS, heads_of, make_grid

pytest.importorskip("triton")
from blocksparse.kernels.select.vertical_slash_triton import vertical_slash_blocks_triton


def chosen(shape: tuple[int, ...], share: float, device: str) -> Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) < share).to(device)


def by_ranges(keys: Tensor, key_run: int, distances: Tensor, run: int, grid: bs.Grid) -> Tensor:
    """The blocks of `vertical_slash_blocks`, from one range of distances after the other."""
    near, far = grid.q_first - grid.k_last, grid.q_last - grid.k_first
    if not grid.causal:
        near, far = torch.maximum(near, -far), torch.maximum(far, -near)
    B, Hq, rows, cols = heads_of(grid)
    out = torch.zeros(B, Hq, rows, cols, dtype=torch.bool, device=keys.device)
    column = keys.repeat_interleave(key_run, -1)
    for j in range(cols):
        width = 1 if key_run == 1 else grid.k_block
        out[..., j] |= column[..., j * width : (j + 1) * width].any(-1)[..., None]
    for d in distances.any(1).any(0).nonzero()[:, 0].tolist():
        has = (near // run <= d) & (d <= far // run)
        out |= has & distances[:, :, d, None, None]
    return (out | grid.diagonal) & grid.visible


@pytest.mark.parametrize("kind", KINDS)
def test_lines(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    B, Hq, rows, cols = heads_of(grid)
    longest = max(grid.q_len, grid.k_len)
    for key_run, run in ((1, 1), (1, grid.k_block), (grid.k_block, 1)):
        # By blocks one entry stands for a column; by keys, in original order, as many as a block has.
        entries = cols if key_run == 1 else -(-grid.k_len // 1)
        keys = chosen((B, Hq, entries), 0.05, device)
        distances = chosen((B, Hq, -(-longest // run)), 0.1, device)
        columns = ChosenRuns(running_count(keys), 1 if key_run == 1 else grid.k_block)
        bands = ChosenRuns(running_count(distances), run)
        want = by_ranges(keys, 1, distances, run, grid) if key_run == 1 else None
        reference = vertical_slash_blocks.reference(columns, bands, grid)
        if want is not None:
            assert torch.equal(reference, want)
        assert torch.equal(vertical_slash_blocks_triton(columns, bands, grid), reference)
        also = chosen((B, Hq, rows, cols), 0.1, device) & grid.visible
        whole = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64, device=device).view(1, 3, 1)
        for more in (
            {"also": also},
            {"whole": whole},
            {"first": 9},
            {"also": also[:, :1], "whole": whole[:, :1], "first": 1},
        ):
            reference = vertical_slash_blocks.reference(columns, bands, grid, **more)
            assert torch.equal(vertical_slash_blocks_triton(columns, bands, grid, **more), reference), more
