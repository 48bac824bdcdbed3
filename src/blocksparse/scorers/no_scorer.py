"""No scores, for selectors that use none and for orders in which the best keys come first (S2O)."""

from __future__ import annotations

from typing import Self, final

import torch
from attrs import converters, evolve, field, frozen
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.permuters.permutation import Permutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.scorer import Scorer
from blocksparse.validators import block_size, optional, size, whole


@final
@frozen(eq=False)
class NoScorer(Scorer[Permutation, BlockScores]):
    """Zeros that take no memory: blocks differ by position alone, and ties go to the lower column.

    If each query group has its own order of the keys (`GlobalIndexMap`), the blocks of its own segment are forced.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
        window: how many tokens a query sees at most, its own included; `Pipeline.in_window` sets it.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(
        default=None, converter=converters.optional(whole), validator=optional(block_size), kw_only=True
    )
    window: int | None = field(
        default=None, converter=converters.optional(whole), validator=optional(size), kw_only=True
    )

    def in_window(self, window: int | None) -> Self:
        return evolve(self, window=window)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: Permutation, *, causal: bool, scale: float
    ) -> BlockScores:
        grid = Grid.of(
            q,
            k,
            permutation,
            q_block=self.block,
            k_block=self.k_block or self.block,
            causal=causal,
            window=self.window,
        )
        zeros = q.new_empty((), dtype=torch.float32).zero_().expand(*q.shape[:2], grid.rows, grid.cols)
        return BlockScores(zeros, grid, pooling.own_segment(grid, permutation.group))
