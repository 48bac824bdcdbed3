"""Cells of queries times cells of keys, and the sums of their weights over blocks.

One program multiplies a tile of query cells with a tile of key cells. It leaves, for each query cell, the best logit in the
tile of key cells, and the sums of weights over each block of keys, relative to that logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blocksparse.kernels.common.strides_triton import head_at
from blocksparse.kernels.multiplying.cell_products_triton import cell_products, grouped_tile, largest
from blocksparse.launch.launches import remembered

# Arguments that Triton must not specialise on: sizes that change from band to band, and pointers to parts of one memory,
# which need not be aligned.
_OF_BAND = [
    "peak_ptr",
    "total_ptr",
    "M",
    "N",
    "q_lead",
    "first",
    "last",
    "first_cell",
    "end",
    "q_tiles",
    "k_tiles",
]


@remembered
@triton.jit(do_not_specialize=_OF_BAND)
def sums_of_tiles(
    q_source, k_source, q_ptr, k_ptr, q_filler_ptr, k_filler_ptr, q_last_ptr, k_first_ptr,
    sums_ptr, peak_ptr, total_ptr,
    q_strides, k_strides, q_last_strides, k_first_strides,
    M, N, q_lead, first, last, first_cell, end, q_tiles, k_tiles, weight_log2, segment,
    D: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, FLIPPED: tl.constexpr, TMA: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stores sums over blocks `[B, Hq, band, cols]`, and best logits and sums over each tile `[B, Hq, k_tiles, band]`."""
    TILE_COLS: tl.constexpr = BLOCK_N // WIDE
    heads_per_key = tl.num_programs(0) // (q_tiles * k_tiles)
    h_key = tl.program_id(1)
    key_heads = tl.num_programs(1)
    b = tl.program_id(2)
    h_in_group, q_tile, k_tile = grouped_tile(tl.program_id(0), q_tiles, k_tiles, heads_per_key, GROUP)
    h = h_key * heads_per_key + h_in_group
    heads = key_heads * heads_per_key

    q_cell = first + q_tile * BLOCK_M
    k_cell = k_tile * BLOCK_N
    i = q_cell + tl.arange(0, BLOCK_M)
    j = k_cell + tl.arange(0, BLOCK_N)
    q_there = i < last
    k_there = j < end
    reach = first_cell + i  # the last key cell that each may see, or its last position
    start = j
    if q_last_ptr is not None:
        q_last_at = q_last_ptr + head_at(q_last_strides, b, h)
        reach = tl.load(q_last_at + i, mask=q_there, other=-1)
        k_first_at = k_first_ptr + head_at(k_first_strides, b, h)
        start = tl.load(k_first_at + j, mask=k_there, other=2147483647)
    some = True
    if CAUSAL:
        some = -largest(-start) <= largest(tl.where(q_there, reach, -1))
    if segment is not None:
        own = (first_cell + i) // segment * segment
        some = some & (k_cell < largest(tl.where(q_there, own, 0)))

    band = last - first
    head = (b * heads + h).to(tl.int64)
    at = i - first
    peak_at = (head * k_tiles + k_tile) * band + at
    if some:
        logits = cell_products(
            q_source, k_source, q_ptr, k_ptr, q_filler_ptr, k_filler_ptr, q_strides, k_strides,
            b, h, h_key, heads, key_heads, q_cell, k_cell, q_lead, M, N,
            D, SLOTS, FLIPPED, SHORT, TMA, BLOCK_M, BLOCK_N, BLOCK_K,
        ) * weight_log2  # fmt: skip
        eligible = k_there[None, :]
        if CAUSAL:
            eligible = eligible & (start[None, :] <= reach[:, None])
        if segment is not None:
            eligible = eligible & (j[None, :] < own[:, None])
        logits = tl.where(eligible, logits, float("-inf"))
        peak = tl.max(logits, 1)
        origin = tl.where(peak == float("-inf"), 0.0, peak)
        share = tl.exp2(logits - origin[:, None])
        sums = tl.sum(tl.reshape(share, [BLOCK_M, TILE_COLS, WIDE]), 2)
        sums_at = (head * band + at)[:, None] * (k_tiles * TILE_COLS) + k_tile * TILE_COLS
        tl.store(sums_ptr + sums_at + tl.arange(0, TILE_COLS)[None, :], sums, mask=q_there[:, None])
        tl.store(peak_ptr + peak_at, peak, mask=q_there)
        tl.store(total_ptr + peak_at, tl.sum(sums, 1), mask=q_there)
    else:
        nothing = tl.zeros([BLOCK_M], tl.float32)
        tl.store(peak_ptr + peak_at, nothing - float("inf"), mask=q_there)
        tl.store(total_ptr + peak_at, nothing, mask=q_there)
