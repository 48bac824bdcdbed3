"""Pooled queries times pooled keys, and the sums of their weights over blocks: `strided_products_triton.py` for cells of one slot.

A product of two tiles is over in a few steps, where cells of many slots take hundreds. So a program keeps its tile of
queries, and meets a span of tiles of keys with it, the next of which is loaded meanwhile. What it leaves for a tile does
not depend on the span.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.kernels.common.device_functions import head_at
from blocksparse.kernels.common.hardware import Hardware, hardware_of, needed
from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.gemm.strided_products_triton import largest
from blocksparse.launch.launches import remembered


@frozen
class PooledTiles:
    """How it is launched: queries and keys per tile, warps and stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def pooled_tiles(q: Tensor, wide: int) -> PooledTiles | None:
    """Tiles for `q` `[B, H, N, D]` and blocks of `wide` keys; None if shared memory does not hold a block.

    In half precision up to D=128, if blocks have more than one key, two programs share a multiprocessor, and on Hopper
    four smaller ones.
    """
    return _tiles(hardware_of(q), power_of_2(q.shape[-1]) * q.element_size(), q.element_size(), wide)


@lru_cache(maxsize=256)
def _tiles(hardware: Hardware, row_bytes: int, itemsize: int, wide: int) -> PooledTiles | None:
    if itemsize == 4 or row_bytes > 512:
        tiles = PooledTiles(64, 64, 4, 2 if row_bytes <= 512 else 1)
    elif row_bytes > 256:
        tiles = PooledTiles(64, 64, 4, 2)
    else:
        tiles = PooledTiles(64, 128, 4, 1) if hardware.is_hopper and wide > 1 else PooledTiles(128, 128, 8, 2)
    whole = evolve(tiles, block_n=max(tiles.block_n, wide))  # a tile holds whole blocks
    for stages in range(whole.num_stages, 0, -1):
        tiles = evolve(whole, num_stages=stages)
        while tiles.block_m >= 16:
            if shared_memory(hardware, tiles, row_bytes, itemsize, wide) <= hardware.shared:
                return tiles
            tiles = evolve(tiles, block_m=tiles.block_m // 2, num_warps=4)
    return None


def shared_memory(hardware: Hardware, tiles: PooledTiles, row_bytes: int, itemsize: int, wide: int) -> int:
    """Bytes of shared memory of a program, at most."""
    held, loaded = tiles.block_m * row_bytes, tiles.block_n * row_bytes
    sums = tiles.block_m * max(16, tiles.block_n // wide) * 4  # change hands before they are stored
    single, stages = itemsize == 4, tiles.num_stages
    bytes_ = needed(hardware, held=held, loaded=(loaded,), stages=stages, then=sums, single=single)
    # Where products read from shared memory, the parts of fp32 numbers lie there too.
    return bytes_ + (loaded if single and hardware.multiplies_from_shared else 0)


@triton.jit
def _pooled(source, ptr, head, cell, cells, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a head's pooled tokens `[B, H, cells, D]` from `cell` on; those behind its last one have no meaning."""
    if source is not None:
        return source.load([head * cells + cell, 0])
    at = cell + tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_D)
    inside = (at < cells)[:, None] & (dim < D)[None, :]
    rows = ptr + (head.to(tl.int64) * cells + at)[:, None] * D
    return tl.load(rows + dim[None, :], mask=inside, other=0.0)


@triton.jit
def _leave_sums(logits, weight_log2, sums_at, peak_at, total_at, tile, band, there, WIDE: tl.constexpr):
    """Store what is known of a tile of logits: the best of each row, and sums of weights over blocks of `WIDE` keys."""
    ROWS: tl.constexpr = logits.shape[0]
    COLS: tl.constexpr = logits.shape[1] // WIDE
    peak = tl.max(logits, 1) * weight_log2
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(logits * weight_log2 - origin[:, None])
    sums = tl.sum(tl.reshape(share, [ROWS, COLS, WIDE]), 2)
    tl.store(sums_at + tile * COLS, sums, mask=there[:, None])
    tl.store(peak_at + tile * band, peak, mask=there)
    tl.store(total_at + tile * band, tl.sum(sums, 1), mask=there)


@triton.jit
def _leave_nothing(peak_at, total_at, begin, end, band, there, BLOCK_M: tl.constexpr):
    """Say of the tiles from `begin` to `end` that no query reaches them."""
    nothing = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(begin, end):
        tl.store(peak_at + tile * band, nothing - float("inf"), mask=there)
        tl.store(total_at + tile * band, nothing, mask=there)


@remembered
@triton.jit(
    do_not_specialize=[
        "peak_ptr", "total_ptr", "q_cells", "k_cells", "first", "last", "first_cell", "end", "q_tiles", "k_tiles", "span",
    ]
)  # fmt: skip
def sums_of_pooled(
    q_source, k_source, q_ptr, k_ptr, q_last_ptr, k_first_ptr, q_floor_ptr, k_last_ptr,
    sums_ptr, peak_ptr, total_ptr,
    q_last_strides, k_first_strides,
    q_cells, k_cells, first, last, first_cell, end, q_tiles, k_tiles, span, weight_log2, behind, segment,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, EVERY: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores sums over blocks `[B, Hq, band, cols]`, and best logits and sums over each tile `[B, Hq, k_tiles, band]`."""
    TILE_COLS: tl.constexpr = BLOCK_N // WIDE
    IN_ORDER: tl.constexpr = q_last_ptr is None
    heads_per_key = tl.num_programs(0) // (q_tiles * tl.cdiv(k_tiles, span))
    h_key = tl.program_id(1)
    b = tl.program_id(2)
    # The last queries come first, since they reach the most keys. Programs that meet the same keys run together.
    q_tile = q_tiles - 1 - tl.program_id(0) // heads_per_key % q_tiles
    h = h_key * heads_per_key + tl.program_id(0) % heads_per_key
    begin = tl.program_id(0) // (heads_per_key * q_tiles) * span
    stop = tl.minimum(begin + span, k_tiles)
    head = b * tl.num_programs(1) * heads_per_key + h
    k_head = b * tl.num_programs(1) + h_key

    q_cell = first + q_tile * BLOCK_M
    i = q_cell + tl.arange(0, BLOCK_M)
    q_there = i < last
    reach = (first_cell + i + 1) * EVERY - 1  # the last key cell that each may see, or its last position
    floor = reach
    own = reach
    k_first_at = k_first_ptr
    k_last_at = k_last_ptr
    if not IN_ORDER:
        at = head_at(q_last_strides, b, h) + i
        reach = tl.load(q_last_ptr + at, mask=q_there, other=-1)
        k_first_at += head_at(k_first_strides, b, h)
        if q_floor_ptr is not None:
            floor = tl.load(q_floor_ptr + at, mask=q_there, other=2147483647)
            k_last_at += head_at(k_first_strides, b, h)
    elif behind is not None:
        floor = reach - behind - 1
    WINDOWED: tl.constexpr = behind is not None or q_floor_ptr is not None

    # Tiles from `low` to `high` are those that some query may reach; those up to `whole`, that every query does.
    low = begin
    high = stop
    whole = tl.minimum(end // BLOCK_N, stop)
    if CAUSAL:
        most = largest(tl.where(q_there, reach, -1))
        least = -largest(tl.where(q_there, -reach, -2147483647))
        if IN_ORDER:
            high = tl.minimum(high, most // BLOCK_N + 1)
            whole = tl.minimum(whole, (least + 1) // BLOCK_N)
        else:
            reached = begin
            full = begin
            for tile in range(begin, stop):
                j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                start = tl.load(k_first_at + j, mask=j < end, other=2147483647)
                if -largest(-start) <= most:
                    reached = tile + 1
                if (full == tile) & (largest(start) <= least):
                    full = tile + 1
            high = reached
            whole = tl.minimum(whole, full)
    if segment is not None:
        own = (first_cell + i) // segment * segment
        most = largest(tl.where(q_there, own, 0))
        least = -largest(tl.where(q_there, -own, -2147483647))
        high = tl.minimum(high, tl.cdiv(most, BLOCK_N))
        whole = tl.minimum(whole, least // BLOCK_N)
    if WINDOWED:
        if IN_ORDER:
            low = tl.minimum(tl.maximum(low, ((first_cell + q_cell + 1) * EVERY - 1 - behind) // BLOCK_N), stop)
        whole = low
    high = tl.maximum(high, low)
    whole = tl.minimum(tl.maximum(whole, low), high)

    band = last - first
    at = i - first
    peak_at = peak_ptr + head.to(tl.int64) * k_tiles * band + at
    total_at = total_ptr + head.to(tl.int64) * k_tiles * band + at
    sums_at = sums_ptr + (head.to(tl.int64) * band + at)[:, None] * (k_tiles * TILE_COLS)
    sums_at += tl.arange(0, TILE_COLS)[None, :]
    _leave_nothing(peak_at, total_at, begin, low, band, q_there, BLOCK_M)
    if low < high:
        queries = _pooled(q_source, q_ptr, head, q_cell, q_cells, D, BLOCK_D, BLOCK_M)
        for tile in range(low, whole):
            keys = _pooled(k_source, k_ptr, k_head, tile * BLOCK_N, k_cells, D, BLOCK_D, BLOCK_N)
            logits = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            _leave_sums(logits, weight_log2, sums_at, peak_at, total_at, tile, band, q_there, WIDE)
        for tile in range(whole, high):
            keys = _pooled(k_source, k_ptr, k_head, tile * BLOCK_N, k_cells, D, BLOCK_D, BLOCK_N)
            logits = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            eligible = (j < end)[None, :]
            start = j
            until = j
            if not IN_ORDER:
                start = tl.load(k_first_at + j, mask=j < end, other=2147483647)
                if q_floor_ptr is not None:
                    until = tl.load(k_last_at + j, mask=j < end, other=-1)
            if CAUSAL:
                eligible = eligible & (start[None, :] <= reach[:, None])
            if WINDOWED:
                eligible = eligible & (until[None, :] > floor[:, None])
            if segment is not None:
                eligible = eligible & (j[None, :] < own[:, None])
            logits = tl.where(eligible, logits, float("-inf"))
            _leave_sums(logits, weight_log2, sums_at, peak_at, total_at, tile, band, q_there, WIDE)
    _leave_nothing(peak_at, total_at, high, stop, band, q_there, BLOCK_M)
