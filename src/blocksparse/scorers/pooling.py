"""What scorers of blocks share."""

from __future__ import annotations

from torch import Tensor

from blocksparse.geometry import Grid


def own_segment(grid: Grid, segment: int | None) -> Tensor | None:
    """What PBS-Attn forces: the row's own segment; nothing without segments or without causality."""
    return grid.own_segment(segment) if segment is not None and grid.causal else None
