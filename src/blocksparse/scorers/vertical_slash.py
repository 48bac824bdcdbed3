"""Columns and diagonals that the last queries look at (MInference, FlexPrefill)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen, validators
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.grid import Grid
from blocksparse.scorers.scorer import Scorer

_WORKSPACE = 2**28  # bytes of probabilities at a time


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
        grid, L = self.grid, distances.shape[-1]
        low, high = grid.q_first - grid.k_last, grid.q_last - grid.k_first
        if not grid.causal:
            low, high = torch.maximum(low, -high), torch.maximum(high, -low)
        each = torch.arange(L, dtype=torch.int32, device=distances.device)
        above = each.where(distances, L).flip(-1).cummin(-1).values.flip(-1)  # the next chosen distance, or L
        index = low.clamp(0, L - 1).long().expand(*distances.shape[:2], -1, -1)
        return above.gather(-1, index.flatten(2)).view(index.shape) <= high


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

    block: int = field(default=128, validator=pooling.size)
    probe: int | None = field(default=None, validator=validators.optional(pooling.size), kw_only=True)
    pooled: bool = field(default=True, validator=validators.instance_of(bool), kw_only=True)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, *, causal: bool, scale: float
    ) -> VerticalSlashScores:
        grid = Grid.of(q, k, permutation, q_block=self.block, k_block=self.block, causal=causal)
        keys = pooling.block_mean(permutation.gather_keys(k), self.block)
        if self.pooled:
            queries = pooling.block_mean(permutation.gather_queries(q), self.block, lead=grid.q_lead)
            values = pooling.softmax_over(grid.reachable, pooling.products(queries, keys) * scale)
        else:
            values = keys.new_zeros(()).expand(*q.shape[:2], grid.rows, grid.cols)

        probe = q[:, :, -min(self.probe or self.block, q.shape[2]) :]
        vertical, slash = _lines(probe, k, q_len=q.shape[2], causal=causal, scale=scale)
        mean = probe.mean(2, keepdim=True, dtype=keys.dtype)
        pooled = (
            (pooling.products(mean, keys) * scale).softmax(-1).squeeze(2)
        )  # the last query reaches every block
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


def _lines(probe: Tensor, k: Tensor, *, q_len: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Mean weight that the queries of `probe` `[B, Hq, P, D]` give each key and each distance."""
    (B, Hq, P, _), N = probe.shape, k.shape[2]
    wide = torch.promote_types(k.dtype, torch.float32)
    vertical = torch.zeros(B, Hq, N, dtype=wide, device=k.device)
    slash = torch.zeros(B, Hq, N if causal else max(q_len, N), dtype=wide, device=k.device)
    first = (N if causal else q_len) - P  # position of the first probe query
    position = torch.arange(N, device=k.device)
    step = max(1, _WORKSPACE // (B * Hq * N * wide.itemsize))
    for top in range(0, P, step):
        rows = probe[:, :, top : top + step]
        count, begin = rows.shape[2], first + top
        logits = pooling.products(rows, k).mul_(scale)
        if causal:
            query = torch.arange(begin, begin + count, device=k.device)
            logits.masked_fill_(position > query[:, None], float("-inf"))
        weight = logits.softmax(-1)
        vertical += weight.sum(2)
        diagonals = _sums_of_diagonals(weight)  # from distance begin - (N - 1) to begin + count - 1
        ahead = max(N - 1 - begin, 0)  # of them belong to later keys
        slash[..., max(begin - N + 1, 0) : begin + count] += diagonals[..., ahead:]
        if not causal:
            slash[..., 1 : 1 + ahead] += diagonals[..., :ahead].flip(-1)
    return vertical / P, slash / P


def _sums_of_diagonals(x: Tensor) -> Tensor:
    """Sums of `x` `[B, H, rows, N]` where row minus column is 1 - N, ..., rows - 1: `[B, H, rows + N - 1]`."""
    rows, N = x.shape[-2:]
    # Read in rows one shorter than they are stored, each row moves one column on: a diagonal becomes a column.
    stored = pad(x.flip(-1), (0, rows)).flatten(-2)
    skewed = rearrange(stored[..., : rows * (rows + N - 1)], "B H (rows wide) -> B H rows wide", rows=rows)
    return skewed.sum(-2)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence over the last axis; what has no weight adds nothing."""
    mean = (p + q) / 2
    parts = (torch.xlogy(x, x) - torch.xlogy(x, mean) for x in (p, q))
    return (sum(parts, torch.zeros_like(p)).sum(-1) / 2).clamp_min(0.0).sqrt()
