"""Queries, keys and values in 8 bits, as the two kernels of `Int8Executor` read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.rounding.int8_tokens import int8_keys, int8_queries
from blocksparse.kernels.rounding.quantize import SMOOTHED_BY, smoothing_mean
from blocksparse.kernels.rounding.tile_operands import (
    TileOperands,
    fp8_value_tiles,
    int8_key_tiles,
    int8_query_tiles,
)
from blocksparse.permuters.permutation import GlobalPermutation


class TokenOperands(NamedTuple):
    """Inputs of the portable kernel: queries and keys, with one scale each."""

    q: Tensor  # [B, Hq, M, D] int8
    k: Tensor  # [B, copies * Hk, N, D] int8
    q_scale: Tensor  # [B, Hq, M] fp32
    k_scale: Tensor  # [B, copies * Hk, N] fp32
    k_copy: Tensor | None  # [B|1, Hq|1, rows] int32, the copy of k that a row reads; None when there is one
    taken: Tensor | None  # [B, Hq, M] fp32, what smoothing subtracted from every logit of a query


def token_operands(
    q: Tensor,
    k: Tensor,
    permutation: GlobalPermutation,
    grid: Grid,
    *,
    scale: float,
    smooth_k: bool,
    shared: bool,
) -> TokenOperands:
    """Round `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]` on their way into slots.

    Args:
        shared: whether the tokens of a block of the mask share a scale.
    """
    mean = k_copy = None
    plain_below = 0
    if smooth_k:
        mean = smoothing_mean(k, grid.causal).squeeze(2)
        if grid.causal and grid.k_len - grid.q_len < SMOOTHED_BY - 1:
            k_copy = (grid.q_first[..., 0] < SMOOTHED_BY - 1).int()
            # In original order, only keys up to here are read by rows that take keys which are not smoothed.
            in_order = permutation.q_index is None
            plain_below = min(SMOOTHED_BY - 2 + grid.q_block, grid.k_len) if in_order else grid.k_len
    queries, q_scale, taken = int8_queries(
        q, permutation.q_index, grid.q_block, grid.q_lead, shared=shared, mean=mean, scale=scale, plain=k_copy
    )
    keys, k_scale = int8_keys(
        k, permutation.key_slots, grid.k_block, shared=shared, mean=mean, plain_below=plain_below
    )
    return TokenOperands(queries, keys, q_scale, k_scale, k_copy, taken)


def tile_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    permutation: GlobalPermutation,
    grid: Grid,
    piece: int,
    *,
    scale: float,
    smooth_k: bool,
    fp8: bool,
) -> TileOperands:
    """Round `q` `[B, Hq, M, D]`, `k` and `v` `[B, Hkv, N, D]` for the kernel for Hopper.

    Args:
        piece: how many keys share scales: those of a tile of keys, or those of a block if that is smaller.
        fp8: whether values are rounded, too.
    """
    mean, early = None, 0
    if smooth_k:
        # A row that sees a whole block sees at least as many tokens as that, and so all of the first ones.
        first = min(SMOOTHED_BY, grid.k_block)
        mean = smoothing_mean(k, grid.causal, first).squeeze(2)
        early = max(first - 1 - (grid.k_len - grid.q_len), 0) if grid.causal else 0
    queries, q_scale, taken = int8_query_tiles(q, permutation.q_index, mean=mean, scale=scale, early=early)
    keys, k_tile, k_token = int8_key_tiles(k, permutation.key_slots, piece, mean=mean)
    if fp8:
        values, tile_log2, token = fp8_value_tiles(v, permutation.key_slots, piece)
        return TileOperands(queries, keys, values, q_scale, k_tile, k_token, tile_log2, token, taken)
    halves = permutation.gather_keys(v)
    return TileOperands(queries, keys, halves, q_scale, k_tile, k_token, taken=taken)
