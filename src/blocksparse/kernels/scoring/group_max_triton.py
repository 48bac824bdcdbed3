"""The Triton kernel of `group_max`: fp16, bf16 and fp32.

One program multiplies a tile of query groups with a tile of key groups, and stores the best product of each block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.common.strides_triton import head_at
from blocksparse.kernels.multiplying.cell_products import Cells
from blocksparse.kernels.multiplying.cell_products_triton import (
    Tiles,
    can_use_tma,
    cell_products,
    grouped_tile,
    largest,
    reach_strides,
    tiles_for,
    whole_cells,
)
from blocksparse.launch.launches import remembered

_GROUP = 8  # tiles of query groups that meet a tile of key groups while it is in the L2 cache


def group_max_triton(
    q: Tensor, k: Tensor, of: Cells, *, first_row: int, per_token: bool, tiles: Tiles | None = None
) -> Tensor:
    """Launch the kernel; arguments as of `group_max`. `tiles` are those of `tiles_for` unless given."""
    (B, Hq, M, D), (_, H, N, _) = q.shape, k.shape
    g, q_lead, high, wide, q_last, k_first = of.slots, of.q_lead, of.high, of.wide, of.q_last, of.k_first
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    tma = can_use_tma(q, k)
    tiles = tiles or tiles_for(q, tma=tma)
    block_m, block_n = tiles.block_m, tiles.block_n
    q_source, k_source = (
        whole_cells(x, g, lead, block, tiles.block_k) if tma else None
        for x, lead, block in ((q, q_lead, block_m), (k, 0, block_n))
    )
    rows, cols = -(-(q_lead + M) // (g * high)), -(-N // (g * wide))
    q_tiles, k_tiles = cdiv(rows * high, block_m), cdiv(cols * wide, block_n)
    best = torch.empty((B, Hq, rows, cols), dtype=torch.float32, device=q.device)
    _kernel[(q_tiles * (Hq // H) * k_tiles, H, B)](
        q_source, k_source, q, k, q_last, k_first, best,
        q.stride()[:3], k.stride()[:3], reach_strides(q_last), reach_strides(k_first),
        M, N, q_lead, first_row, rows, cols, q_tiles, k_tiles,
        D=D, SLOTS=g, HIGH=high, WIDE=wide, GROUP=_GROUP,
        CAUSAL=of.causal, PER_TOKEN=per_token, PADDED=of.padded_tail,
        SHORT=q_lead % g != 0 or (q_lead + M) % g != 0 or N % g != 0,
        TMA=q_source is not None and k_source is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return best


@remembered
@triton.jit(do_not_specialize=["M", "N", "q_lead", "first_row", "rows", "cols", "q_tiles", "k_tiles"])
def _kernel(
    q_source, k_source, q_ptr, k_ptr, q_last_ptr, k_first_ptr, best_ptr,
    q_strides, k_strides, q_last_strides, k_first_strides,
    M, N, q_lead, first_row, rows, cols, q_tiles, k_tiles,
    D: tl.constexpr, SLOTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, PER_TOKEN: tl.constexpr, PADDED: tl.constexpr, SHORT: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    TILE_ROWS: tl.constexpr = BLOCK_M // HIGH
    TILE_COLS: tl.constexpr = BLOCK_N // WIDE
    heads_per_key = tl.num_programs(0) // (q_tiles * k_tiles)
    h_key = tl.program_id(1)
    key_heads = tl.num_programs(1)
    b = tl.program_id(2)
    h_in_group, q_tile, k_tile = grouped_tile(tl.program_id(0), q_tiles, k_tiles, heads_per_key, GROUP)
    h = h_key * heads_per_key + h_in_group
    heads = key_heads * heads_per_key

    q_group = q_tile * BLOCK_M
    k_group = k_tile * BLOCK_N
    i = q_group + tl.arange(0, BLOCK_M)
    j = k_group + tl.arange(0, BLOCK_N)
    reach = (first_row + i // HIGH + 1) * HIGH - 1  # the last key group that each may see, or its last position
    start = j
    if q_last_ptr is not None:
        q_last_at = q_last_ptr + head_at(q_last_strides, b, h)
        reach = tl.load(q_last_at + i // HIGH, mask=i // HIGH < rows, other=-1)
        k_first_at = k_first_ptr + head_at(k_first_strides, b, h)
        start = tl.load(k_first_at + j, mask=j * SLOTS < N, other=2147483647)
    some = True
    if CAUSAL:
        some = -largest(-start) <= largest(reach)

    row = q_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    col = k_tile * TILE_COLS + tl.arange(0, TILE_COLS)
    best_at = ((b * heads + h).to(tl.int64) * rows + row)[:, None] * cols + col[None, :]
    stored = (row < rows)[:, None] & (col < cols)[None, :]
    left_out = float("-inf")
    if PADDED:
        left_out = 0.0
    if some:
        product = cell_products(
            q_source, k_source, q_ptr, k_ptr, None, None, q_strides, k_strides,
            b, h, h_key, heads, key_heads, q_group, k_group, q_lead, M, N,
            D, SLOTS, False, SHORT, TMA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        empty_before = tl.maximum(q_lead - i * SLOTS, 0)
        q_end = tl.minimum(q_lead + M - i * SLOTS, SLOTS)
        k_end = tl.minimum(N - j * SLOTS, SLOTS)
        places = tl.minimum(q_end[:, None], k_end[None, :]) - empty_before[:, None]
        if PER_TOKEN and PADDED:
            product = product / SLOTS
        elif PER_TOKEN:
            product = product / tl.maximum(places, 1).to(tl.float32)
        takes_part = places > 0
        if CAUSAL:
            takes_part = takes_part & (start[None, :] <= reach[:, None])
        product = tl.where(takes_part, product, left_out)
        best = tl.max(tl.reshape(product, [BLOCK_M, TILE_COLS, WIDE]), 2)
        best = tl.max(tl.reshape(best, [TILE_ROWS, HIGH, TILE_COLS]), 1)
        tl.store(best_ptr + best_at, best, mask=stored)
    else:
        tl.store(best_ptr + best_at, tl.full([TILE_ROWS, TILE_COLS], left_out, tl.float32), mask=stored)
