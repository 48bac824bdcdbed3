"""Image and video tokens in the order of tiles."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.permuters.grid_order import GridOrder, three, three_sizes


@final
@frozen(cache_hash=True)
class TileOrder(GridOrder):
    """Order cells tile by tile. Tiles, and the cells inside each, go frame by frame and row by row.

    A tile at a far edge holds the cells that are left. A block of tokens is one tile only if a tile has as many
    cells as a block and the tiles divide the grid; otherwise a block may hold parts of several tiles.

    Args:
        tile: frames, rows and columns `(t, h, w)` of a tile; 4 x 4 x 4 cells make a block of 64.
    """

    tile: tuple[int, int, int] = field(default=(4, 4, 4), converter=three, validator=three_sizes)

    def cells(self, device: torch.device | str) -> Tensor:
        (_, H, W), (t, h, w) = self.sizes, map(min, self.tile, self.sizes)
        frame, row, column = (torch.arange(size, device=device) for size in self.sizes)
        across, down = -(-W // w), -(-H // h)
        tile = (frame[:, None, None] // t * down + row[:, None] // h) * across + column // w  # [T, H, W]
        return tile.flatten().argsort(stable=True)
