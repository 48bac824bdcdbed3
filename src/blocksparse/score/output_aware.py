"""Antidiagonals of blocks, and how long their values are (Stem, arXiv 2603.06274)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import Rule, block_size, is_real, maybe_whole, multiple, optional, real, whole
from blocksparse.kernels.gemm.products import block_products, strided_view, wide_dtype
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.score.scorer import BlockLogits, InBlocks, ValueScorer
from blocksparse.spec import AttentionSpec

_LEAST = 1e-6  # added to lengths and to their deviation, as in the released code
at_least_0 = Rule("a finite number, at least 0", is_real, lambda x: 0 <= x < float("inf"))
mean_and_deviation = Rule(
    "two finite numbers (mean, deviation), of which the second is at least 0",
    lambda x: isinstance(x, tuple) and len(x) == 2 and all(map(at_least_0.is_kind, x)),
    lambda x: abs(x[0]) < float("inf") and at_least_0.passes(x[1]),
)


@final
@frozen(cache_hash=True)
class OutputAwareScorer(InBlocks, ValueScorer[GlobalPermutation, BlockLogits]):
    """The mean logit on the antidiagonals of a block's cells, and a bonus for keys with long values (Stem).

    A cell is `stride` x `stride` pairs, sampled at query `stride - 1 - r` and key `r`. Since that mean is linear,
    it is the product of mean queries and mean keys, one for each slot of a cell. This takes a `block / stride`-th
    of the multiplications of XAttention. The bonus of a cell is the log of its longest value, in deviations above
    the mean of the head, times `weight`; 0 if it is below the mean. A block takes the mean of its cells. Blocks
    that are not visible hold -inf.

    Args:
        stride: side of a cell.
        block: slots per block, a multiple of `stride`. On both sides unless `k_block` is given.
        k_block: slots per key block, a multiple of `stride`.
        weight: what a deviation of the logs of lengths adds to a logit.
        lengths: the mean and the deviation of the logs of lengths. None measures them over the whole cells of each
            KV head in each call. The choice then depends a little on later tokens and on how a prompt is chunked.
    """

    stride: int = field(default=8, converter=whole, validator=block_size)
    block: int = field(default=128, converter=whole, validator=block_size, kw_only=True)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    weight: float = field(default=0.2, converter=real, validator=at_least_0, kw_only=True)
    lengths: tuple[float, float] | None = field(default=None, validator=optional(mean_and_deviation), kw_only=True)

    def __attrs_post_init__(self) -> None:
        multiple("block", self.block, "stride", self.stride)
        multiple("k_block", self.k_block, "stride", self.stride)

    def with_values(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: GlobalPermutation, spec: AttentionSpec
    ) -> BlockLogits:
        grid = self.grid(q, k, permutation, spec)
        queries = _by_slot(permutation.gather_queries(q), grid.q_block, self.stride, grid.q_lead)
        keys = _by_slot(permutation.gather_keys(k), grid.k_block, self.stride, 0)
        logits = block_products(queries.flip(3).flatten(3), keys.flatten(3), grid) * (spec.scale / self.stride)
        bonus = self._bonus(permutation.gather_keys(v), grid.k_block).repeat_interleave(
            q.shape[1] // keys.shape[1], 1
        )
        logits = logits + self.weight * bonus.unsqueeze(2)
        return BlockLogits(logits.masked_fill(~grid.visible, float("-inf")), grid)

    def _bonus(self, v: Tensor, block: int) -> Tensor:
        """Bonus of each block for long values, `[B, H, cols]`, from `v` `[B, H, N, Dv]` in slots."""
        length = torch.linalg.vector_norm(v, dim=3, keepdim=True, dtype=wide_dtype(v))
        logs = (strided_view(length, self.stride, 0).amax((3, 4)) + _LEAST).log()  # [B, H, cells]
        if self.lengths is None:
            whole_cells = logs[..., : max(v.shape[2] // self.stride, 1)]
            mean = whole_cells.mean(2, keepdim=True)
            squares = (whole_cells - mean).square().sum(2, keepdim=True)
            deviation = (squares / max(whole_cells.shape[2] - 1, 1)).sqrt()
            above = (logs - mean) / (deviation + _LEAST)
        else:
            above = (logs - self.lengths[0]) / (self.lengths[1] + _LEAST)
        return _mean(above.clamp_min(0).unsqueeze(3), block // self.stride).squeeze(3)

    def alignment(self, causal: bool) -> int:
        if self.lengths is None and causal:
            raise ValueError(
                "'OutputAwareScorer' without 'lengths' measures the values of all keys, and a part has only those "
                "up to its end. Give them."
            )
        return super().alignment(causal)


def _by_slot(x: Tensor, block: int, stride: int, lead: int) -> Tensor:
    """The mean token of each slot of the cells of a block, `[B, H, N, D] -> [B, H, blocks, stride, D]`.

    The first `lead` slots of block 0 are empty. A slot without a token in a short block has zeros.
    """
    sums = strided_view(x, block, lead).unflatten(3, (-1, stride)).sum(3, dtype=wide_dtype(x))
    there = x.new_ones((1, 1, x.shape[2], 1), dtype=sums.dtype)
    mean: Tensor = sums / strided_view(there, block, lead).unflatten(3, (-1, stride)).sum(3).clamp_min(1)
    return mean


def _mean(x: Tensor, block: int) -> Tensor:
    """The mean of each `block` entries `[B, H, N, D] -> [B, H, blocks, D]`, of fewer in the last one."""
    return _by_slot(x, block, 1, 0).squeeze(3)
