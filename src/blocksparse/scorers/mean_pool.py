"""Products of mean queries and mean keys of blocks (PBS-Attn, appendix B.1; also its MeanPooling baseline)."""

from __future__ import annotations

from functools import partial
from math import lcm
from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, flag, maybe_whole, optional, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.block_products import block_products
from blocksparse.kernels.scoring.block_mean import block_mean, block_means
from blocksparse.kernels.scoring.block_softmax import block_softmax
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer


@final
@frozen(cache_hash=True)
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
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)

    keeps_history = True
    takes_paged_keys = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: GlobalPermutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> BlockMass:
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.k_block or self.block)
        pooled_q, pooled_k = self._means(q, k, permutation, grid, history)
        logits, segment = block_products(pooled_q, pooled_k, grid), pooling.segment_of(permutation, grid)
        mass, forced = block_softmax(logits, grid, scale=spec.scale, segment=segment)
        return BlockMass(mass, grid, forced)  # [B, Hq, rows, cols]

    def _means(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, grid: Grid, history: KeyHistory | None
    ) -> tuple[Tensor, Tensor]:
        """The mean queries `[B, Hq, rows, D]` and the mean keys `[B, H, cols, D]` of blocks."""
        paged = None if history is None else history.paged(k)
        if history is not None and paged is None:
            mean = partial(block_mean, padded_tail=self.padded_tail)
            pooled_k = history.blocks("mean", k, permutation, grid.k_block, partial(mean, block=grid.k_block))
            return mean(q, grid.q_block, lead=grid.q_lead, index=permutation.q_index), pooled_k
        return block_means(
            q,
            k if paged is None else paged.keys,
            grid.q_block,
            grid.k_block,
            lead=grid.q_lead,
            padded_tail=self.padded_tail,
            q_index=permutation.q_index,
            k_index=permutation.key_slots if paged is None else paged.key_slots,
        )

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)
