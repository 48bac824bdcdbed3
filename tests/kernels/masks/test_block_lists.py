"""Lists of kept blocks: the kernel against its reference, entry by entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.launched import BlockPlan
from blocksparse.kernels.common.sizes import index_dtype
from blocksparse.kernels.masks.blocks import block_lists
from blocksparse.testing import make_qkv
from tests.kernels.block_grids import KINDS, heads_of, make_grid
from tests.specs import grid_of

pytest.importorskip("triton")
from blocksparse.kernels.masks import blocks_triton as kernel


def random_keep(grid: bs.Grid, share: float, device: str) -> Tensor:
    chosen = torch.rand(heads_of(grid), generator=torch.Generator().manual_seed(0)) < share
    return chosen.to(device) & grid.visible


def assert_same(keep: Tensor, grid: bs.Grid) -> None:
    want = block_lists.reference(keep, grid)
    for got in (kernel.block_lists_triton(keep, grid), block_lists(keep, grid)):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        assert [x.dtype for x in got] == [torch.int32, torch.int32, index_dtype(keep.shape[-1])]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_and_reference(kind: str, share: float, device: str) -> None:
    grid = make_grid(kind, device)
    assert_same(random_keep(grid, share, device), grid)


def test_a_row_in_several_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel, "_NARROWEST", 16)
    monkeypatch.setattr(kernel, "_WIDEST", 32)
    grid = make_grid("wide", device)
    assert_same(random_keep(grid, 0.5, device), grid)


def test_shared_and_strided_masks(device: str) -> None:
    grid = make_grid("per query head", device)
    shared = bs.BlockMask(random_keep(grid, 0.3, device), grid).share_heads()
    assert_same(shared.keep, shared.grid)
    keep = random_keep(make_grid("in order", device), 0.5, device)
    assert_same(keep.transpose(2, 3).contiguous().transpose(2, 3), make_grid("in order", device))
    assert_same(keep[:, :1].expand(keep.shape), make_grid("in order", device))


@pytest.mark.parametrize(("cols", "dtype"), [(32767, torch.int16), (32768, torch.int32)])
def test_lists_are_int16_while_it_holds_every_block(cols: int, dtype: torch.dtype, device: str) -> None:
    """One row over blocks of one key; what other kernels take is int32 either way."""
    assert index_dtype(cols) == dtype
    q, k, _ = make_qkv(N=cols, M=1, Hq=1, Hkv=1, D=4, device=device)
    grid = grid_of(q, k, 1)
    keep = random_keep(grid, 0.5, device) | grid.diagonal
    assert_same(keep, grid)
    plan = BlockPlan.of(bs.BlockMask(keep, grid))
    assert plan.index.dtype == dtype
    assert plan.index.max() == cols - 1
    assert plan.full_index.dtype == plan.partial_index.dtype == torch.int32
    assert torch.equal(plan.to_dense(), keep)


def test_plan_by_hand(device: str) -> None:
    """Full blocks first, partial ones behind them, and each part as a list of its own."""
    q, k, _ = make_qkv(N=64, Hq=1, Hkv=1, D=4, device=device)
    grid = grid_of(q, k, 16)
    keep = grid.visible.clone()
    keep[..., 3, 1] = False
    plan = BlockPlan.of(bs.BlockMask(keep, grid))
    assert plan.full_count.tolist() == [[[0, 1, 2, 2]]]
    assert plan.partial_count.tolist() == [[[1, 1, 1, 1]]]
    assert plan.index.tolist() == [[[[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 2, 3, 0]]]]
    assert plan.full_index[0, 0, 3, :2].tolist() == [0, 2]
    assert plan.partial_index[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert torch.equal(plan.to_dense(), keep)
