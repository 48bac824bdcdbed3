"""No scores, for selectors that use none and for orders in which the best keys come first (S2O)."""

from __future__ import annotations

from math import lcm
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, maybe_whole, optional, whole
from blocksparse.geometry import Grid
from blocksparse.permuters.permutation import Permutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer


@final
@frozen(cache_hash=True)
class NoScorer(Scorer[Permutation, BlockScores]):
    """Zeros that take no memory: blocks differ by position alone, and ties go to the lower column.

    If each query group has its own order of the keys (`GlobalIndexMap`), the blocks of the same segment are
    forced.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)

    takes_paged_keys = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: Permutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> BlockScores:
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.k_block or self.block)
        zeros = q.new_empty((), dtype=torch.float32).zero_().expand(*q.shape[:2], grid.rows, grid.cols)
        return BlockScores(zeros, grid, pooling.own_segment(grid, permutation.group))

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)
