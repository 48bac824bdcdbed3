"""Image and video tokens pixel by pixel (Timemajor in SpargeAttn, appendix A.1)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(eq=False)
class TimeOrder(GridOrder):
    """All frames of one place together, places row by row: tokens run along T."""

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.grid
        return torch.arange(T * H * W, device=device).view(T, H, W).permute(1, 2, 0).flatten()
