"""The Triton kernels of `score/strided_means.py`.

`group_max`: one program multiplies a tile of query groups with a tile of key groups, and stores the best product of each block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, head_at, rows_of, store_rows
from blocksparse.kernels.common.sizes import cdiv, empty_together, power_of_2
from blocksparse.kernels.gemm.products import StridedPooling
from blocksparse.kernels.gemm.strided_products_triton import (
    ProductTiles,
    grouped_tile,
    head_strides_of,
    largest,
    sources_and_options,
    strided_products,
)
from blocksparse.launch.launches import remembered

_TILE = 1024  # entries that a program adds up at a time: eight to a thread
_UNROLLED = 32  # slots up to which a program asks for all tokens of its cells at once


def strided_means_triton(
    q: Tensor,
    k: Tensor,
    slots: int,
    lead: int = 0,
    padded_tail: bool = False,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for queries and keys together; arguments as in `strided_means`."""
    B, Hq, M, D = q.shape
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_index, k_index = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_index, k_index))
    Hk, N = k.shape[1:3] if k_index is None else k_index.shape[1:]
    q_cells, k_cells, block_d = cdiv(lead + M, slots), cdiv(N, slots), power_of_2(D)
    q_means, k_means = empty_together(q.dtype, q.device, (B, Hq, q_cells, D), (B, Hk, k_cells, D))
    at_a_time = max(_TILE // block_d, 1)
    q_programs, k_programs = cdiv(q_cells, at_a_time), cdiv(k_cells, at_a_time)
    _strided_means_kernel[(B * (Hq * q_programs + Hk * k_programs),)](
        q, k, q_index, k_index, q_means, k_means,
        q.stride()[:3], k.stride()[:3],
        None if q_index is None else alike(*q_index.stride()[:2]),
        None if k_index is None else alike(*k_index.stride()[:2]),
        q_programs, k_programs, B * Hq * q_programs, M, N, q_cells, k_cells, lead, Hq, Hk, 1, Hk // k.shape[1],
        D=D, BLOCK_D=block_d, SLOTS=slots, UNROLLED=min(slots, _UNROLLED), CELLS=at_a_time, PADDED=padded_tail,
        num_warps=4,
    )  # fmt: skip
    return q_means, k_means


def strided_mean_triton(
    x: Tensor, slots: int, lead: int = 0, padded_tail: bool = False, index: Tensor | None = None
) -> Tensor:
    """Launch the kernel for queries or keys alone: all programs take those."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    index = index if index is None or index.stride(-1) == 1 else index.contiguous()
    (B, Hx, N, D), block_d = x.shape, power_of_2(x.shape[-1])
    H, N = (Hx, N) if index is None else index.shape[1:]
    cells, at_a_time = cdiv(lead + N, slots), max(_TILE // block_d, 1)
    programs, strides = cdiv(cells, at_a_time), x.stride()[:3]
    index_strides = None if index is None else alike(*index.stride()[:2])
    means = x.new_empty((B, H, cells, D))
    _strided_means_kernel[(B * H * programs,)](
        x, x, index, index, means, means, strides, strides, index_strides, index_strides,
        programs, programs, B * H * programs, N, N, cells, cells, lead, H, H, H // Hx, H // Hx,
        D=D, BLOCK_D=block_d, SLOTS=slots, UNROLLED=min(slots, _UNROLLED), CELLS=at_a_time, PADDED=padded_tail,
        num_warps=4,
    )  # fmt: skip
    return means


def edge_means_triton(x: Tensor, slots: int, lead: int) -> Tensor | None:
    """`edge_means` by the same kernel, which calls can repeat, as they cannot what PyTorch computes."""
    missing = -(lead + x.shape[2]) % slots
    if not (lead or missing):
        return None
    (B, H, _, D), ends = x.shape, (x[:, :, : slots - lead], x[:, :, -(slots - missing) :])
    means = x.new_empty((B, H, 2, D))
    for at, mean in enumerate(strided_means_triton(*ends, slots, lead, False, None, None)):
        means[:, :, at : at + 1].copy_(mean)
    return means


@triton.jit
def _means(
    x_ptr, index_ptr, out_ptr, x_strides, index_strides,
    b, h, first, heads, N, cells, lead, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, UNROLLED: tl.constexpr, CELLS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Stores the means of `CELLS` cells from `first` on, of head `h` of `heads`."""
    source_h = h // heads_per_source
    cell = first + tl.arange(0, CELLS)
    start = cell * SLOTS - lead
    sums = tl.zeros([CELLS, BLOCK_D], tl.float32)
    for some in range(0, SLOTS, UNROLLED):
        for place in tl.static_range(UNROLLED):
            slot = start + some + place
            there = (slot >= 0) & (slot < N)
            if SLOTS % UNROLLED != 0:
                there = there & (some + place < SLOTS)
            if index_ptr is not None:
                token = tl.load(index_ptr + head_at(index_strides, b, h) + slot, mask=there, other=0)
            else:
                token = slot
            sums += rows_of(x_ptr, x_strides, b, source_h, token, there, D, BLOCK_D, False).to(tl.float32)
    if PADDED:
        tokens = tl.full([CELLS], SLOTS, tl.int32)
    else:
        tokens = tl.maximum(tl.minimum(start + SLOTS, N) - tl.maximum(start, 0), 1)
    count = tl.broadcast_to(tokens.to(tl.float32)[:, None], [CELLS, BLOCK_D])
    mean = tl.div_rn(sums, count)
    store_rows(out_ptr, mean, b.to(tl.int64) * heads + h, cells, cell, cell < cells, D, BLOCK_D)


@remembered
@triton.jit(do_not_specialize=["q_programs", "k_programs", "of_queries", "M", "N", "q_cells", "k_cells", "lead"])
def _strided_means_kernel(
    q_ptr, k_ptr, q_index_ptr, k_index_ptr, q_out_ptr, k_out_ptr,
    q_strides, k_strides, q_index_strides, k_index_strides,
    q_programs, k_programs, of_queries, M, N, q_cells, k_cells, lead, q_heads, k_heads, heads_per_query, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, UNROLLED: tl.constexpr, CELLS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The first `of_queries` programs take cells of queries, the others cells of keys."""
    pid = tl.program_id(0)
    if pid < of_queries:
        head = pid // q_programs  # its number among the heads of all batch entries
        _means(
            q_ptr, q_index_ptr, q_out_ptr, q_strides, q_index_strides,
            head // q_heads, head % q_heads, pid % q_programs * CELLS, q_heads, M, q_cells, lead, heads_per_query,
            D, BLOCK_D, SLOTS, UNROLLED, CELLS, PADDED,
        )  # fmt: skip
    else:
        head = (pid - of_queries) // k_programs
        _means(
            k_ptr, k_index_ptr, k_out_ptr, k_strides, k_index_strides,
            head // k_heads, head % k_heads, (pid - of_queries) % k_programs * CELLS, k_heads, N, k_cells, 0,
            heads_per_source, D, BLOCK_D, SLOTS, UNROLLED, CELLS, PADDED,
        )  # fmt: skip


_GROUP = 8  # tiles of query groups that meet a tile of key groups while it is in the L2 cache


def group_max_triton(
    q: Tensor, k: Tensor, of: StridedPooling, *, first_row: int, per_token: bool, tiles: ProductTiles | None = None
) -> Tensor:
    """Launch the kernel; arguments as in `group_max`. `tiles` are those of `tiles_for` unless given."""
    (B, Hq, M, D), (_, H, N, _) = q.shape, k.shape
    g, q_lead, high, wide, q_last, k_first = of.slots, of.q_lead, of.high, of.wide, of.q_last, of.k_first
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    sources, options = sources_and_options(q, k, of, tiles)
    rows, cols = -(-(q_lead + M) // (g * high)), -(-N // (g * wide))
    q_tiles, k_tiles = cdiv(rows * high, options["BLOCK_M"]), cdiv(cols * wide, options["BLOCK_N"])
    best = torch.empty((B, Hq, rows, cols), dtype=torch.float32, device=q.device)
    _group_max_kernel[(q_tiles * (Hq // H) * k_tiles, H, B)](
        *sources, q, k, q_last, k_first, best,
        q.stride()[:3], k.stride()[:3], head_strides_of(q_last), head_strides_of(k_first),
        M, N, q_lead, first_row, rows, cols, q_tiles, k_tiles,
        D=D, SLOTS=g, HIGH=high, WIDE=wide, GROUP=_GROUP,
        CAUSAL=of.causal, PER_TOKEN=per_token, PADDED=of.padded_tail, **options,
    )  # fmt: skip
    return best


@remembered
@triton.jit(do_not_specialize=["M", "N", "q_lead", "first_row", "rows", "cols", "q_tiles", "k_tiles"])
def _group_max_kernel(
    q_source, k_source, q_ptr, k_ptr, q_last_ptr, k_first_ptr, best_ptr,
    q_strides, k_strides, q_last_strides, k_first_strides,
    M, N, q_lead, first_row, rows, cols, q_tiles, k_tiles,
    D: tl.constexpr, SLOTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, PER_TOKEN: tl.constexpr, PADDED: tl.constexpr, SHORT: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    TILE_ROWS: tl.constexpr = BLOCK_M // HIGH
    TILE_COLS: tl.constexpr = BLOCK_N // WIDE
    b, h, h_key, heads, key_heads, q_tile, k_tile = grouped_tile(q_tiles, k_tiles, GROUP)

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
        product = strided_products(
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
