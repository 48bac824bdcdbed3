"""Scores by strided pooling: products of tiles of a few tokens (cells) that are smaller than the blocks."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import (
    Rule,
    block_size,
    flag,
    is_real,
    maybe_whole,
    one_of,
    optional,
    real,
    whole,
)
from blocksparse.grid import Grid
from blocksparse.kernels.gemm.products import (
    StridedPooling,
    block_products,
    strided_view,
    strides_behind,
    wide_dtype,
)
from blocksparse.kernels.masks.grid import AlwaysKept
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.score.block_softmax import block_softmax
from blocksparse.kernels.score.strided_mass import strided_mass
from blocksparse.kernels.score.strided_means import group_max, strided_mean, strided_means
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.score.key_history import History, of_key_blocks
from blocksparse.score.scorer import (
    BlockLogits,
    BlockMass,
    InBlocks,
    Scorer,
    ScorerTraits,
    ValueScorer,
    own_segment,
    segment_of,
    visibility_of,
)
from blocksparse.spec import AttentionSpec

Pattern = Literal["antidiagonal", "slash", "sum"]


@final
@frozen(cache_hash=True)
class AntidiagonalScorer(InBlocks, Scorer[GlobalPermutation, BlockMass]):
    """Mass of a block: what its cells of `stride` x `stride` pairs hold in a softmax over cells (XAttention).

    The logit of a cell is the mean logit of the pairs on its antidiagonal, query slot `stride - 1 - r` with key
    slot `r`. So every query and every key of the cell counts once. Each vertical or slash line that runs through
    whole cells meets the antidiagonal. Positions determine which cells a query cell sees, as for blocks. A query
    cell spreads a mass of 1 over them, so a row of blocks holds `block / stride` in all.

    The empty slots of a short cell, at the tail or where a chunk starts, are filled with the mean of its tokens.
    This takes M N D / stride multiplications per query head, half of them when causal and in original order.

    Args:
        stride: side of a cell.
        block: slots per block, a multiple of `stride`. On both sides unless `k_block` is given.
        k_block: slots per key block. A multiple of `stride`.
        pattern: the pairs of a cell that count: its "antidiagonal", its main diagonal ("slash"), or all of them
            ("sum"). With "sum", the mean query and the mean key of each cell are rounded to the dtype of `q` and
            multiplied. `stride` times fewer multiplications do.
        forced: force the block of token 0 and the diagonal. Their mass counts, as in XAttention. `False` leaves
            both to the selector. Some permuters keep keys inside segments of whole blocks, such as
            `SegmentKeySort`. After these, `False` also forces the segment that a causal row lies in, and leaves it
            out of the softmax, as in PBS-Attn. Not causal: nothing is forced, as in the released code.
        padded_tail: leave empty slots of a short cell at zero. The released code does so.
        normalize: take a softmax for each query cell, as XAttention does. `False` takes one for all query cells of
            a row of blocks together, so that a cell counts by the size of its weights. A block's mass is then the
            sum of `exp(logit)` over its pairs of cells, as a share of the row's (SubBlock of SGLang). A row holds
            a mass of 1.
    """

    stride: int = field(default=8, converter=whole, validator=block_size)
    block: int = field(default=128, converter=whole, validator=block_size, kw_only=True)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    pattern: Pattern = field(
        default="antidiagonal", validator=one_of("antidiagonal", "slash", "sum"), kw_only=True
    )
    forced: bool = field(default=True, validator=flag, kw_only=True)
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)
    normalize: bool = field(default=True, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.check_holds("stride", self.stride)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, history: History = None
    ) -> BlockMass:
        grid = self.grid(q, k, permutation, spec)
        offset = k.shape[2] - q.shape[2] if spec.causal else 0
        lead, slots, weight = offset % self.stride, self.stride, spec.scale / self.stride
        segment = None if self.forced else segment_of(permutation, grid)
        visible = _cell_visibility(q, k, permutation, spec, grid, self.stride)
        if self.pattern == "sum":
            queries, keys = self._means(q, k, permutation, lead, history)
            lead, slots, weight = 0, 1, spec.scale
        else:
            queries, keys = permutation.gather_queries(q), permutation.gather_keys(k)
        cells = grid.q_block // self.stride, grid.k_block // self.stride
        within = None if segment is None else segment // self.stride
        first, flipped, joint = offset // self.stride, self.pattern == "antidiagonal", not self.normalize
        tail = self.padded_tail
        of = StridedPooling(slots, lead, *cells, spec.causal, tail, first, within, flipped, joint, **visible)
        mass = strided_mass(queries, keys, of, weight=weight)
        forced = own_segment(grid, segment)
        if self.forced and grid.causal:
            forced = keep_visible(None, grid, always=AlwaysKept(first=1), diagonal=True)
        return BlockMass(mass, grid, forced)  # [B, Hq, rows, cols]

    def _means(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, lead: int, history: History
    ) -> tuple[Tensor, Tensor]:
        """Mean queries `[B, Hq, q cells, D]` and mean keys `[B, H, k cells, D]` of cells, in slot order."""
        if history is not None:
            mean = partial(strided_mean, padded_tail=self.padded_tail)
            keys = of_key_blocks("cell", k, permutation, self.stride, mean, history)
            return mean(q, self.stride, lead=lead, index=permutation.q_index), keys
        q_index, k_index = permutation.q_index, permutation.key_slots
        return strided_means(q, k, self.stride, lead, self.padded_tail, q_index=q_index, k_index=k_index)

    @property
    def traits(self) -> ScorerTraits:
        return ScorerTraits(history=self.pattern == "sum")


def _cell_visibility(
    q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, grid: Grid, stride: int
) -> dict[str, Any]:
    """Fields of `StridedPooling` for positions: which cells may meet; none where their indices say as much."""
    if not grid.causal:
        return {}
    if permutation.q_index is None and permutation.k_index is None:
        return {} if grid.window is None else {"behind": strides_behind(grid.window, stride)}
    cells = Grid.of(q, k, permutation, spec, q_block=stride, k_block=stride)
    if permutation.q_index is None and permutation.k_index is not None:
        cells = cells.shared() if permutation.k_index.shape[1] == k.shape[1] else cells
    return visibility_of(cells)


@final
@frozen(cache_hash=True)
class QueryRowsScorer(InBlocks, Scorer[GlobalPermutation, BlockMass]):
    """Sums over the queries of a row of blocks of `exp(q . mean key)`, as shares of the row's total.

    A query counts for a block if it may see the block's last token, so that no mean holds keys of its future. In
    original order a row's own block thus counts for its last query alone. A row that sees no other block may hold
    no mass at all, so also keep the diagonal or a `Band`. Mean keys are rounded to the dtype of the keys, as in
    the authors' code. This takes M N D / k_block multiplications per query head, `block` times as many as
    `MeanPoolScorer`. It holds logits of single queries for a few rows at a time only. Source: FlashPrefill, arXiv
    2603.06199, section 3.2.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
    """

    traits = ScorerTraits(history=True)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, history: History = None
    ) -> BlockMass:
        grid = self.grid(q, k, permutation, spec)
        keys = of_key_blocks("cell", k, permutation, grid.k_block, strided_mean, history)  # [B, H, cols, D]
        first, visible = grid.first_position, _row_visibility(grid)
        of = StridedPooling(1, 0, self.block, 1, spec.causal, False, first, joint=True, **visible)
        mass = strided_mass(permutation.gather_queries(q), keys, of, weight=spec.scale)
        return BlockMass(mass, grid)  # [B, Hq, rows, cols]


def _row_visibility(grid: Grid) -> dict[str, Any]:
    """Fields of `StridedPooling` by which blocks are visible to queries that may see their last token."""
    if not grid.causal:
        return {}
    position = grid.q_position[..., grid.q_lead : grid.q_lead + grid.q_len]  # [B|1, H|1, M]
    last = grid.k_last.squeeze(2)  # [B|1, H|1, cols]
    visible = {"q_last": position.contiguous(), "k_first": last}
    if grid.window is not None:
        visible |= {"q_floor": position - grid.window, "k_last": last}
    return visible


@final
@frozen(cache_hash=True)
class FlattenMaxPoolScorer(InBlocks, Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of the best product of two token groups (BFLA, eq. 3 to 9).

    A group is `g` consecutive slots. The product of two groups is `q[t] . k[t]` summed over their slots `t`: the
    sum of the main diagonal of their `g x g` logits. The score of a block is the greatest product of a query group
    and a key group in it. A pair of groups takes part on two conditions. Some query of the row of blocks may see
    some key of the key group, and some slot has a token in both groups. Short groups are compared over these slots
    only.

    The paper does not divide the sum by `g`. The spread of the sums grows with `g`, so that the softmax over
    blocks is close to one-hot and a target for the mass has little effect. `per_token` divides the sums.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        g: slots per group. Divides the blocks.
        k_block: slots per key block.
        per_token: divide each product by the number of slots with a token in both groups. This makes it a mean
            logit.
        padded_tail: pairs that take no part score 0. Zero padding does so in the released code. A 0 wins where all
            real products of a block are below 0.
    """

    block: int = field(default=256, converter=whole, validator=block_size)
    g: int = field(default=64, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    per_token: bool = field(default=False, validator=flag, kw_only=True)
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.check_holds("g", self.g)

    def __call__(self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec) -> BlockMass:
        grid = self.grid(q, k, permutation, spec)
        visible: dict[str, Any] = {}
        if spec.causal and (permutation.q_index is not None or permutation.k_index is not None):
            visible = visibility_of(Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.g))
        elif grid.window is not None:
            visible["behind"] = strides_behind(grid.window, self.g)
        cells = grid.q_block // self.g, grid.k_block // self.g
        of = StridedPooling(self.g, grid.q_lead, *cells, spec.causal, self.padded_tail, **visible)
        queries, keys = permutation.gather_queries(q), permutation.gather_keys(k)
        best = group_max(queries, keys, of, first_row=grid.first_row, per_token=self.per_token)
        mass, _ = block_softmax(best, grid, scale=spec.scale)
        return BlockMass(mass, grid)  # [B, Hq, rows, cols]


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
        k_block: slots per key block. A multiple of `stride`.
        weight: what a deviation of the logs of lengths adds to a logit.
        lengths: mean and deviation of these logs. None measures them over the whole cells of each KV head in each
            call. The choice then depends a little on later tokens and on how a prompt is chunked.
    """

    stride: int = field(default=8, converter=whole, validator=block_size)
    block: int = field(default=128, converter=whole, validator=block_size, kw_only=True)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    weight: float = field(default=0.2, converter=real, validator=at_least_0, kw_only=True)
    lengths: tuple[float, float] | None = field(default=None, validator=optional(mean_and_deviation), kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.check_holds("stride", self.stride)

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
        """Bonus `[B, H, cols]` of blocks for long values in `v` `[B, H, N, Dv]`."""
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
        return _by_slot(above.clamp_min(0).unsqueeze(3), block // self.stride, 1, 0).squeeze(4).squeeze(3)

    def alignment(self, causal: bool) -> int:
        if self.lengths is None and causal:
            raise ValueError(
                "'OutputAwareScorer' without 'lengths' measures the values of all keys, and a part has only those "
                "up to its end. Give them."
            )
        return super().alignment(causal)


def _by_slot(x: Tensor, block: int, stride: int, lead: int) -> Tensor:
    """The mean token of each slot of a block's cells, or 0, `[B, H, N, D] -> [B, H, blocks, stride, D]`."""
    sums = strided_view(x, block, lead).unflatten(3, (-1, stride)).sum(3, dtype=wide_dtype(x))
    there = x.new_ones((1, 1, x.shape[2], 1), dtype=sums.dtype)
    mean: Tensor = sums / strided_view(there, block, lead).unflatten(3, (-1, stride)).sum(3).clamp_min(1)
    return mean
