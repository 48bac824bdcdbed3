"""Image and video tokens as models give them (Rowmajor in SpargeAttn, appendix A.1)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(eq=False)
class RasterOrder(GridOrder):
    """Frame by frame and row by row, the order tokens arrive in: costs nothing, and still checks the grid."""

    def cells(self, device: torch.device | str) -> None:
        del device
