"""Kernels that leave heads out: what is asked for has the bits that it has without that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.common.sizes import HeadMask
from blocksparse.kernels.score.block_softmax import block_softmax
from blocksparse.kernels.select.vertical_slash import ChosenRuns, running_count
from tests.kernels.block_grids import heads_of, make_grid

pytest.importorskip("triton")
from blocksparse.kernels.gemm.products_triton import block_products_triton
from blocksparse.kernels.score.block_mean_triton import block_mean_triton
from blocksparse.kernels.score.block_softmax_triton import block_softmax_triton
from blocksparse.kernels.select.vertical_slash_triton import vertical_slash_blocks_triton


def some(grid: bs.Grid, device: str, *, others: bool, per_head: bool = True) -> HeadMask:
    """Of three heads the second, which has a NaN, is not below; in the last batch entry none is."""
    B, Hq, *_ = heads_of(grid)
    number = torch.tensor([0.1, float("nan"), 0.3], device=device).repeat(B, 1)[:, :Hq]
    number[-1] += 5.0 * (B > 1)
    bound = torch.tensor([0.2, 1.0, 0.5] if per_head else [0.4], dtype=torch.float64, device=device)
    return HeadMask(number, bound.view(1, -1, 1, 1), others)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_what_is_asked_for_is_the_same(others: bool, per_head: bool, device: str) -> None:
    grid = make_grid("chunk", device)
    B, Hq, rows, cols = heads_of(grid)
    heads = some(grid, device, others=others, per_head=per_head)
    these = heads.these()
    assert these.flatten().tolist() == [
        (x != others) for b in range(B) for x in ((True, False, True) if b < B - 1 or B == 1 else (False,) * 3)
    ]
    assert torch.equal(heads.rest().these(), ~these)

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, Hq, grid.q_len, 24, generator=generator).to(device)
    k = torch.randn(B, 1, cols, 24, generator=generator).to(device)
    calls = []
    if not others:  # who scores asks for heads below a bound
        means = block_mean_triton(q, grid.q_block, grid.q_lead, False, None)
        calls += [
            (means, block_mean_triton(q, grid.q_block, grid.q_lead, False, None, heads)),
            (block_products_triton(means, k, grid), block_products_triton(means, k, grid, heads=heads)),
        ]
    counts = [
        running_count((torch.rand(B, Hq, n, generator=generator) < 0.2).to(device))
        for n in (cols, max(grid.q_len, grid.k_len))
    ]
    lines = ChosenRuns(counts[0], 1), ChosenRuns(counts[1], 1)
    also = (torch.rand(B, Hq, rows, cols, generator=generator) < 0.2).to(device)
    for first, kept in ((None, None), (1, also)):
        want, got = (
            vertical_slash_blocks_triton(*lines, grid, first=first, also=kept, heads=asked)
            for asked in (None, heads)
        )
        calls.append((want, got))
    for want, got in calls:
        assert torch.equal(*(torch.where(these & _known(x, grid), x, 0) for x in (want, got)))


def _known(x: Tensor, grid: bs.Grid) -> Tensor:
    """Blocks that a query sees; other products have no meaning."""
    return grid.visible if x.shape[2:] == (grid.rows, grid.cols) else x == x


@pytest.mark.parametrize("long", [False, True])
def test_mass_of_other_heads_is_0(long: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = make_grid("wide", device)
    if long:  # a row is read in pieces
        monkeypatch.setattr("blocksparse.kernels.score.block_softmax_triton._LEAST", 16)
        monkeypatch.setattr("blocksparse.kernels.score.block_softmax_triton._MOST", 16)
    logits = torch.randn(heads_of(grid), generator=torch.Generator().manual_seed(0)).to(device)
    heads = some(grid, device, others=False)
    want = block_softmax_triton(logits.clone(), grid)[0].masked_fill(~heads.these(), 0.0)
    assert torch.equal(block_softmax_triton(logits.clone(), grid, heads=heads)[0], want)
    torch.testing.assert_close(block_softmax(logits.clone(), grid, heads=heads)[0], want)
