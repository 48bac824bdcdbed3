"""Values: what a scorer gives."""

from __future__ import annotations

from attrs import field, frozen
from torch import Tensor

from blocksparse.scorers.grid import Grid


@frozen(eq=False)
class BlockScores:
    """What each block is worth, on query heads.

    `forced` blocks are kept whatever their values say and are counted first by cumulative rules; that is not
    the same as a union after selection.
    """

    values: Tensor = field()  # [B, Hq, rows, cols] fp32
    grid: Grid
    forced: Tensor | None = None  # [B|1, Hq|1, rows, cols] bool; None forces nothing

    @values.validator
    def _check_values(self, _: object, values: Tensor) -> None:
        if values.ndim != 4:
            raise ValueError(f"'values' must have the shape [B, Hq, rows, cols]: {tuple(values.shape)}")


@frozen(eq=False)
class BlockMass(BlockScores):
    """Scores that are non-negative and add up along a row: only these have a cumulative rule."""
