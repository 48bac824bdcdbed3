"""A choice of blocks as a mask on a grid: spread over finer blocks, with the diagonal, as far as queries can see."""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.counter_hash import counter_hash
from blocksparse.kernels.positions.places import NOWHERE, Places, last_from


@on_gpus(of=lambda keep, grid, *_, **__: grid.q_first)
def within_reach(
    keep: Tensor | None,
    grid: BlockGrid,
    n: int = 1,
    skipped: int = 0,
    *,
    places: Places = NOWHERE,
    segment: int | None = None,
    diagonal: bool = False,
) -> Tensor:
    """The blocks of `grid` that `keep` or a number chooses and some query can see, `[B|1, H|1, rows, cols]` bool.

    On a GPU it is one launch; other devices take the plain torch below. An axis of batch entries or heads along which
    neither `keep` nor the positions differ has one entry.

    Args:
        keep: bool, each entry for `n` x `n` blocks of `grid`: `[B|1, H|1, ceil((rows + skipped) / n), ceil(cols / n)]`.
            If `n` is 1, its last axes may be 1, and those before them may be missing. None chooses no block.
        skipped: rows of blocks at the start of `keep` that are not part of `grid`.
        places: by which further blocks are chosen.
        segment: a number of tokens; the blocks of `grid.own_segment(segment)` are chosen, too.
        diagonal: the blocks of `grid.diagonal` are chosen, too.
    """
    reachable = grid.reachable
    chosen = torch.zeros_like(reachable) if keep is None else keep
    if n > 1:
        chosen = chosen.repeat_interleave(n, dim=-2).repeat_interleave(n, dim=-1)
        chosen = chosen[..., skipped : skipped + reachable.shape[-2], : reachable.shape[-1]]
    if places.near is not None:
        chosen = chosen | grid.within(places.near)
    if places.first is not None:
        chosen = chosen | grid.holding_first(places.first)
    if places.stride is not None:
        chosen = chosen | every(*places.stride, grid)
    if places.last is not None:
        chosen = chosen | (grid.q_last >= last_from(places.last, grid))
    if segment is not None:
        chosen = chosen | grid.own_segment(segment)
    return (chosen | grid.diagonal if diagonal else chosen) & reachable


def every(eta: int, seed: int, grid: BlockGrid) -> Tensor:
    """One of every `eta` blocks of a row, from an offset drawn for the row, `[1, 1, rows, cols]` bool."""
    eta, rows, cols = min(eta, FAR), grid.q_first.shape[2], grid.k_first.shape[3]
    i = torch.arange(grid.first_row, grid.first_row + rows, device=grid.q_first.device)
    j = torch.arange(cols, device=i.device)
    # A column is chosen if its sum with the row's hash is a multiple of eta. Both are reduced modulo eta before they are
    # broadcast against each other, so that the only operation over all blocks is one comparison.
    return (j % eta == -counter_hash(seed, i).unsqueeze(1) % eta)[None, None]
