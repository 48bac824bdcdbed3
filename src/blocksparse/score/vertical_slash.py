"""Scores of the columns and diagonals that the last queries look at (MInference, FlexPrefill)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import final

from attrs import field, frozen
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.check.per_head import PerHead, at_least_0, maybe_per_head, over_blocks, written
from blocksparse.check.validators import block_size, flag, maybe_whole, optional, size, whole
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import HeadMask, for_heads
from blocksparse.kernels.gemm.products import block_products, products, run_sums, wide_dtype
from blocksparse.kernels.score.block_mean import block_mean, block_means
from blocksparse.kernels.score.block_softmax import block_divergence, block_softmax
from blocksparse.kernels.score.last_queries import last_query_sums, last_query_weights
from blocksparse.kernels.select.vertical_slash import ChosenRuns, crossed, running_count
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.score.key_history import History, of_key_blocks
from blocksparse.score.pooled import mean_tokens
from blocksparse.score.scorer import BlockMass, Scorer, ScorerTraits
from blocksparse.spec import AttentionSpec

_Later = Callable[[], Tensor]
"""Computes a tensor when it is asked for."""


@final
@frozen(eq=False)
class VerticalSlashScores(BlockMass):
    """Pooled mass of every block, and the mass of the vertical and slash lines of the last queries.

    A vertical line is one key, and a slash line is all pairs at one distance. The distance of a pair is query
    position minus key position in original order, or the absolute value of that when not causal. A line that is
    asked for is computed then, from the q and k of the call: do not change these before.
    """

    _vertical: Tensor | _Later = field(kw_only=True, repr=False)
    _slash: Tensor | _Later = field(kw_only=True, repr=False)
    _divergence: Tensor | _Later = field(kw_only=True, repr=False)
    _columns: Tensor | None = field(default=None, kw_only=True, repr=False)
    _bands: Tensor | None = field(default=None, kw_only=True, repr=False)
    tau: PerHead | None = field(default=None, kw_only=True, repr=False)  # as the scorer's

    @property
    def vertical(self) -> Tensor:
        """The mean weight that the last queries give to each key, `[B, Hq, N]` fp32."""
        return _tensor(self._vertical)

    @property
    def slash(self) -> Tensor:
        """The same for each distance, `[B, Hq, L]` fp32; `L` is `N`, or `max(M, N)` if not causal."""
        return _tensor(self._slash)

    @property
    def divergence(self) -> Tensor:
        """Divergence of pooled block weights from true ones, `[B, Hq]` fp32, from 0 to sqrt(ln 2)."""
        return _tensor(self._divergence)

    def mass_of_columns(self) -> Tensor:
        """The sum of `vertical` over each block of keys, `[B, Hq, cols]`."""
        return _mass_of_columns(self.vertical, self.grid) if self._columns is None else self._columns

    def mass_of_bands(self) -> Tensor:
        """The sum of `slash` over runs of as many distances as a block has keys, `[B, Hq, ceil(L / k_block)]`."""
        return run_sums(self.slash, self.grid.k_block) if self._bands is None else self._bands

    def columns_holding(self, keys: Tensor) -> Tensor:
        """The columns of blocks that hold one of the chosen `keys` `[B, Hq, N]` bool: `[B, Hq, 1, cols]`."""
        return _by_block(keys, self.grid).any(-1).unsqueeze(2)

    def blocks_at(self, distances: Tensor) -> Tensor:
        """The blocks that may hold a pair at a chosen distance, `[B, Hq, rows, cols]`.

        Args:
            distances: `[B, Hq, L]` bool, the chosen distances.
        """
        return crossed(ChosenRuns(running_count(distances), 1), self.grid)


@final
@frozen(cache_hash=True)
class VerticalSlashScorer(Scorer[GlobalPermutation, VerticalSlashScores]):
    """Softmax of the last queries over all keys, summed along columns and along diagonals.

    This is the estimate of MInference (section 3.2) and of FlexPrefill (section 3). The `values` are those of
    `MeanPoolScorer`, from mean queries and mean keys, for FlexPrefill's query-aware heads. The divergence is
    FlexPrefill's test of whether pooling describes a head well. It is the square root of the Jensen-Shannon
    divergence (natural logarithm) between two distributions over key blocks. One has the weights that the mean
    of the last queries gives to mean keys. The other has the true weights of these queries.

    Lines are measured with the last queries of a call. So a choice made from them is not causal and depends on how
    a prompt is chunked. It takes `last_q * N * D` multiplications per query head.

    Args:
        block: slots per block, on both sides.
        last_q: how many of the last queries are measured. `block` if None, as in FlexPrefill. MInference takes 64.
        pooled: compute `values` from pooled queries and keys. `False` leaves them 0, for selectors that look only
            at lines. It takes no memory.
        tau: compute `values` only in heads whose divergence is below this, and leave them 0 in others. A number,
            or one per query head. `RoutedByDivergence` must have the same `tau`. None means all heads. Of those
            others a GPU then reads only the last queries.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    last_q: int | None = field(default=None, converter=maybe_whole, validator=optional(size), kw_only=True)
    pooled: bool = field(default=True, validator=flag, kw_only=True)
    tau: PerHead | None = field(
        default=None, converter=maybe_per_head, validator=optional(at_least_0), repr=written, kw_only=True
    )

    by_row = "scores by the last queries of a call, which only its last part has"

    @property
    def traits(self) -> ScorerTraits:
        return ScorerTraits(history=True, values_below=self.tau if self.pooled else None)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, history: History = None
    ) -> VerticalSlashScores:
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.block)
        # Mean keys, [B, H, cols, D].
        keys: Tensor | _Later = partial(block_mean, k, self.block, index=permutation.key_slots)
        if history is not None:  # means are remembered; the last queries score every key again
            keys = of_key_blocks("mean", k, permutation, self.block, block_mean, history)
        count = self.last_q or self.block
        mean = queries = None  # of the last queries, [B, Hq, 1, D], and of blocks of queries, [B, Hq, rows, D]
        if self.pooled and not isinstance(keys, Tensor):
            if self.tau is not None:
                last = q[:, :, -count:]
                mean, keys = block_means(last, k, count, self.block, k_index=permutation.key_slots)
            else:
                queries, keys = mean_tokens(q, k, permutation, grid)

        last_q = _LastQueries(q, k, keys, mean, min(count, q.shape[2]), grid, spec.scale)
        # Rules that look at single lines have no use for sums, and those that look at sums none for lines.
        columns, bands = last_q.sums() if self.pooled else (None, None)
        divergence: Tensor | _Later = partial(last_q.divergence, columns)
        if isinstance(keys, Tensor) and self.pooled:
            heads = None
            if self.tau is not None:
                divergence = last_q.divergence(columns)
                heads = HeadMask(divergence, over_blocks(self.tau, divergence))
            if queries is None:
                queries = block_mean(q, self.block, lead=grid.q_lead, index=permutation.q_index, heads=heads)
            logits = block_products(queries, keys, grid, heads=heads)
            values, _ = block_softmax(logits, grid, scale=spec.scale, heads=heads)
        else:
            values = q.new_empty((), dtype=wide_dtype(q)).zero_().expand(*q.shape[:2], grid.rows, grid.cols)
        return VerticalSlashScores(
            values,
            grid,
            vertical=last_q.vertical,
            slash=last_q.slash,
            divergence=divergence,
            columns=columns,
            bands=bands,
            tau=self.tau if self.pooled else None,
        )


@final
class _LastQueries:
    """Attention of the last `P` queries, computed on demand."""

    def __init__(
        self, q: Tensor, k: Tensor, keys: Tensor | _Later, mean: Tensor | None, P: int, grid: Grid, scale: float
    ) -> None:
        self.last_q, self.k, self.q_len, self.keys, self.mean = q[:, :, -P:], k, q.shape[2], keys, mean
        self.grid, self.scale = grid, scale

    def vertical(self) -> Tensor:
        return self.lines[0]

    def slash(self) -> Tensor:
        return self.lines[1]

    @cached_property
    def lines(self) -> tuple[Tensor, Tensor]:
        grid = self.grid
        return last_query_weights(self.last_q, self.k, self.q_len, grid.causal, self.scale, grid.window)

    def sums(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Mass of columns and bands without lines, if a kernel computes it."""
        grid = self.grid
        if not grid.causal or grid.window is not None or grid.permutation.k_index is not None:
            return None, None
        return last_query_sums(self.last_q, self.k, self.scale, grid.k_block) or (None, None)

    def divergence(self, columns: Tensor | None) -> Tensor:
        """Divergence between mean-query weights on mean keys and the weights of key blocks."""
        grid, scale, P = self.grid, self.scale, self.last_q.shape[2]
        keys = self.keys if isinstance(self.keys, Tensor) else self.keys()
        logits = products(block_mean(self.last_q, P) if self.mean is None else self.mean, keys)
        # Without a window no mask is needed, because the last query sees every block.
        if grid.window is not None:
            seen = grid.k_last > grid.k_len - P - grid.window  # by one of the last queries
            logits, scale = (logits * scale).masked_fill(~seen, float("-inf")), 1.0
        if columns is None:
            columns = _mass_of_columns(self.vertical(), grid)
        return block_divergence(logits.squeeze(2), columns, scale)


def _tensor(given: Tensor | _Later) -> Tensor:
    return given if isinstance(given, Tensor) else given()


def _mass_of_columns(vertical: Tensor, grid: Grid) -> Tensor:
    """The sums of `vertical` `[B, Hq, N]` over blocks of keys, `[B, Hq, cols]`."""
    if grid.permutation.k_index is None:
        return run_sums(vertical, grid.k_block)
    sums: Tensor = _by_block(vertical, grid).sum(-1)
    return sums


def _by_block(per_key: Tensor, grid: Grid) -> Tensor:
    """Values per key, `[B, Hq, N]`, put into the slots of blocks, `[B, Hq, cols, k_block]`; 0 in empty slots."""
    if grid.permutation.k_index is None:
        empty = grid.cols * grid.k_block - per_key.shape[-1]
        whole = pad(per_key, (0, empty)) if empty else per_key
        return whole.view(*per_key.shape[:-1], grid.cols, grid.k_block)
    position = for_heads(grid.k_position[:, :, 0], grid.q_heads)  # [B|1, H|1, slots]
    index = position.clamp_min(0).long().expand(*per_key.shape[:2], -1)
    by_slot = per_key.gather(-1, index).masked_fill(position < 0, 0)
    return rearrange(by_slot, "B H (cols slot) -> B H cols slot", slot=grid.k_block)
