"""The blocks that chosen columns and distances cross, as a mask on a grid.

Lines are chosen in runs of equal length, and a running count says which: a block holds the keys, or the distances, from one
number to another, so it is crossed if the count grows between them. On a GPU it is one launch; other devices take the plain
torch below.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.within_reach import within_reach


class Lines(NamedTuple):
    """Chosen keys, by slot, or chosen distances."""

    count: Tensor  # [B, Hq, runs + 1] int32, how many runs are chosen before each, and in all
    run: int  # keys or distances in a run


def line_blocks(
    columns: Lines,
    bands: Lines,
    grid: BlockGrid,
    *,
    whole: Tensor | None = None,
    first: int | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """The blocks that chosen lines cross, and the diagonal, as far as queries can see: `[B, Hq, rows, cols]` bool.

    Args:
        columns: chosen keys.
        bands: chosen distances.
        whole: `[1, Hq|1, 1]`; heads where it is 1 in fp32 keep what they can see.
        first: a number of tokens; blocks that hold one of the first so many are kept.
        also: `[B|1, Hq|1, rows, cols]` bool, kept too.
    """
    if columns.count.is_cuda:
        from blocksparse.kernels.selecting.line_blocks_triton import line_blocks_triton as compute
    else:
        compute = line_blocks_reference
    return compute(columns, bands, grid, whole=whole, first=first, also=also)


def line_blocks_reference(
    columns: Lines,
    bands: Lines,
    grid: BlockGrid,
    *,
    whole: Tensor | None = None,
    first: int | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """The same in plain torch."""
    cols = torch.arange(grid.k_first.shape[-1] + 1, device=columns.count.device)
    reached = columns.count[..., (cols * columns.run).clamp(max=columns.count.shape[-1] - 1)]
    keep = (reached[..., :-1] < reached[..., 1:]).unsqueeze(2) | crossed(bands, grid)
    if whole is not None:
        keep = keep | (whole.float() >= 1).unsqueeze(-1)
    if also is not None:
        keep = keep | also
    return within_reach(keep, grid, first=first, diagonal=True)


def crossed(bands: Lines, grid: BlockGrid) -> Tensor:
    """The blocks that may hold a pair at a chosen distance, `[B, Hq, rows, cols]` bool.

    The distances in a block lie between its first query minus its last key and its last query minus its first key, so every
    chosen pair is in one of these blocks. A run of distances as long as a block crosses two diagonals of blocks.
    """
    low, high = grid.q_first - grid.k_last, grid.q_last - grid.k_first
    if not grid.causal:
        low, high = torch.maximum(low, -high), torch.maximum(high, -low)
    runs = bands.count.shape[-1] - 1
    shape = (*bands.count.shape[:2], *low.shape[2:])
    ends = (x.div(bands.run, rounding_mode="floor") for x in (low, high + bands.run))
    before, up_to = (bands.count.gather(-1, x.clamp(0, runs).long().expand(shape).flatten(2)) for x in ends)
    return (before < up_to).view(shape)


def running_count(chosen: Tensor) -> Tensor:
    """How many entries of `chosen` `[B, Hq, n]` bool are chosen before each, and in all: `[B, Hq, n + 1]` int32."""
    return pad(chosen.cumsum(-1, dtype=torch.int32), (1, 0))
