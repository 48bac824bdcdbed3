"""Image and video tokens in column order (Columnmajor in SpargeAttn, appendix A.1)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(cache_hash=True)
class ColumnOrder(GridOrder):
    """Order cells frame by frame, and inside a frame column by column: neighbours in the order differ in H."""

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.sizes
        return torch.arange(T * H * W, device=device).view(T, H, W).transpose(1, 2).flatten()
