"""A mask as lists of blocks, which is what kernels read."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.kernels.attention.arguments import Lists
from blocksparse.kernels.positions.block_lists import block_lists
from blocksparse.selectors.block_mask import BlockMask


@final
@frozen(eq=False)
class BlockPlan(Lists):
    """Lists of the key blocks that each row visits: first `full` blocks (no masked pair), then `partial` blocks.

    Each row has one list, `index` `[B, H, rows, cols]` of int16, or of int32 from 32768 columns on, and each part
    of it is ascending. `full_count` and `partial_count` are `[B, H, rows]` int32; H is Hq, or Hkv where query
    heads share one mask. Shapes do not depend on the mask, and nothing is read back to the host. Entries after a
    row's two counts have no meaning, but are valid columns. FlexAttention's `BlockMask` and flash-attn-4's
    `BlockSparseTensorsTorch` take the two parts as separate int32 lists, which are `full_index` and
    `partial_index`.
    """

    @classmethod
    def of(cls, mask: BlockMask) -> BlockPlan:
        """The lists of `mask`. Its grid says which blocks are full."""
        return cls(*block_lists(mask.keep, mask.grid), mask.grid.q_block, mask.grid.k_block)

    @property
    def full_index(self) -> Tensor:
        """A list with the full blocks from entry 0 on, `[B, H, rows, cols]` int32: `index` as it is."""
        return self.index.int()

    @property
    def partial_index(self) -> Tensor:
        """A list with the partial blocks from entry 0 on, `[B, H, rows, cols]` int32; this makes a copy."""
        cols = self.index.shape[-1]
        place = torch.arange(cols, device=self.index.device) + self.full_count.unsqueeze(-1)
        return self.index.gather(-1, place.clamp_max(cols - 1)).int()

    def to_dense(self) -> Tensor:
        """Mask of the listed blocks, `[B, H, rows, cols]` bool."""
        cols = self.index.shape[-1]
        count = (self.full_count + self.partial_count).unsqueeze(-1)
        listed = torch.arange(cols, device=self.index.device) < count
        dense = torch.zeros(*self.index.shape[:-1], cols + 1, dtype=torch.bool, device=self.index.device)
        return dense.scatter_(-1, self.index.long().where(listed, cols), True)[..., :cols]
