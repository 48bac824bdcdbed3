"""The blocks that chosen columns and distances cross, as a mask on a grid.

Lines are chosen in runs of equal length, and a running count says which: a block holds the keys, or the distances, from one
number to another, so it is crossed if the count grows between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.places import Places
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.kernels.selecting.lines import Lines


@on_gpus(of=lambda columns, *_, **__: columns.counts)
def line_blocks(
    columns: Lines,
    bands: Lines,
    grid: BlockGrid,
    *,
    whole: Tensor | None = None,
    first: int | None = None,
    also: Tensor | None = None,
    heads: Below | None = None,
) -> Tensor:
    """The blocks that chosen lines cross, and the diagonal, as far as queries can see: `[B, Hq, rows, cols]` bool.

    Args:
        columns: chosen keys.
        bands: chosen distances.
        whole: `[1, Hq|1, 1]`; heads where it is 1 in fp32 keep what they can see.
        first: a number of tokens; blocks that hold one of the first so many are kept.
        also: `[B|1, Hq|1, rows, cols]` bool, kept too.
        heads: those whose mask is asked for; in the others entries have no meaning.
    """
    cols = torch.arange(grid.k_first.shape[-1] + 1, device=columns.counts.device)
    reached = columns.counts[..., (cols * columns.run).clamp(max=columns.counts.shape[-1] - 1)]
    keep = (reached[..., :-1] < reached[..., 1:]).unsqueeze(2) | crossed(bands, grid)
    if whole is not None:
        keep = keep | (whole.float() >= 1).unsqueeze(-1)
    if also is not None:
        keep = keep | also
    return within_reach(keep, grid, places=Places(first=first), diagonal=True)


def crossed(bands: Lines, grid: BlockGrid) -> Tensor:
    """The blocks that may hold a pair at a chosen distance, `[B, Hq, rows, cols]` bool.

    The distances in a block lie between its first query minus its last key and its last query minus its first key, so every
    chosen pair is in one of these blocks. A run of distances as long as a block crosses two diagonals of blocks.
    """
    low, high = grid.q_first - grid.k_last, grid.q_last - grid.k_first
    if not grid.causal:
        low, high = torch.maximum(low, -high), torch.maximum(high, -low)
    runs = bands.counts.shape[-1] - 1
    shape = (*bands.counts.shape[:2], *low.shape[2:])
    ends = (x.div(bands.run, rounding_mode="floor") for x in (low, high + bands.run))
    before, up_to = (bands.counts.gather(-1, x.clamp(0, runs).long().expand(shape).flatten(2)) for x in ends)
    return (before < up_to).view(shape)
