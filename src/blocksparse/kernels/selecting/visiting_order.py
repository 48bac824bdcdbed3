"""Ranks as lists: the kept blocks of every row in the order in which the row visits them.

    index[row] = columns kept, the smallest rank first and ties by column; then the columns that are not kept

The greatest int32 stands for blocks that are not kept. So a kept block of that rank ties with those of the rank before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus

LONGEST = 1024


@on_gpus(where=lambda keep, *_: keep.shape[-1] <= LONGEST)
def visiting_order(keep: Tensor, rank: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`index` `[B, H, rows, cols]`, and per row how many blocks are visited in any case, and how many at most; int32.

    Args:
        keep: `[B, H, rows, cols]` bool.
        rank: `[B, H, rows, cols]` int32. Kept blocks of a negative rank are visited in any case.
        tau: `[H]` fp32; where it is 0, so are all others.
    """
    dropped = torch.iinfo(torch.int32).max
    order = rank.clamp(max=dropped - 1).where(keep, dropped).argsort(dim=-1, stable=True)
    opened = keep & ((rank < 0) | (tau == 0).view(-1, 1, 1))
    return order.int(), opened.sum(-1, dtype=torch.int32), keep.sum(-1, dtype=torch.int32)
