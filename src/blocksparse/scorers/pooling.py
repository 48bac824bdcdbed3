"""How scorers treat the segments of a permutation."""

from __future__ import annotations

from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.permuters.permutation import GlobalPermutation


def segment_of(permutation: GlobalPermutation, grid: Grid) -> int | None:
    """The length of the segments that keys stay in; None unless causal and each block lies in one segment."""
    S = permutation.segment
    if S is None or not grid.causal or S % grid.q_block or S % grid.k_block:
        return None
    return min(S, FAR)


def own_segment(grid: Grid, segment: int | None) -> Tensor | None:
    """The blocks that PBS-Attn forces: those of the row's own segment; None without segments or if not causal."""
    return grid.own_segment(segment) if segment is not None and grid.causal else None
