"""The best blocks of each row, the order of visits by rank, and one of two masks for each head.

`top_k` takes the best values of each row: a number of them, or a share. Ties are taken by column. The GPU's kernel searches
for the worst value that is taken, and the plain torch below sorts; both choose the same blocks.

`visiting_order` makes lists of ranks, the kept blocks of every row in the order in which the row visits them:

    index[row] = columns kept, the smallest rank first and ties by column; then the columns that are not kept

The greatest int32 stands for blocks that are not kept. So a kept block of that rank ties with those of the rank before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import HeadMask
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.select.top_cdf import MAX_COLS


@on_gpus(
    torch.float32,
    where=lambda values, forced, k, *_, **__: not isinstance(k, Tensor) and values.shape[-1] <= MAX_COLS,
)
def top_k(
    values: Tensor,
    forced: Tensor | None,
    k: int | Tensor | None,
    share: Tensor | None,
    grid: BlockGrid,
    *,
    forced_first: bool,
    of_all_keys: bool,
) -> Tensor:
    """Which blocks are kept, `[B, H, rows, cols]` bool, by their `values` `[B, H, rows, cols]`.

    The diagonal is kept in any case.

    Args:
        forced: `[B|1, H|1, rows|1, cols|1]` bool, kept in any case.
        k: blocks per row, a number or one for each row `[rows, 1]`. None if `share` says how many.
        share: `[1, H|1, 1, 1]` float64. Of the row's visible blocks, rounded up.
        forced_first: count forced blocks and the diagonal among the number, before all others. Else forced blocks
            come on top of it, and the diagonal ranks by its value.
        of_all_keys: the share is that of all columns, rounded down, but at least 1.
    """
    visible, cols = grid.visible, values.shape[-1]
    always = grid.diagonal if forced is None else (grid.diagonal | forced) & visible
    values = values.nan_to_num(nan=float("-inf"))  # below every number, infinities included
    if forced_first:
        values = values.masked_fill(always, float("inf"))
    elif forced is not None:
        values = values.masked_fill(forced, float("-inf"))
    order = (-values).masked_fill(~visible, float("nan")).argsort(dim=-1, stable=True)  # NaN comes last
    if isinstance(k, Tensor):
        count = k
    elif share is None:
        count = values.new_full((1, 1, 1, 1), k or 0)
    elif of_all_keys:
        count = (share * cols).float().floor().clamp_min(1)
    else:  # rounded to fp32 before it is rounded up: .07 of 100 is 7
        count = (share * visible.sum(-1, keepdim=True)).float().ceil()
    taken = torch.arange(cols, device=values.device) < count
    keep = torch.empty_like(values, dtype=torch.bool).scatter_(-1, order, taken.expand(values.shape))
    return (keep | always) & visible


LONGEST = 1024


@on_gpus(where=lambda keep, *_: keep.shape[-1] <= LONGEST)
def visiting_order(keep: Tensor, rank: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`index` `[B, H, rows, cols]`, and per row how many blocks are visited in any case, and how many at most; int32.

    Args:
        keep: `[B, H, rows, cols]` bool.
        rank: `[B, H, rows, cols]` int32. Kept blocks of a negative rank are visited in any case.
        tau: `[H]` fp32. Where it is 0, so are all others.
    """
    dropped = torch.iinfo(torch.int32).max
    order = rank.clamp(max=dropped - 1).where(keep, dropped).argsort(dim=-1, stable=True)
    opened = keep & ((rank < 0) | (tau == 0).view(-1, 1, 1))
    return order.int(), opened.sum(-1, dtype=torch.int32), keep.sum(-1, dtype=torch.int32)


@on_gpus(torch.float32, of=lambda heads, *_: heads.number)
def routed(heads: HeadMask, below: Tensor, otherwise: Tensor) -> Tensor:
    """`[B, H, rows, cols]` bool: `below` in those heads, in others `otherwise`; both `[B, H, rows, cols]` bool."""
    return torch.where(heads.these(), below, otherwise)
