"""What scorers of blocks share."""

from __future__ import annotations

from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.permuters.permutation import GlobalPermutation


def segment_of(permutation: GlobalPermutation, grid: Grid) -> int | None:
    """The segments that keys stay in, as far as causal rows of blocks have one of their own: of whole blocks."""
    S = permutation.segment
    if S is None or not grid.causal or S % grid.q_block or S % grid.k_block:
        return None
    return min(S, FAR)


def own_segment(grid: Grid, segment: int | None) -> Tensor | None:
    """What PBS-Attn forces: the row's own segment; nothing without segments or without causality."""
    return grid.own_segment(segment) if segment is not None and grid.causal else None
