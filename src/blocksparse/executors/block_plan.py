"""Value: a mask as the lists that kernels walk."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.selectors.block_mask import BlockMask


@final
@frozen(eq=False)
class BlockPlan:
    """Which key blocks each row visits, in ascending order: some pairs allowed (`partial`) or all (`full`).

    The four tensors of FlexAttention's `BlockMask` and of flash-attn-4's `BlockSparseTensorsTorch`. Shapes
    are static and nothing is read back to the host; entries past a row's count have no meaning.
    """

    partial_count: Tensor  # [B, H, rows] int32; H is Hq, or Hkv where query heads share one mask
    partial_index: Tensor  # [B, H, rows, cols] int32
    full_count: Tensor  # [B, H, rows] int32
    full_index: Tensor  # [B, H, rows, cols] int32
    q_block: int
    k_block: int

    @classmethod
    def of(cls, mask: BlockMask) -> BlockPlan:
        """The lists of `mask`; partial and full follow from its grid."""
        grid = mask.grid
        full = mask.keep & grid.full
        partial_count, partial_index = _compact(mask.keep & ~full)
        full_count, full_index = _compact(full)
        return cls(partial_count, partial_index, full_count, full_index, grid.q_block, grid.k_block)

    def to_dense(self) -> Tensor:
        """Every listed block, `[B, H, rows, cols]` bool."""
        return _scatter(self.partial_count, self.partial_index) | _scatter(self.full_count, self.full_index)


def _compact(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Count of True along the last axis, and their indices first, ascending."""
    index = keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return keep.sum(-1, dtype=torch.int32), index.int()


def _scatter(count: Tensor, index: Tensor) -> Tensor:
    listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    return torch.zeros_like(listed).scatter_(-1, index.long(), listed)
