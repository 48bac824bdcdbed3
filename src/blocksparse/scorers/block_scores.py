"""The values that scorers give."""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.geometry import Grid


@frozen(eq=False)
class BlockScores:
    """The score of each block, one number per block and query head.

    Blocks that are `forced` are kept whatever their values are. A rule that keeps a share of the mass may count
    them first, and then fewer others are kept than if forced blocks were added after the selection.

    Raises:
        TypeError: `values` is not fp32 (or float64), or `forced` is not bool.
        ValueError: one of them does not have an entry for each block of the grid.
    """

    values: Tensor  # [B, Hq, rows, cols] fp32, or float64
    grid: Grid
    forced: Tensor | None = None  # [B|1, Hq|1, rows, cols] bool; None forces nothing

    def __attrs_post_init__(self) -> None:
        shape = self.grid.batch, self.grid.q_heads, self.grid.rows, self.grid.cols
        if self.values.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"'values' must be float32: {self.values.dtype}; convert them with .float()")
        if self.values.shape != shape:
            its = tuple(self.values.shape)
            raise ValueError(f"'values' must have the shape [B, Hq, rows, cols] = {shape}: {its}")
        if self.forced is None:
            return
        if self.forced.dtype != torch.bool:
            raise TypeError(f"'forced' must be bool: {self.forced.dtype}")
        its = tuple(self.forced.shape)
        if its[2:] != shape[2:] or len(its) != 4 or its[0] not in (1, shape[0]) or its[1] not in (1, shape[1]):
            raise ValueError(f"'forced' must have the shape [B|1, Hq|1, rows, cols] of {shape}: {its}")


@frozen(eq=False)
class BlockMass(BlockScores):
    """Scores that are non-negative and add up along a row, which a cumulative rule needs."""


@frozen(eq=False)
class BlockLogits(BlockScores):
    """Scores that are logits: any real numbers, of which differences within a row count.

    Raises:
        TypeError, ValueError: `variance` is not of the dtype of `values`, or does not have an entry for each row.
    """

    variance: Tensor | None = field(
        default=None, kw_only=True
    )  # [B, Hq, rows], of a row's logits; None: their own

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.variance is None:
            return
        if self.variance.dtype != self.values.dtype:
            raise TypeError(f"'variance' must be {self.values.dtype}, as 'values' are: {self.variance.dtype}")
        if self.variance.shape != self.values.shape[:3]:
            its = tuple(self.variance.shape)
            raise ValueError(
                f"'variance' must have the shape [B, Hq, rows] = {tuple(self.values.shape[:3])}: {its}"
            )
