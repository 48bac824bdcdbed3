"""Products of mean queries and mean keys of blocks (PBS-Attn, appendix B.1; also its MeanPooling baseline)."""

from __future__ import annotations

from functools import partial
from typing import Self, final

from attrs import converters, evolve, field, frozen
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.block_products import block_products
from blocksparse.kernels.scoring.block_mean import block_mean, block_means
from blocksparse.kernels.scoring.block_softmax import block_softmax
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer
from blocksparse.validators import block_size, flag, optional, size, whole


@final
@frozen(eq=False)
class MeanPoolScorer(Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of the product of a block's mean query and mean key (PBS-Attn, appendix B.1).

    After a permuter that keeps keys inside segments of whole blocks, as `SegmentKeySort` does, and in a causal
    call, the segment in which a row lies is forced and takes no part in the softmax. Otherwise every reachable
    block is scored.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block; in SpargeAttn they are half as long as query blocks.
        padded_tail: divide the sum over a short block at the tail by the size of a whole block, as the released
            PBS-Attn code does. By default the mean is over the tokens that exist.
        window: how many tokens a query sees at most, its own included; `Pipeline.in_window` sets it.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(
        default=None, converter=converters.optional(whole), validator=optional(block_size), kw_only=True
    )
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)
    window: int | None = field(
        default=None, converter=converters.optional(whole), validator=optional(size), kw_only=True
    )

    def in_window(self, window: int | None) -> Self:
        return evolve(self, window=window)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, *, causal: bool, scale: float
    ) -> BlockMass:
        grid = self._grid(q, k, permutation, causal)
        pooled_q, pooled_k = block_means(
            q,
            k,
            grid.q_block,
            grid.k_block,
            lead=grid.q_lead,
            padded_tail=self.padded_tail,
            q_index=permutation.q_index,
            k_index=permutation.key_slots,
        )
        return self._mass(pooled_q, pooled_k, permutation, grid, scale)

    @property
    def keeps_history(self) -> bool:
        return True

    def with_history(
        self,
        q: Tensor,
        k: Tensor,
        permutation: GlobalPermutation,
        history: KeyHistory,
        *,
        causal: bool,
        scale: float,
    ) -> BlockMass:
        grid, mean = self._grid(q, k, permutation, causal), partial(block_mean, padded_tail=self.padded_tail)
        pooled_k = history.blocks("mean", k, permutation, grid.k_block, partial(mean, block=grid.k_block))
        pooled_q = mean(q, grid.q_block, lead=grid.q_lead, index=permutation.q_index)
        return self._mass(pooled_q, pooled_k, permutation, grid, scale)

    def _grid(self, q: Tensor, k: Tensor, permutation: GlobalPermutation, causal: bool) -> Grid:
        k_block = self.k_block or self.block
        return Grid.of(q, k, permutation, q_block=self.block, k_block=k_block, causal=causal, window=self.window)

    def _mass(
        self, pooled_q: Tensor, pooled_k: Tensor, permutation: GlobalPermutation, grid: Grid, scale: float
    ) -> BlockMass:
        logits, segment = block_products(pooled_q, pooled_k, grid), pooling.segment_of(permutation, grid)
        mass, forced = block_softmax(logits, grid, scale=scale, segment=segment)
        return BlockMass(mass, grid, forced)  # [B, Hq, rows, cols]
