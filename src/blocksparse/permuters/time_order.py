"""Image and video tokens in time order (Timemajor in SpargeAttn, appendix A.1)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(cache_hash=True)
class TimeOrder(GridOrder):
    """Order cells place by place, places row by row; the cells of one place in all frames stand together."""

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.sizes
        return torch.arange(T * H * W, device=device).view(T, H, W).permute(1, 2, 0).flatten()
