"""Columns and diagonals that the last queries look at (MInference, FlexPrefill)."""

from __future__ import annotations

from typing import final

import torch
from attrs import converters, field, frozen
from einops import rearrange
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.block_products import block_products
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.scoring.any_between import any_between
from blocksparse.kernels.scoring.block_mean import block_mean
from blocksparse.kernels.scoring.block_softmax import block_softmax
from blocksparse.kernels.scoring.probe_lines import probe_lines
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.scorer import Scorer
from blocksparse.validators import block_size, flag, optional, size, whole


@final
@frozen(eq=False)
class VerticalSlashScores(BlockMass):
    """Pooled mass of every block, and the mass of the vertical and slash lines of a probe.

    Lines are told by original positions. The distance of a pair is query position minus key position, or its
    absolute value when not causal.
    """

    vertical: Tensor = field(kw_only=True)  # [B, Hq, N] fp32, mean over probe queries of the weight of a key
    slash: Tensor = field(kw_only=True)  # [B, Hq, L] fp32, the same of a distance; L is N, or max(M, N) not causal
    divergence: Tensor = field(kw_only=True)  # [B, Hq] fp32, of pooled from true block weights, 0 to sqrt(ln 2)

    def mass_of_columns(self) -> Tensor:
        """What `vertical` comes to on each block of keys, `[B, Hq, cols]`."""
        return _by_block(self.vertical, self.grid).sum(-1)

    def columns_holding(self, keys: Tensor) -> Tensor:
        """Blocks that hold one of the chosen `keys` `[B, Hq, N]` bool: `[B, Hq, 1, cols]`."""
        return _by_block(keys, self.grid).any(-1).unsqueeze(2)

    def blocks_at(self, distances: Tensor) -> Tensor:
        """Blocks that may hold a pair at one of the chosen `distances` `[B, Hq, L]` bool: `[B, Hq, rows, cols]`.

        A block holds distances from its first query minus its last key to its last query minus its first key. So
        a band as wide as a block crosses two diagonals of blocks, and every chosen pair is in a block given here.
        """
        grid = self.grid
        low, high = grid.q_first - grid.k_last, grid.q_last - grid.k_first
        if not grid.causal:
            low, high = torch.maximum(low, -high), torch.maximum(high, -low)
        blocks: Tensor = any_between(distances, low, high)
        return blocks


@final
@frozen(eq=False)
class VerticalSlashScorer(Scorer[GlobalPermutation, VerticalSlashScores]):
    """Softmax of the last queries over all keys, summed along columns and along diagonals.

    MInference's estimate (section 3.2) and FlexPrefill's (section 3). Values are those of `MeanPoolScorer`: pooled
    queries with pooled keys, for FlexPrefill's query-aware heads. The divergence is FlexPrefill's test
    whether pooling can be trusted: the square root of the Jensen-Shannon divergence (natural logarithm)
    between the weights of key blocks from the mean query of the probe, and their true weights.

    The lines are those of the last queries of a call, so a choice made from them is not causal, and depends
    on how a prompt is chunked. Takes probe N D multiplications per query head.

    Args:
        block: slots per block, on both sides.
        probe: how many of the last queries are looked at; one block unless given, as FlexPrefill. MInference: 64.
        pooled: compute the pooled values; `False` leaves them 0, in no memory, for selectors that look at lines
            alone.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    probe: int | None = field(
        default=None, converter=converters.optional(whole), validator=optional(size), kw_only=True
    )
    pooled: bool = field(default=True, validator=flag, kw_only=True)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, *, causal: bool, scale: float
    ) -> VerticalSlashScores:
        grid = Grid.of(q, k, permutation, q_block=self.block, k_block=self.block, causal=causal)
        keys = block_mean(k, self.block, index=permutation.key_slots)
        if self.pooled:
            queries = block_mean(permutation.gather_queries(q), self.block, lead=grid.q_lead)
            values, _ = block_softmax(block_products(queries, keys, grid), grid, scale=scale)
        else:
            values = keys.new_zeros(()).expand(*q.shape[:2], grid.rows, grid.cols)

        probe = q[:, :, -min(self.probe or self.block, q.shape[2]) :]
        vertical, slash = probe_lines(probe, k, q.shape[2], causal, scale)
        mean = probe.mean(2, keepdim=True, dtype=keys.dtype)
        pooled = (products(mean, keys) * scale).softmax(-1).squeeze(2)  # the last query reaches every block
        true = _by_block(vertical, grid).sum(-1)
        return VerticalSlashScores(
            values, grid, vertical=vertical, slash=slash, divergence=_divergence(pooled, true)
        )


def _by_block(per_key: Tensor, grid: Grid) -> Tensor:
    """What belongs to each key, `[B, Hq, N]`, by slots, `[B, Hq, cols, k_block]`; 0 in empty ones."""
    position = grid.k_position[:, :, 0]  # [B|1, H|1, slots]
    H, Hq = position.shape[1], grid.q_heads
    position = position if H in (1, Hq) else position.repeat_interleave(Hq // H, dim=1)
    index = position.clamp_min(0).long().expand(*per_key.shape[:2], -1)
    by_slot = per_key.gather(-1, index).masked_fill(position < 0, 0)
    return rearrange(by_slot, "B H (cols slot) -> B H cols slot", slot=grid.k_block)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence over the last axis; what has no weight adds nothing."""
    mean = (p + q) / 2
    parts = (torch.xlogy(x, x) - torch.xlogy(x, mean) for x in (p, q))
    return (sum(parts, torch.zeros_like(p)).sum(-1) / 2).clamp_min(0.0).sqrt()
