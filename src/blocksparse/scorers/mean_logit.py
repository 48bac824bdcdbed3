"""Logits of mean queries and mean keys of blocks, and how much they vary (Sol-Attn, arXiv 2607.24027)."""

from __future__ import annotations

from math import lcm
from typing import Literal, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, maybe_whole, one_of, optional, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.block_products import block_products
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.scoring.block_mean import block_means
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockLogits
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer

Variance = Literal["exact", "diagonal"]


@final
@frozen(cache_hash=True)
class MeanLogitScorer(Scorer[GlobalPermutation, BlockLogits]):
    """The logit of a block's mean query and mean key: the mean logit of all pairs of the block.

    `MeanPoolScorer` takes a softmax of these over a row. Without it, logits can be compared with their mean and
    standard deviation (`MeanStd`). Blocks that are not reachable hold -inf.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
        variance: how the variance of a row's logits is found: "exact" leaves it to them; "diagonal" takes each
            channel of the mean keys as independent of the others, `sum_d q_d^2 Var k_d`, the default of Sol-Attn's
            code. Both are over the blocks that the row may reach.
    """

    block: int = field(default=64, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    variance: Variance = field(default="exact", validator=one_of("exact", "diagonal"), kw_only=True)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: GlobalPermutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> BlockLogits:
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.k_block or self.block)
        queries, keys = block_means(
            q,
            k,
            grid.q_block,
            grid.k_block,
            lead=grid.q_lead,
            q_index=permutation.q_index,
            k_index=permutation.key_slots,
        )
        logits = block_products(queries, keys, grid) * spec.scale
        variance = None if self.variance == "exact" else _diagonal(queries * spec.scale, keys, grid)
        return BlockLogits(logits.masked_fill(~grid.reachable, float("-inf")), grid, variance=variance)

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)


def _diagonal(queries: Tensor, keys: Tensor, grid: Grid) -> Tensor:
    """`sum_d q_d^2 Var k_d` over the keys that each row reaches, `[B, Hq, rows]`.

    `queries` are `[B, Hq, rows, D]`, `keys` `[B, H, cols, D]`.
    """
    if not grid.causal:  # all rows reach all keys
        keys = keys - keys.mean(2, keepdim=True)
        return products(queries.square(), keys.square().mean(2, keepdim=True)).squeeze(3)
    # A centre, so that the difference of moments below loses no digits: the first block, which is no row's future.
    keys = keys - keys[:, :, :1].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    keys = keys.repeat_interleave(grid.q_heads // keys.shape[1], dim=1)
    squares = keys.square()
    bad = ~squares.isfinite()  # which 0 times the share of a row that does not reach it would not keep out
    share = grid.reachable.to(keys.dtype).expand(*queries.shape[:2], -1, -1)
    share = share / share.sum(-1, keepdim=True).clamp_min(1)
    mean, square = (products(share, x.masked_fill(bad, 0.0).mT) for x in (keys, squares))  # [B, Hq, rows, D]
    variance: Tensor = (queries.square() * (square - mean.square()).clamp_min(0)).sum(-1)
    return variance.masked_fill((grid.reachable & bad.any(-1).unsqueeze(2)).any(-1), float("nan"))
