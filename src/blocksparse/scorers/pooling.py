"""Segments of a permutation in scorers."""

from __future__ import annotations

from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.permuters.permutation import GlobalPermutation


def segment_of(permutation: GlobalPermutation, grid: Grid) -> int | None:
    """The length of the segments that keys stay in; None unless causal and each block lies in one segment."""
    S = permutation.segment
    if S is None or not grid.causal or S % grid.q_block or S % grid.k_block:
        return None
    return min(S, FAR)


def own_segment(grid: Grid, segment: int | None) -> Tensor | None:
    """The blocks that PBS-Attn forces: those of the row's own segment; None without segments or if not causal."""
    return within_reach(None, grid, segment=segment) if segment is not None and grid.causal else None


def reach_of(cells: Grid) -> dict[str, Tensor]:
    """Fields of `Cells` for a grid whose blocks are cells, or rows of blocks by groups of keys."""
    reach = {"q_last": cells.q_last.squeeze(3), "k_first": cells.k_first.squeeze(2)}
    if cells.window is not None:
        reach |= {"q_floor": cells.q_first.squeeze(3) - cells.window, "k_last": cells.k_last.squeeze(2)}
    return reach
