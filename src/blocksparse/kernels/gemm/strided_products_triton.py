"""Products of strided pooling tiles (cells), and the sums of their weights over blocks.

Kernels share a matrix product: cells of queries times cells of keys, with sums in fp32. A cell is `slots` consecutive
tokens of a tensor `[B, H, N, D]`; nothing is copied to make one. A tile of cells is read one slot at a time, through tensor
descriptors if the GPU has them. Cells may lack tokens at the tail and where a chunk starts: a tile that holds such a cell is
read token by token.

`sums_of_tiles`: one program leaves, for each query cell of its tile, the best logit in its tile of key cells, and the sums of
weights over each block of keys, relative to that logit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blocksparse.kernels.common.device_functions import alike, head_at, head_strides
from blocksparse.kernels.common.hardware import Hardware, hardware_of, has_descriptors, needed
from blocksparse.kernels.common.sizes import copies_in_bulk
from blocksparse.kernels.gemm.products import StridedPooling
from blocksparse.launch.launches import remembered


@frozen
class ProductTiles:
    """How a product is launched: cells of queries and of keys per program, dims per step, warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tiles_for(x: Tensor, *, tma: bool) -> ProductTiles:
    """Tiles for `x` `[B, H, N, D]`; head dims that would leave half of the last step empty take smaller steps."""
    block_k, hardware = 32 if 0 < x.shape[-1] % 64 <= 32 else 64, hardware_of(x)
    if x.dtype == torch.float32:
        tiles = ProductTiles(64, 64, 32, 4, 2)
    elif tma:
        tiles = ProductTiles(128, 256, block_k, 8, 4)
    else:
        tiles = ProductTiles(128, 128, block_k, 8, 3)
    while shared_memory(hardware, tiles, x.element_size()) > hardware.shared and tiles.num_stages > 1:
        tiles = evolve(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def shared_memory(hardware: Hardware, tiles: ProductTiles, itemsize: int) -> int:
    """Bytes of shared memory of a program, at most."""
    row = tiles.block_k * itemsize
    return needed(hardware, loaded=(tiles.block_m * row, tiles.block_n * row), stages=tiles.num_stages)


def can_use_tma(*tensors: Tensor) -> bool:
    """Whether descriptors can load cells of these: it takes Hopper or later, 2-byte numbers, and rows at 16 bytes."""
    return all(x.element_size() == 2 and has_descriptors(x) and copies_in_bulk(x) for x in tensors)


def strided_boxes(x: Tensor, slots: int, lead: int, block: int, block_k: int) -> TensorDescriptor | None:
    """A descriptor of the cells of `x` `[B, H, N, D]` that lack no token, `[B, H, slots, cells, D]`; None without any."""
    skipped = -lead % slots
    count = (x.shape[2] - skipped) // slots
    if count <= 0:
        return None
    # Strides by hand: `unflatten` makes up those of axes of one entry, and a descriptor wants 16 bytes of them, too.
    b, h, n, d = x.stride()
    cells = x[:, :, skipped:]
    view = cells.as_strided(
        (*x.shape[:2], slots, count, x.shape[3]), (b, h, n, slots * n, d), cells.storage_offset()
    )
    return TensorDescriptor.from_tensor(view, [1, 1, 1, block, block_k])


def sources_and_options(
    q: Tensor, k: Tensor, of: StridedPooling, tiles: ProductTiles | None
) -> tuple[tuple[TensorDescriptor | None, TensorDescriptor | None], dict[str, Any]]:
    """Descriptors of the cells of `q` and `k`, and the options of a launch; by `tiles_for` unless `tiles` are given."""
    tma = can_use_tma(q, k)
    tiles = tiles or tiles_for(q, tma=tma)
    q_source = strided_boxes(q, of.slots, of.q_lead, tiles.block_m, tiles.block_k) if tma else None
    k_source = strided_boxes(k, of.slots, 0, tiles.block_n, tiles.block_k) if tma else None
    return (q_source, k_source), {
        "TMA": q_source is not None and k_source is not None,
        "SHORT": any(end % of.slots for end in (of.q_lead, of.q_lead + q.shape[2], k.shape[2])),
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip


def head_strides_of(x: Tensor | None) -> tuple[int, ...] | None:
    """Strides of the first two axes of `x` `[B|1, Hq|1, n]`, as `alike` gives them."""
    return None if x is None else alike(*head_strides(x))


@triton.jit
def largest(x):
    """The largest entry of a vector, in two dimensions, since Triton 3.7 fails on sm_100 to reduce an only axis."""
    return tl.max(tl.max(x[None, :], 1), 0)


@triton.jit
def total(x):
    """The sum of a vector, in two dimensions as `largest`."""
    return tl.sum(tl.sum(x[None, :], 1), 0)


@triton.jit
def grouped_tile(q_tiles, k_tiles, GROUP: tl.constexpr):
    """Of a program: batch entry, query head and KV head, how many there are of both, tile of queries and tile of keys.

    `GROUP` tiles of queries meet one tile of keys before the next tile of keys comes, so that it stays in the L2 cache.
    """
    heads_per_key = tl.num_programs(0) // (q_tiles * k_tiles)
    h_key = tl.program_id(1)
    key_heads = tl.num_programs(1)
    b = tl.program_id(2)
    pid = tl.program_id(0)
    first = pid // (GROUP * k_tiles) * GROUP
    high = tl.minimum(q_tiles * heads_per_key - first, GROUP)
    within = pid - first * k_tiles
    row = first + within % high
    h_in_group, q_tile, k_tile = row // q_tiles, row % q_tiles, within // high
    return b, h_key * heads_per_key + h_in_group, h_key, key_heads * heads_per_key, key_heads, q_tile, k_tile


@triton.jit
def _by_token(
    ptr, filler_ptr, strides, head, b, h, cell, slot, dims, lead, N,
    D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Slot `slot` of the cells `cell`, `[cells, dims]`; what fills slots without a token, or zeros."""
    token = cell * SLOTS + slot - lead
    there = (token >= 0) & (token < N)
    source = ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    source = source + token.to(tl.int64)[:, None] * strides[2] + dims[None, :]
    tile = tl.load(source, mask=there[:, None] & (dims < D)[None, :], other=0.0)
    if filler_ptr is not None:
        fill_at = filler_ptr + (head * 2 + (token >= N).to(tl.int32))[:, None] * D + dims[None, :]
        filler = tl.load(fill_at, mask=(~there)[:, None] & (dims < D)[None, :], other=0.0)
        tile = tl.where(there[:, None], tile, filler)
    return tile


@triton.jit
def strided_products(
    q_source, k_source, q_ptr, k_ptr, q_filler_ptr, k_filler_ptr, q_strides, k_strides,
    b, h, h_key, heads, key_heads, q_cell, k_cell, q_lead, M, N,
    D: tl.constexpr, SLOTS: tl.constexpr, FLIPPED: tl.constexpr, SHORT: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products of the cells from `q_cell` on with those from `k_cell` on, `[BLOCK_M, BLOCK_N]` fp32.

    With `FLIPPED` the last slot of a query cell meets the first one of a key cell, and so on. `SHORT` says that some cell
    may lack tokens. Products of cells without any token have no meaning.
    """
    STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    dim = tl.arange(0, BLOCK_K)
    q_at = q_cell + tl.arange(0, BLOCK_M)
    k_at = k_cell + tl.arange(0, BLOCK_N)
    skipped = (q_lead + SLOTS - 1) // SLOTS  # cells before the first one that the descriptor holds
    whole = True
    if SHORT:
        q_short = (q_cell * SLOTS < q_lead) & (q_lead % SLOTS != 0)
        q_short = q_short | ((q_cell + BLOCK_M) * SLOTS > q_lead + M) & ((q_lead + M) % SLOTS != 0)
        whole = (q_short | ((k_cell + BLOCK_N) * SLOTS > N) & (N % SLOTS != 0)) == 0
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if whole:
        for step in range(SLOTS * STEPS):
            slot = step // STEPS
            start = step % STEPS * BLOCK_K
            q_slot = slot
            if FLIPPED:
                q_slot = SLOTS - 1 - slot
            if TMA:
                q_tile = q_source.load([b, h, q_slot, q_cell - skipped, start]).reshape(BLOCK_M, BLOCK_K)
                k_tile = k_source.load([b, h_key, slot, k_cell, start]).reshape(BLOCK_N, BLOCK_K)
            else:
                q_tile = _by_token(q_ptr, None, q_strides, 0, b, h, q_at, q_slot, start + dim, q_lead, M, D, SLOTS)
                k_tile = _by_token(k_ptr, None, k_strides, 0, b, h_key, k_at, slot, start + dim, 0, N, D, SLOTS)
            sums = tl.dot(q_tile, tl.trans(k_tile), sums, input_precision="ieee")
    else:
        q_head = b * heads + h
        k_head = b * key_heads + h_key
        for step in tl.range(SLOTS * STEPS, num_stages=1):  # not pipelined, since few tiles come here
            slot = step // STEPS
            dims = step % STEPS * BLOCK_K + dim
            q_slot = slot
            if FLIPPED:
                q_slot = SLOTS - 1 - slot
            q_tile = _by_token(
                q_ptr, q_filler_ptr, q_strides, q_head, b, h, q_at, q_slot, dims, q_lead, M, D, SLOTS
            )
            k_tile = _by_token(k_ptr, k_filler_ptr, k_strides, k_head, b, h_key, k_at, slot, dims, 0, N, D, SLOTS)
            sums = tl.dot(q_tile, tl.trans(k_tile), sums, input_precision="ieee")
    return sums


# Arguments that Triton must not specialise on: sizes that change from band to band, and pointers to parts of one memory,
# which need not be aligned.
_BAND = ["peak_ptr", "total_ptr", "M", "N", "q_lead", "first", "last", "first_cell", "end", "q_tiles", "k_tiles"]


@remembered
@triton.jit(do_not_specialize=_BAND)
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
    b, h, h_key, heads, key_heads, q_tile, k_tile = grouped_tile(q_tiles, k_tiles, GROUP)

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
        logits = strided_products(
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
