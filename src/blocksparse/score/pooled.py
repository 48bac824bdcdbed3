"""Scores from the mean query and the mean key of each block."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import Literal, final

import torch
from attrs import converters, field, frozen
from torch import Tensor

from blocksparse.check.validators import (
    Rule,
    block_size,
    flag,
    maybe_whole,
    one_of,
    optional,
    positive,
    real,
    whole,
)
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import for_heads
from blocksparse.kernels.gemm.products import block_products, products
from blocksparse.kernels.layout.gather import band_channels
from blocksparse.kernels.score.block_mean import block_mean, block_means
from blocksparse.kernels.score.block_softmax import block_softmax, prefix_softmax
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.score.key_history import History, of_key_blocks
from blocksparse.score.scorer import (
    BlockLogits,
    BlockMass,
    InBlocks,
    Scorer,
    ScorerTraits,
    own_segment,
    segment_of,
)
from blocksparse.spec import AttentionSpec


def mean_tokens(
    q: Tensor,
    k: Tensor,
    permutation: GlobalPermutation,
    grid: Grid,
    history: History = None,
    *,
    padded_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """The mean queries `[B, Hq, rows, D]` and the mean keys `[B, H, cols, D]` of the blocks of `grid`."""
    q_index, lead = permutation.q_index, grid.q_lead
    if history is not None:
        mean = partial(block_mean, padded_tail=padded_tail)
        pooled_k = of_key_blocks("mean", k, permutation, grid.k_block, mean, history)
        return mean(q, grid.q_block, lead=lead, index=q_index), pooled_k
    k_index = permutation.key_slots
    return block_means(q, k, grid.q_block, grid.k_block, lead, padded_tail, q_index=q_index, k_index=k_index)


@final
@frozen(cache_hash=True)
class MeanPoolScorer(InBlocks, Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of the product of a block's mean query and mean key (PBS-Attn, appendix B.1).

    In a causal call, after a permuter that keeps keys inside segments of whole blocks, such as `SegmentKeySort`,
    the segment of a row is forced. It takes no part in the softmax. Otherwise every visible block is scored.

    Args:
        block: slots per block. On both sides unless `k_block` is given.
        k_block: slots per key block. In SpargeAttn they are half as long as query blocks.
        padded_tail: divide the sum of a short last block by the size of a whole one. The released PBS-Attn code
            does so. By default the mean is over the tokens that exist.
    """

    padded_tail: bool = field(default=False, validator=flag, kw_only=True)

    traits = ScorerTraits(history=True)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, history: History = None
    ) -> BlockMass:
        grid = self.grid(q, k, permutation, spec)
        pooled_q, pooled_k = mean_tokens(q, k, permutation, grid, history, padded_tail=self.padded_tail)
        logits, segment = block_products(pooled_q, pooled_k, grid), segment_of(permutation, grid)
        mass, forced = block_softmax(logits, grid, scale=spec.scale, segment=segment)
        return BlockMass(mass, grid, forced)  # [B, Hq, rows, cols]


Variance = Literal["exact", "diagonal"]


@final
@frozen(cache_hash=True)
class MeanLogitScorer(InBlocks, Scorer[GlobalPermutation, BlockLogits]):
    """The logit of a block's mean query and mean key: the mean logit of all pairs of the block.

    `MeanPoolScorer` takes a softmax of these over a row. Without it, logits can be compared with their mean and
    standard deviation (`MeanStd`). Blocks that are not visible hold -inf. Source: Sol-Attn, arXiv 2607.24027.

    Args:
        block: slots per block. On both sides unless `k_block` is given.
        k_block: slots per key block.
        variance: how the variance of a row's logits is computed. With "exact" it is computed from the logits. With
            "diagonal" each channel of the mean keys counts as independent of the others, `sum_d q_d^2 Var k_d`. It
            is the default of Sol-Attn's code. Both are over the blocks that the row may see.
    """

    block: int = field(default=64, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    variance: Variance = field(default="exact", validator=one_of("exact", "diagonal"), kw_only=True)

    def __call__(self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec) -> BlockLogits:
        grid = self.grid(q, k, permutation, spec)
        queries, keys = mean_tokens(q, k, permutation, grid)
        logits = block_products(queries, keys, grid) * spec.scale
        variance = None if self.variance == "exact" else _diagonal(queries * spec.scale, keys, grid)
        return BlockLogits(logits.masked_fill(~grid.visible, float("-inf")), grid, variance=variance)


def _diagonal(queries: Tensor, keys: Tensor, grid: Grid) -> Tensor:
    """`sum_d q_d^2 Var k_d` over the keys that each row of `queries` `[B, Hq, rows, D]` sees, `[B, Hq, rows]`."""
    if not grid.causal:  # all rows see all keys
        keys = keys - keys.mean(2, keepdim=True)
        return products(queries.square(), keys.square().mean(2, keepdim=True)).squeeze(3)
    # A centre, so that the difference of moments below stays exact: the first block, which is no row's future.
    keys = keys - keys[:, :, :1].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    keys = keys.repeat_interleave(grid.q_heads // keys.shape[1], dim=1)
    squares = keys.square()
    bad = ~squares.isfinite()  # which 0 times the share of a row that does not see it would not keep out
    share = grid.visible.to(keys.dtype).expand(*queries.shape[:2], -1, -1)
    share = share / share.sum(-1, keepdim=True).clamp_min(1)
    mean, square = (products(share, x.masked_fill(bad, 0.0).mT) for x in (keys, squares))  # [B, Hq, rows, D]
    variance: Tensor = (queries.square() * (square - mean.square()).clamp_min(0)).sum(-1)
    return variance.masked_fill((grid.visible & bad.any(-1).unsqueeze(2)).any(-1), float("nan"))


part_of_all = Rule(
    "two numbers (begin, end) from 0 to 1, of which the second is greater",
    lambda x: isinstance(x, tuple) and len(x) == 2 and all(isinstance(each, Real) for each in x),
    lambda x: 0 <= x[0] < x[1] <= 1,
)


@final
@frozen(cache_hash=True)
class RotaryBandScorer(InBlocks, Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of the product of a block's mean query and mean key, over some pairs of channels.

    Rotary embeddings turn channel `i` with channel `i + D / 2`, the first pairs fastest. The means of fast pairs
    cancel within a block, and those of slow pairs do not; this scorer uses one band of pairs. The logits are `q .
    k` over the band's channels, over the root of their number and the temperature. Source: Prism, arXiv
    2602.08426.

    Args:
        band: where the band begins and ends, as shares of the `D / 2` pairs. Pairs that it cuts belong to it. With
            a head dim of 128, (0, 0.5) are the 32 fastest pairs.
        block: slots per block. On both sides unless `k_block` is given.
        k_block: slots per key block.
        temperature: divisor of the logits. None measures it per head. It is the ratio of the means of the band to
            those of all channels, times the root of the band's share of channels. These means are root mean
            squares over all blocks and channels. It is measured over all blocks of a call. So the choice depends a
            little on later tokens and on how a prompt is chunked.
    """

    band: tuple[float, float] = field(validator=part_of_all)
    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    temperature: float | None = field(
        default=None, converter=converters.optional(real), validator=optional(positive), kw_only=True
    )

    traits = ScorerTraits(history=True)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, history: History = None
    ) -> BlockMass:
        """Score the blocks.

        Raises:
            ValueError: the head dim is odd.
        """
        D = q.shape[3]
        if D % 2:
            raise ValueError(
                f"'RotaryBandScorer' needs pairs of channels, and the head dim is odd: {D}. Pad q and k."
            )
        first, end = math.floor(self.band[0] * (D // 2)), math.ceil(self.band[1] * (D // 2))
        grid = self.grid(q, k, permutation, spec)
        queries = block_mean(q, grid.q_block, lead=grid.q_lead, index=permutation.q_index)  # [B, Hq, rows, D]
        keys = of_key_blocks("mean", k, permutation, grid.k_block, block_mean, history)  # [B, H, cols, D]
        share = 2 * (end - first) / D
        mine, its = band_channels(queries, keys, first, end, self.temperature)
        logits = block_products(mine, its, grid)
        mass, _ = block_softmax(logits, grid, scale=spec.scale / math.sqrt(share))
        return BlockMass(mass, grid)  # [B, Hq, rows, cols]

    def alignment(self, causal: bool) -> int:
        if self.temperature is None:
            raise ValueError(
                "'RotaryBandScorer' without 'temperature' measures it over all blocks of a call. Give one."
            )
        return super().alignment(causal)


_SCORES_AT_ONCE = 1 << 24


@final
@frozen(cache_hash=True)
class PrefixOrderScorer(InBlocks, Scorer[Permutation, BlockMass]):
    """Softmax of `<mean query of the group, key>` over the keys before the group, summed by block.

    `GlobalIndexMap` sorts single keys by the same products (S2O, eq. 2). Here they are scaled and get a softmax,
    so that a selector can keep a share of the mass, as an alternative to the early stop. The group's own keys are
    forced and take no part in the softmax. If the permutation has no query groups, each row of blocks is a group.
    Its softmax runs over all keys that its last query may see, and nothing is forced.

    Args:
        block: slots per block. On both sides unless `k_block` is given.
        k_block: slots per key block.
    """

    def __call__(self, q: Tensor, k: Tensor, permutation: Permutation, spec: AttentionSpec) -> BlockMass:
        grid = self.grid(q, k, permutation, spec)
        N, group = k.shape[2], permutation.group
        if group is not None:
            offset = N - q.shape[2] if spec.causal else 0
            mean = block_mean(q, group, lead=offset % group)  # [B, Hq, G, D]
            seen = (offset // group + torch.arange(mean.shape[2], device=q.device)).view(1, 1, -1, 1) * group
            first = seen.clamp_min(offset)
        else:
            mean = block_mean(permutation.gather_queries(q), self.block, lead=grid.q_lead)
            seen, first = grid.q_last + 1, grid.q_first  # [B|1, H|1, rows, 1]
        if not spec.causal:
            seen = torch.full_like(seen, N)

        hidden = None if grid.window is None else first - grid.window  # keys up to there are
        values = self._mass(mean * spec.scale, k, grid, seen, hidden)  # [B, Hq, G, cols]
        if grid.group_of_row is not None:
            values = values[:, :, grid.group_of_row]
        return BlockMass(values, grid, own_segment(grid, group))

    def _mass(self, mean: Tensor, k: Tensor, grid: Grid, seen: Tensor, hidden: Tensor | None) -> Tensor:
        """Mass of each block for each mean query. `seen` and `hidden` bound the keys."""
        B, Hq, G, _ = mean.shape
        keys = k.to(mean.dtype)
        slots = grid.k_position  # [B|1, H|1, G|1, cols * k_block]
        parts = []
        # Some groups at a time, because scores of single keys take more memory than scores of blocks.
        step = max(1, _SCORES_AT_ONCE // (B * Hq * max(k.shape[2], slots.shape[-1])))
        for g in range(0, G, step):
            rows = slice(g, min(g + step, G))
            logits = products(mean[:, :, rows], keys)
            if hidden is not None:
                logits.masked_fill_(torch.arange(k.shape[2], device=k.device) <= hidden[:, :, rows], float("-inf"))
            mass = prefix_softmax(logits, seen[:, :, rows])
            part = slots[:, :, rows] if slots.shape[2] > 1 else slots
            part = for_heads(part, Hq).expand(B, Hq, rows.stop - g, -1).long()
            mass = mass.gather(-1, part.clamp_min(0)).masked_fill(part < 0, 0.0)
            parts.append(mass.unflatten(-1, (-1, grid.k_block)).sum(-1))
        return torch.cat(parts, dim=2)
