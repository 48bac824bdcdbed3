"""The Triton kernels of `masks/blocks.py`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, head_at, head_strides
from blocksparse.kernels.common.sizes import REMEMBERED, cdiv, empty_together, index_dtype, power_of_2
from blocksparse.kernels.masks.blocks import Bounds
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.masks.grid_triton import full_blocks, positions, rows_at, strides, tile
from blocksparse.launch.launches import remembered

_NEVER = tl.constexpr(2**31 - 1)
_TILE = 2048  # places that a program works on at a time


def block_bounds_triton(q_position: Tensor, k_position: Tensor, q_block: int, k_block: int, heads: int) -> Bounds:
    """Launch the kernel; arguments as in `block_bounds`."""
    M, slots, device = q_position.shape[-1], k_position.shape[-1], q_position.device
    return _launch(q_position, k_position, M, slots, q_block, k_block, heads, 0, device)[2]


def block_places_triton(
    q: Tensor, k: Tensor, q_index: Tensor | None, k_index: Tensor | None, q_block: int, k_block: int, offset: int
) -> tuple[Tensor, Tensor, Bounds]:
    """Launch the kernel; arguments as in `block_places`."""
    slots = k.shape[2] if k_index is None else k_index.shape[-1]
    return _launch(q_index, k_index, q.shape[2], slots, q_block, k_block, q.shape[1], offset, q.device)


def _launch(
    q_index: Tensor | None,
    k_index: Tensor | None,
    M: int,
    slots: int,
    q_block: int,
    k_block: int,
    heads: int,
    offset: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Bounds]:
    """Positions are made only where the maps, which are then returned, do not say them already."""
    q_index, k_index = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_index, k_index))
    maps = None if q_index is None else q_index.shape, None if k_index is None else k_index.shape
    plan = _plan(*maps, M, slots, q_block, k_block, heads, offset)
    q_first, q_last, k_first, k_last, *made = empty_together(torch.int32, device, *plan.outputs)
    q_made, k_made = made[0] if plan.q_missing else None, made[-1] if plan.k_missing else None
    k_whole = torch.empty(k_first.shape, dtype=torch.bool, device=device)
    _block_bounds_kernel[plan.grid](
        q_index, k_index, q_made, k_made, q_first, q_last, k_first, k_last, k_whole,
        None if q_index is None else alike(*head_strides(q_index), 0),
        None if k_index is None else alike(*head_strides(k_index), k_index.stride(2) if k_index.shape[2] > 1 else 0),
        *plan.sizes, M, slots, offset % q_block, offset,
        **plan.constants,
        num_warps=4,
    )  # fmt: skip
    q_position, k_position = q_index if q_made is None else q_made, k_index if k_made is None else k_made
    assert q_position is not None  # a map that is missing was made
    assert k_position is not None
    return q_position, k_position, (q_first, q_last, k_first, k_last, k_whole)


class _Plan(NamedTuple):
    """What sizes alone decide of a launch."""

    outputs: list[tuple[int, ...]]  # shapes of the four bounds, then of the positions that are made
    q_missing: bool  # whether positions of queries are made
    k_missing: bool
    grid: tuple[int]
    sizes: tuple[int, ...]  # programs of queries, heads of the maps, key maps of a head, rows and columns
    constants: dict[str, int]


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(
    of_queries: tuple[int, ...] | None,
    of_keys: tuple[int, ...] | None,
    M: int,
    slots: int,
    q_block: int,
    k_block: int,
    heads: int,
    offset: int,
) -> _Plan:
    """The plan for maps of these shapes; None without a map."""
    rows, cols = cdiv(offset % q_block + M, q_block), cdiv(slots, k_block)
    Bq, Qh = (1, 1) if of_queries is None else of_queries[:2]
    Bk, Kh, G = (1, 1, 1) if of_keys is None else of_keys[:3]
    q_copies, k_copies = (1 if H == 1 else heads // H for H in (Qh, Kh))
    q_bound, k_bound = (Bq, Qh * q_copies, rows, 1), (Bk, Kh * k_copies, G, cols)
    outputs: list[tuple[int, ...]] = [q_bound, q_bound, k_bound, k_bound]
    if q_missing := of_queries is None or offset > 0 or M % q_block > 0:
        outputs.append((Bq, Qh, rows * q_block))
    if k_missing := of_keys is None or slots % k_block > 0:
        outputs.append((Bk, Kh, G, cols * k_block))
    q_wide, k_wide = (min(power_of_2(block), _TILE) for block in (q_block, k_block))
    q_programs = Bq * Qh * cdiv(rows, _TILE // q_wide)
    k_programs = Bk * Kh * G * cdiv(cols, _TILE // k_wide)
    constants = {
        "Q_BLOCK": q_block, "K_BLOCK": k_block, "Q_WIDE": q_wide, "K_WIDE": k_wide, "TILE": _TILE,
        "Q_COPIES": q_copies, "K_COPIES": k_copies,
    }  # fmt: skip
    return _Plan(
        outputs, q_missing, k_missing, (q_programs + k_programs,), (q_programs, Qh, Kh, G, rows, cols), constants
    )


@triton.jit
def _side(
    pid, index_ptr, made_ptr, first_ptr, last_ptr, whole_ptr, strides, heads, G, blocks, tokens, lead, offset,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Stores positions and bounds of `ROWS` blocks of one map; `WHOLE` says whether emptiness is stored, too."""
    tiles = tl.cdiv(blocks, ROWS)
    row = pid % tiles * ROWS + tl.arange(0, ROWS)
    g = pid // tiles % G
    head = pid // tiles // G  # its number among the heads of all batch entries
    there = row < blocks
    first = tl.full([ROWS], _NEVER, tl.int32)
    last = tl.full([ROWS], -1, tl.int32)
    empty = tl.zeros([ROWS], tl.int32)
    for start in range(0, BLOCK, WIDE):
        column = start + tl.arange(0, WIDE)
        inside = there[:, None] & (column < BLOCK)[None, :]
        place = row[:, None] * BLOCK + column[None, :]
        slot = place - lead
        token = inside & (slot >= 0) & (slot < tokens)
        if index_ptr is None:
            position = tl.where(token, slot + offset, -1)
        else:
            source = index_ptr + head_at(strides, head // heads, head % heads) + g.to(tl.int64) * (strides[2] >> 4)
            position = tl.load(source + slot, mask=token, other=-1)
            position = tl.where(position >= 0, position + offset, -1)
        if made_ptr is not None:
            tl.store(made_ptr + (head * G + g).to(tl.int64) * blocks * BLOCK + place, position, mask=inside)
        first = tl.minimum(first, tl.min(tl.where(position >= 0, position, _NEVER), 1))
        last = tl.maximum(last, tl.max(position, 1))
        empty += tl.sum((inside & (position < 0)).to(tl.int32), 1)
    for copy in tl.static_range(COPIES):
        at = ((head * COPIES + copy).to(tl.int64) * G + g) * blocks + row
        tl.store(first_ptr + at, first, mask=there)
        tl.store(last_ptr + at, last, mask=there)
        if WHOLE:
            tl.store(whole_ptr + at, empty == 0, mask=there)


@remembered
@triton.jit(do_not_specialize=["q_programs", "G", "rows", "cols", "M", "slots", "lead", "offset"])
def _block_bounds_kernel(
    q_ptr, k_ptr, q_made_ptr, k_made_ptr, q_first_ptr, q_last_ptr, k_first_ptr, k_last_ptr, k_whole_ptr,
    q_strides, k_strides,
    q_programs, q_heads, k_heads, G, rows, cols, M, slots, lead, offset,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, Q_WIDE: tl.constexpr, K_WIDE: tl.constexpr, TILE: tl.constexpr,
    Q_COPIES: tl.constexpr, K_COPIES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < q_programs:
        _side(
            pid, q_ptr, q_made_ptr, q_first_ptr, q_last_ptr, k_whole_ptr, q_strides, q_heads, 1, rows, M, lead, offset,
            Q_BLOCK, Q_WIDE, TILE // Q_WIDE, Q_COPIES, False,
        )  # fmt: skip
    else:
        _side(
            pid - q_programs, k_ptr, k_made_ptr, k_first_ptr, k_last_ptr, k_whole_ptr, k_strides, k_heads, G, cols,
            slots, 0, 0, K_BLOCK, K_WIDE, TILE // K_WIDE, K_COPIES, True,
        )  # fmt: skip


_ENTRIES = 512  # blocks of a launch tile, if rows are short
# Blocks of a row at a time; fewer than 2^15, so that two counts of them fit one int32.
_NARROWEST, _WIDEST = 256, 1024
_PER_THREAD = 16  # blocks of a launch tile per thread


def block_lists_triton(keep: Tensor, grid: BlockGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as in `block_lists`."""
    B, H, rows, cols = keep.shape
    index = torch.empty(keep.shape, dtype=index_dtype(cols), device=keep.device)
    full_count, partial_count = empty_together(torch.int32, keep.device, (B, H, rows), (B, H, rows))
    wide = min(max(power_of_2(cols), _NARROWEST), _WIDEST)
    high = max(_ENTRIES // wide, 1)
    _block_lists_kernel[(cdiv(rows, high), H, B)](
        keep, *positions(grid), grid.k_whole, full_count, partial_count, index,
        strides(keep), strides(grid.k_whole),
        rows, cols,
        CAUSAL=grid.causal, WINDOW=grid.window, ROWS=high, COLS=wide, WHOLE=cols <= wide,
        num_warps=high * wide // (32 * _PER_THREAD),
    )  # fmt: skip
    return full_count, partial_count, index


@triton.jit
def _kinds(
    keep_at, keep_stride, k_first_at, k_first_stride, k_last_at, k_last_stride, k_whole_at, k_whole_stride,
    q_first, q_last, col, inside, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Which blocks of a launch tile are kept and full, and which are kept and partial, as 0 or 1."""
    keep = tl.load(keep_at + col * keep_stride, mask=inside, other=0) != 0
    k_last = tl.load(k_last_at + col * k_last_stride, mask=inside, other=-1)
    k_whole = tl.load(k_whole_at + col * k_whole_stride, mask=inside, other=0)
    k_first = k_last
    if WINDOW is not None:
        k_first = tl.load(k_first_at + col * k_first_stride, mask=inside, other=0)
    full = keep & full_blocks(q_first, q_last, k_first, k_last, k_whole, CAUSAL, WINDOW)
    return full.to(tl.int32), keep.to(tl.int32) - full.to(tl.int32)


@triton.jit
def _list(index_at, at, full, partial, full_place, partial_place):
    """Store the kept blocks of a launch tile: full ones after `full_place`, the others after `partial_place`."""
    INDEX: tl.constexpr = index_at.dtype.element_ty
    seen = tl.cumsum(full + (partial << 16), 1)  # partial blocks are counted above the lower 16 bits
    place = tl.where(full != 0, full_place + (seen & 0xFFFF), partial_place + (seen >> 16))
    tl.store(index_at + place, tl.broadcast_to(at.to(INDEX), place.shape), mask=(full + partial) != 0)


@remembered
@triton.jit(do_not_specialize=["rows"])
def _block_lists_kernel(
    keep_ptr, positions, position_strides, k_whole_ptr, full_count_ptr, partial_count_ptr, index_ptr,
    keep_strides, k_whole_strides,
    rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """With `WHOLE` a launch tile holds whole rows; else each row is walked twice, to count and then to list."""
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    q_first = tl.load(rows_at(positions[0], position_strides[0], b, h, row), mask=there, other=0)
    q_last = q_first
    if WINDOW is not None:
        q_last = tl.load(rows_at(positions[1], position_strides[1], b, h, row), mask=there, other=0)
    keep_at = rows_at(keep_ptr, keep_strides, b, h, row)
    k_first_at = rows_at(positions[2], position_strides[2], b, h, row)
    k_last_at = rows_at(positions[3], position_strides[3], b, h, row)
    k_whole_at = rows_at(k_whole_ptr, k_whole_strides, b, h, row)
    out_row = (b * tl.num_programs(1) + h).to(tl.int64) * rows + row
    index_at = index_ptr + out_row * cols

    full_count = tl.zeros([ROWS, 1], tl.int32)
    partial_count = tl.zeros([ROWS, 1], tl.int32)
    if WHOLE:
        full, partial = _kinds(
            keep_at, keep_strides[3], k_first_at, position_strides[2][3], k_last_at, position_strides[3][3], k_whole_at, k_whole_strides[3],
            q_first, q_last, col, there & (col < cols), CAUSAL, WINDOW,
        )  # fmt: skip
        full_count += tl.sum(full, 1, keep_dims=True)
        partial_count += tl.sum(partial, 1, keep_dims=True)
        _list(index_at, col, full, partial, full_count * 0 - 1, full_count - 1)
    else:
        for start in range(0, cols, COLS):
            at = start + col
            full, partial = _kinds(
                keep_at, keep_strides[3], k_first_at, position_strides[2][3], k_last_at, position_strides[3][3], k_whole_at, k_whole_strides[3],
                q_first, q_last, at, there & (at < cols), CAUSAL, WINDOW,
            )  # fmt: skip
            full_count += tl.sum(full, 1, keep_dims=True)
            partial_count += tl.sum(partial, 1, keep_dims=True)
        full_place = tl.zeros([ROWS, 1], tl.int32) - 1
        partial_place = full_count - 1
        for start in range(0, cols, COLS):
            at = start + col
            full, partial = _kinds(
                keep_at, keep_strides[3], k_first_at, position_strides[2][3], k_last_at, position_strides[3][3], k_whole_at, k_whole_strides[3],
                q_first, q_last, at, there & (at < cols), CAUSAL, WINDOW,
            )  # fmt: skip
            _list(index_at, at, full, partial, full_place, partial_place)
            full_place += tl.sum(full, 1, keep_dims=True)
            partial_place += tl.sum(partial, 1, keep_dims=True)
    tl.store(full_count_ptr + out_row, full_count, mask=there)
    tl.store(partial_count_ptr + out_row, partial_count, mask=there)
    listed = full_count + partial_count
    for start in range(0, cols, COLS):
        at = start + col
        nothing = tl.zeros([ROWS, COLS], index_ptr.dtype.element_ty)
        tl.store(index_at + at, nothing, mask=there & (at < cols) & (at >= listed))
