"""Scores of the columns and diagonals that the last queries look at (MInference, FlexPrefill)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from attrs import converters, field, frozen
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, flag, optional, size, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.block_products import block_products
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.multiplying.run_sums import run_sums
from blocksparse.kernels.scoring.block_divergence import block_divergence
from blocksparse.kernels.scoring.block_mean import block_mean, block_means
from blocksparse.kernels.scoring.block_softmax import block_softmax
from blocksparse.kernels.scoring.probe_lines import probe_lines
from blocksparse.kernels.selecting.line_blocks import crossed
from blocksparse.kernels.selecting.lines import Lines, running_count
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer


@final
@frozen(eq=False)
class VerticalSlashScores(BlockMass):
    """Pooled mass of every block, and the mass of the vertical and slash lines of a probe.

    The probe is the last queries of the call. A vertical line is one key, and a slash line is all pairs at one
    distance. The distance of a pair is query position minus key position in original order, or the absolute value
    of that when not causal.
    """

    # The mean weight that probe queries give to each key, and to each distance; L is N, or max(M, N) not causal.
    vertical: Tensor = field(kw_only=True)  # [B, Hq, N] fp32
    slash: Tensor = field(kw_only=True)  # [B, Hq, L] fp32
    divergence: Tensor = field(kw_only=True)  # [B, Hq] fp32, of pooled from true block weights, 0 to sqrt(ln 2)
    _sums: dict[str, Tensor] = field(init=False, repr=False, factory=dict)  # rules ask for the same

    def mass_of_columns(self) -> Tensor:
        """The sum of `vertical` over each block of keys, `[B, Hq, cols]`."""
        return self._once("columns", lambda: _mass_of_columns(self.vertical, self.grid))

    def mass_of_bands(self) -> Tensor:
        """The sum of `slash` over runs of as many distances as a block has keys, `[B, Hq, ceil(L / k_block)]`."""
        return self._once("bands", lambda: run_sums(self.slash, self.grid.k_block))

    def _once(self, name: str, of: Callable[[], Tensor]) -> Tensor:
        if name not in self._sums:
            self._sums[name] = of()
        return self._sums[name]

    def columns_holding(self, keys: Tensor) -> Tensor:
        """The columns of blocks that hold one of the chosen `keys` `[B, Hq, N]` bool: `[B, Hq, 1, cols]`."""
        return _by_block(keys, self.grid).any(-1).unsqueeze(2)

    def blocks_at(self, distances: Tensor) -> Tensor:
        """The blocks that may hold a pair at a chosen distance, `[B, Hq, rows, cols]`.

        Args:
            distances: `[B, Hq, L]` bool, the chosen distances.
        """
        return crossed(Lines(running_count(distances), 1), self.grid)


@final
@frozen(cache_hash=True)
class VerticalSlashScorer(Scorer[GlobalPermutation, VerticalSlashScores]):
    """Softmax of the last queries (the probe) over all keys, summed along columns and along diagonals.

    This is the estimate of MInference (section 3.2) and of FlexPrefill (section 3). The `values` are those of
    `MeanPoolScorer`, from mean queries and mean keys, for FlexPrefill's query-aware heads. The divergence is
    FlexPrefill's test of whether pooling describes a head well: the square root of the Jensen-Shannon divergence
    (natural logarithm) between the weights of key blocks that the mean query of the probe gives to mean keys, and
    the true weights that the probe gives to key blocks.

    Lines are measured with the last queries of a call, so a choice made from them is not causal and depends on
    how a prompt is chunked. It takes `probe * N * D` multiplications per query head.

    Args:
        block: slots per block, on both sides.
        probe: how many of the last queries are measured; `block` if None, as in FlexPrefill. MInference takes 64.
        pooled: compute `values` from pooled queries and keys. `False` leaves them 0, which takes no memory, for
            selectors that look only at lines.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    probe: int | None = field(
        default=None, converter=converters.optional(whole), validator=optional(size), kw_only=True
    )
    pooled: bool = field(default=True, validator=flag, kw_only=True)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: GlobalPermutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> VerticalSlashScores:
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.block)
        if history is None and self.pooled:  # [B, Hq, rows, D], [B, H, cols, D]
            queries, keys = block_means(
                q,
                k,
                self.block,
                self.block,
                lead=grid.q_lead,
                q_index=permutation.q_index,
                k_index=permutation.key_slots,
            )
        elif history is None:
            keys = block_mean(k, self.block, index=permutation.key_slots)
        else:  # means are remembered; the probe looks at every key anew
            keys = history.blocks("mean", k, permutation, self.block, partial(block_mean, block=self.block))
            queries = block_mean(q, self.block, lead=grid.q_lead, index=permutation.q_index)
        if self.pooled:
            values, _ = block_softmax(block_products(queries, keys, grid), grid, scale=spec.scale)
        else:
            values = keys.new_empty(()).zero_().expand(*q.shape[:2], grid.rows, grid.cols)

        probe = q[:, :, -min(self.probe or self.block, q.shape[2]) :]
        vertical, slash = probe_lines(probe, k, q.shape[2], grid.causal, spec.scale, grid.window)
        logits, scale = products(block_mean(probe, probe.shape[2]), keys), spec.scale
        # Without a window no mask is needed, because the last query reaches every block.
        if grid.window is not None:
            seen = grid.k_last > grid.k_len - probe.shape[2] - grid.window  # by some query of the probe
            logits, scale = (logits * scale).masked_fill(~seen, float("-inf")), 1.0
        columns = _mass_of_columns(vertical, grid)
        divergence = block_divergence(logits.squeeze(2), columns, scale)
        scores = VerticalSlashScores(values, grid, vertical=vertical, slash=slash, divergence=divergence)
        scores._once("columns", lambda: columns)
        return scores

    @property
    def keeps_history(self) -> bool:
        return True


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
    position = grid.k_position[:, :, 0]  # [B|1, H|1, slots]
    H, Hq = position.shape[1], grid.q_heads
    position = position if H in (1, Hq) else position.repeat_interleave(Hq // H, dim=1)
    index = position.clamp_min(0).long().expand(*per_key.shape[:2], -1)
    by_slot = per_key.gather(-1, index).masked_fill(position < 0, 0)
    return rearrange(by_slot, "B H (cols slot) -> B H cols slot", slot=grid.k_block)
