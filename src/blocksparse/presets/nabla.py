"""NABLA: Neighborhood Adaptive Block-Level Attention (arXiv 2507.13546)."""

from __future__ import annotations

from blocksparse.checks.per_head import share
from blocksparse.permuters.tile_order import TileOrder
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.mean_pool import MeanPoolScorer
from blocksparse.selectors.tile_window import TileWindow
from blocksparse.selectors.top_cdf import TopCdf


@kept
def nabla(
    mass: Numbers = 0.9,  # released code
    grid: tuple[int, int, int] | None = None,
    *,
    radius: tuple[int, int, int] = (1, 1, 1),  # released code: windows of 3 tiles; a checkpoint says its own
    tile: tuple[int, int, int] = (1, 8, 8),  # the same
    block: int = 64,  # the same: one tile
    prefix: int = 0,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Order cells tile by tile; keep the heaviest pooled blocks, and the tiles around a query's own.

    Args:
        mass: share of the row's pooled mass to keep; a number, or one per query head.
        grid: frames, rows and columns `(T, H, W)` in tokens; None where a host knows them.
        radius: tiles on either side that are kept in any case, in time, height and width.
        tile: frames, rows and columns of a tile.
        block: tokens per block.
        prefix: how many tokens of text stand before the video. All text is kept.
        executor: `AutoExecutor()` if None.
    """
    share.check(mass=mass)
    return preset(
        TileOrder(grid, tile, prefix=prefix, suffix=None),
        MeanPoolScorer(block),
        TopCdf(mass) | TileWindow(grid, radius=radius, tile=tile, prefix=prefix),
        executor,
    )
