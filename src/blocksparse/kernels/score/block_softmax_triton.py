"""The Triton kernels of `score/block_softmax.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import asked, head_strides, not_asked
from blocksparse.kernels.common.sizes import FAR, Heads, cdiv, power_of_2
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.masks.grid_triton import (
    load_positions,
    plain_strides,
    positions,
    rows_at,
    strides,
    tile,
    tile_of_blocks,
    tile_of_grid,
    visible_blocks,
)
from blocksparse.launch.launches import remembered

_LEAST, _MOST = 256, 8192  # logits of a row that a program holds, at least and at most; a longer row is read twice


def block_softmax_triton(
    logits: Tensor, grid: BlockGrid, *, scale: float = 1.0, segment: int | None = None, heads: Heads = None
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel; arguments as in `block_softmax`."""
    segment = None if segment is None else min(segment, FAR)
    own, where = None, positions(grid, plain=True)
    if segment is not None:
        batch, masks = (max(x.shape[axis] for x in where[0]) for axis in (0, 1))
        own = torch.empty((batch, masks, *logits.shape[2:]), dtype=torch.bool, device=logits.device)
    mass = _launch(logits, where, None, own, segment, scale, causal=grid.causal, window=grid.window, heads=heads)
    return mass, own


def prefix_softmax_triton(logits: Tensor, seen: Tensor) -> Tensor:
    """Launch the kernel; arguments as in `prefix_softmax`."""
    return _launch(logits, (None, None), seen, None, None, 1.0, causal=False)


def _launch(
    logits: Tensor,
    where: tuple[Any, Any],
    seen: Tensor | None,
    own: Tensor | None,
    segment: int | None,
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
    heads: Heads = None,
) -> Tensor:
    logits, (pointers, position_strides) = logits.contiguous(), where
    B, H, rows, cols = logits.shape
    wide = min(max(power_of_2(cols), _LEAST), _MOST)
    high, aligned = max(1024 // wide, 1), cols % 16 == 0
    _block_softmax_kernel[(cdiv(rows, high), H, B)](
        *asked(heads), logits, pointers, seen, own,
        position_strides, None if seen is None else strides(seen),
        None if own is None else plain_strides(own) if aligned else strides(own),
        rows, cols, scale,
        SEGMENT=segment, CAUSAL=causal, WINDOW=window, ALIGNED=aligned, ROWS=high, COLS=wide, WHOLE=cols <= wide,
        num_warps=high * wide // 512,
    )  # fmt: skip
    return logits


@triton.jit
def _scaled(
    logits_at, positions, seen_ptr, own_ptr, position_strides, seen_strides, own_strides,
    b, h, row, col, there, inside, scale,
    SEGMENT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Scaled logits of a launch tile, -inf where a column is not eligible; stores which blocks are of the own segment."""
    if seen_ptr is not None:
        seen = tl.load(rows_at(seen_ptr, seen_strides, b, h, row), mask=there, other=0)
        eligible = inside & (col < seen)
    else:
        q_first, q_last, k_first, k_last = load_positions(
            positions, position_strides, b, h, row, col, there, inside, False
        )
        eligible = inside & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
        if SEGMENT is not None:
            own = eligible & (k_first // SEGMENT == q_first // SEGMENT)
            eligible = eligible & ~own
            # If all batch entries or heads share positions, only the first of them writes.
            if ((b == 0) | (own_strides[0] != 0)) & ((h == 0) | (own_strides[1] != 0)):
                tl.store(rows_at(own_ptr, own_strides, b, h, row, not ALIGNED) + col, own, mask=inside)
    logits = tl.load(logits_at + col, mask=eligible, other=float("-inf"))
    return tl.where(eligible, logits * scale, float("-inf"))


# If the length of rows is a multiple of 16, they are read in wider pieces, and so summed in another order. Unlike other
# kernels over blocks, this one is therefore compiled for both kinds of `cols`: with one program for both, a score would
# depend on which kind came first.
@remembered
@triton.jit(do_not_specialize=["rows"])
def _block_softmax_kernel(
    number_ptr, bound_ptr, bound_stride, logits_ptr, positions, seen_ptr, own_ptr,
    position_strides, seen_strides, own_strides,
    rows, cols, scale,
    SEGMENT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    logits_at = logits_ptr + ((b * tl.num_programs(1) + h).to(tl.int64) * rows + row) * cols
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride):
            for start in range(0, cols, COLS):
                inside = there & (start + col < cols)
                tl.store(logits_at + start + col, tl.zeros([ROWS, COLS], tl.float32), mask=inside)
            return
    if WHOLE:
        inside = there & (col < cols)
        logits = _scaled(
            logits_at, positions, seen_ptr, own_ptr, position_strides, seen_strides, own_strides,
            b, h, row, col, there, inside, scale, SEGMENT, CAUSAL, WINDOW, ALIGNED,
        )  # fmt: skip
        best = tl.max(logits, 1, keep_dims=True)
        weight = tl.exp(logits - tl.where(best == float("-inf"), 0.0, best))
        total = tl.sum(weight, 1, keep_dims=True)
        tl.store(logits_at + col, weight / tl.where(total == 0.0, 1.0, total), mask=inside)
    else:
        best = tl.full([ROWS, 1], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, 1], tl.float32)
        for start in range(0, cols, COLS):
            at = start + col
            logits = _scaled(
                logits_at, positions, seen_ptr, own_ptr, position_strides, seen_strides, own_strides,
                b, h, row, at, there, there & (at < cols), scale, SEGMENT, CAUSAL, WINDOW, ALIGNED,
            )  # fmt: skip
            new_best = tl.maximum(best, tl.max(logits, 1, keep_dims=True))
            origin = tl.where(new_best == float("-inf"), 0.0, new_best)
            total = total * tl.exp(best - origin) + tl.sum(tl.exp(logits - origin), 1, keep_dims=True)
            best = new_best
        origin = tl.where(best == float("-inf"), 0.0, best)
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        for start in range(0, cols, COLS):
            at = start + col
            inside = there & (at < cols)
            logits = _scaled(
                logits_at, positions, seen_ptr, own_ptr, position_strides, seen_strides, own_strides,
                b, h, row, at, there, inside, scale, SEGMENT, CAUSAL, WINDOW, ALIGNED,
            )  # fmt: skip
            tl.store(logits_at + at, tl.exp(logits - origin) * inverse, mask=inside)


_TILE = 4096  # blocks of a launch tile


def gate_blocks_triton(
    values: Tensor, of_q: Tensor, of_k: Tensor, theta: float | Tensor, forced: Tensor | None, grid: BlockGrid
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as in `gate_blocks`."""
    B, H, rows, cols = values.shape
    gated = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    out = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    tensors, position_strides = positions(grid)
    tile = tile_of_blocks(_TILE)
    of_head = theta if isinstance(theta, Tensor) else None
    _gate_blocks_kernel[(cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B)](
        values, of_q.contiguous(), of_k.contiguous(), of_head, forced, gated, out, tensors,
        strides(values), None if of_head is None else head_strides(of_head)[1], None if forced is None else strides(forced),
        position_strides, rows, cols, H // of_k.shape[1], float(theta) if of_head is None else None,
        CAUSAL=grid.causal, WINDOW=grid.window, **tile,
        num_warps=4,
    )  # fmt: skip
    return gated, out


@remembered
@triton.jit(do_not_specialize=["rows", "group"])
def _gate_blocks_kernel(
    values_ptr, of_q_ptr, of_k_ptr, theta_ptr, forced_ptr, gated_ptr, out_ptr, position_ptrs,
    values_strides, theta_stride, forced_strides, position_strides,
    rows, cols, group, theta,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    if theta_ptr is not None:
        theta = tl.load(theta_ptr + h * theta_stride).to(tl.float32)
    heads = tl.num_programs(1)
    of_q = tl.load(of_q_ptr + (b * heads + h).to(tl.int64) * rows + row, mask=there, other=0.0)
    of_k = tl.load(
        of_k_ptr + (b * (heads // group) + h // group).to(tl.int64) * cols + col, mask=col < cols, other=0.0
    )
    unlike_col = (of_k <= theta) | (of_k != of_k)  # [1, COLS]; NaN is not similar
    chosen = (of_q <= theta) | (of_q != of_q) | unlike_col
    if forced_ptr is not None:
        forced_at = rows_at(forced_ptr, forced_strides, b, h, row) + col * forced_strides[3]
        chosen = chosen | (tl.load(forced_at, mask=inside, other=0) != 0)
    q_first, q_last, k_first, k_last = load_positions(
        position_ptrs, position_strides, b, h, row, col, there, inside
    )
    at = ((b * tl.num_programs(1) + h).to(tl.int64) * rows + row) * cols + col
    tl.store(out_ptr + at, chosen & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW), mask=inside)
    values_at = rows_at(values_ptr, values_strides, b, h, row) + col * values_strides[3]
    tl.store(gated_ptr + at, tl.load(values_at, mask=inside & ~unlike_col, other=0.0), mask=inside)


def block_divergence_triton(logits: Tensor, true: Tensor, scale: float = 1.0) -> Tensor:
    """Launch the kernel; arguments as in `block_divergence`."""
    (B, H, cols), logits, true = logits.shape, logits.contiguous(), true.contiguous()
    out = torch.empty((B, H), dtype=torch.float32, device=logits.device)
    wide = max(power_of_2(cols), 16)
    _block_divergence_kernel[(B * H,)](
        logits, true, out, scale, cols, COLS=wide, num_warps=8 if wide > 2048 else 4
    )
    return out


@triton.jit
def _apart(x, mean):
    """`x ln(x / mean)`, and 0 for an `x` of 0; NaN stays NaN."""
    some = mean > 0.0  # half of the least number is 0
    return tl.where(x == 0.0, 0.0, x * tl.log(tl.where(x > 0.0, x, 1.0)) - x * tl.log(tl.where(some, mean, 1.0)))


@remembered
@triton.jit(do_not_specialize=["scale", "cols"])
def _block_divergence_kernel(logits_ptr, true_ptr, out_ptr, scale, cols, COLS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    logits = tl.load(logits_ptr + head * cols + col, mask=col < cols, other=0.0) * scale
    logits = tl.where(col < cols, logits, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, 0))
    pooled = weight / tl.sum(weight, 0)
    true = tl.load(true_ptr + head * cols + col, mask=col < cols, other=0.0)
    mean = (pooled + true) / 2
    total = tl.sum(_apart(pooled, mean) + _apart(true, mean), 0) / 2
    tl.store(out_ptr + head, tl.sqrt_rn(tl.where(total < 0.0, 0.0, total)))
