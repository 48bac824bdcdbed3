"""A window of tiles in time, height and width around a query's own (sliding tiles; NABLA, arXiv 2507.13546)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import Rule, is_whole
from blocksparse.geometry import Grid
from blocksparse.permuters.grid_order import three, three_sizes
from blocksparse.selectors.grid_selector import GridSelector

_window = Rule(
    "three whole numbers (t, h, w), each at least 0",
    lambda x: isinstance(x, tuple) and len(x) == 3 and all(map(is_whole, x)),
    lambda x: min(x) >= 0,
)


@final
@frozen(cache_hash=True)
class TileWindow(GridSelector):
    """Keep the tiles that are at most so many tiles from a query's own in time, in height and in width.

    A block counts for all tiles in the box around its cells, so that the rule is exact for blocks that are tiles
    (`TileOrder`), and keeps more in other orders.

    Args:
        grid: frames, rows and columns, as of a `GridSelector`.
        radius: tiles on either side, in time, height and width.
        tile: frames, rows and columns of a tile.
    """

    radius: tuple[int, int, int] = field(default=(1, 1, 1), converter=three, validator=_window, kw_only=True)
    tile: tuple[int, int, int] = field(default=(1, 8, 8), converter=three, validator=three_sizes, kw_only=True)

    def among_cells(self, grid: Grid) -> Tensor:
        keys = grid.k_position if grid.group_of_row is None else grid.k_position[:, :, grid.group_of_row]
        if keys.shape[1] not in (1, grid.q_heads):
            keys = keys.repeat_interleave(grid.q_heads // keys.shape[1], dim=1)
        q_boxes = [[x.unsqueeze(3) for x in box] for box in self._boxes(grid.q_position, grid.q_block)]
        keep = torch.ones((), dtype=torch.bool, device=keys.device)
        for (q_low, q_high), (k_low, k_high), reach in zip(
            q_boxes, self._boxes(keys, grid.k_block), self.radius, strict=True
        ):
            keep = keep & (k_low <= q_high + reach) & (k_high >= q_low - reach)
        return keep

    def _boxes(self, position: Tensor, block: int) -> list[tuple[Tensor, Tensor]]:
        """The first and the last tile of each block `[..., blocks]` in time, in height and in width."""
        _, H, W = self.sizes
        cell = position.unflatten(-1, (-1, block)) - self.prefix
        there = (cell >= 0) & (cell < self.sizes[0] * H * W)
        places = cell // (H * W), cell // W % H, cell % W
        far = max(self.sizes)
        boxes = []
        for place, side in zip(places, self.tile, strict=True):
            tile = place // side
            boxes.append((tile.where(there, 2 * far).amin(-1), tile.where(there, -2 * far).amax(-1)))
        return boxes
