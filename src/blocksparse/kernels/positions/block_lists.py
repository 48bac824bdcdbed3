"""A mask as the lists that attention kernels walk.

    index[row] = columns kept and full, ascending, then columns kept and partial, ascending, then zeros

On GPUs one launch counts and writes every row by itself, without a sort, and nothing is read back to the host. CPU
tensors take the plain torch below, with the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.sizes import index_dtype
from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.positions.block_grid import BlockGrid


@on_gpus()
def block_lists(keep: Tensor, grid: BlockGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Full blocks and partial blocks of each row of `keep` `[B, H, rows, cols]` bool.

    Returns:
        `full_count` and `partial_count` `[B, H, rows]` int32, `index` `[B, H, rows, cols]` of `index_dtype(cols)`.
        Entries of `index` past both counts are zeros, so that a kernel may load ahead.
    """
    full = keep & grid.full
    full_count, count = full.sum(-1, dtype=torch.int32), keep.sum(-1, dtype=torch.int32)
    group = keep.to(torch.uint8) + full  # 0 for dropped, 1 for partial, 2 for full
    cols = keep.shape[-1]
    index = group.argsort(dim=-1, descending=True, stable=True).to(index_dtype(cols))
    listed = torch.arange(cols, device=keep.device) < count.unsqueeze(-1)
    return full_count, count - full_count, index.masked_fill(~listed, 0)
