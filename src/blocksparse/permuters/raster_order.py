"""Image and video tokens in row order, as models give them (Rowmajor in SpargeAttn, appendix A.1)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(cache_hash=True)
class RasterOrder(GridOrder):
    """Leave cells in the order in which they arrive, frame by frame and row by row. The grid is still checked."""

    def cells(self, device: torch.device | str) -> None:
        del device
