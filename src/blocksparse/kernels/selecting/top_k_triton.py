"""The Triton kernel of `top_k`: one read of the scores, a search instead of a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.strides_triton import head_strides
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.block_grid_triton import (
    diagonal_blocks,
    load_blocks,
    load_positions,
    positions,
    reachable_blocks,
    rows_at,
    strides,
    tile,
)
from blocksparse.kernels.selecting.row_search_triton import cut, first_of, width_of_rows
from blocksparse.launch.launches import remembered

_NO_KEY = tl.constexpr(-(2**31))


def top_k_triton(
    values: Tensor,
    forced: Tensor | None,
    k: int | Tensor | None,
    share: Tensor | None,
    grid: BlockGrid,
    *,
    forced_first: bool,
    of_all_keys: bool,
) -> Tensor:
    """Launch the kernel; arguments as of `top_k`."""
    B, H, rows, cols = values.shape
    keep = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    wide, num_warps = width_of_rows(cols)
    _kernel[(rows, H, B)](
        values, forced, share, keep, *positions(grid),
        strides(values), None if forced is None else strides(forced),
        None if share is None else head_strides(share)[1], strides(keep),
        rows, cols, k,
        CAUSAL=grid.causal, WINDOW=grid.window, FORCED_FIRST=forced_first, OF_ALL_KEYS=of_all_keys, ROWS=1, COLS=wide,
        num_warps=num_warps,
    )  # fmt: skip
    return keep


@triton.jit
def sortable(x):
    """int32 in the same order as the fp32 numbers `x`, none of them NaN; both zeros become 0.

    The bits of negative numbers stand in falling order, so all but their sign are flipped.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@remembered
@triton.jit(do_not_specialize=["rows"])
def _kernel(
    values_ptr, forced_ptr, share_ptr, keep_ptr, positions, position_strides,
    values_strides, forced_strides, share_stride, keep_strides,
    rows, cols, k,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FORCED_FIRST: tl.constexpr, OF_ALL_KEYS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    reachable = inside & reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    always = diagonal_blocks(reachable, q_first, k_last, CAUSAL)
    values = load_blocks(values_ptr, values_strides, b, h, row, col, reachable, float("-inf"))
    values = tl.where(
        values != values,
        float("-inf"),
        tl.minimum(tl.maximum(values, -3.4028234663852886e38), 3.4028234663852886e38),
    )
    if forced_ptr is not None:
        forced = (load_blocks(forced_ptr, forced_strides, b, h, row, col, inside, 0) != 0) & reachable
        always = always | forced
        if not FORCED_FIRST:
            values = tl.where(forced, float("-inf"), values)
    if FORCED_FIRST:
        values = tl.where(always, float("inf"), values)
    key = tl.where(reachable, sortable(values), _NO_KEY)
    there = tl.sum(reachable.to(tl.int32), 1, keep_dims=True)

    if share_ptr is None:
        count = tl.zeros([ROWS, 1], tl.int32) + k
    else:
        share = tl.load(share_ptr + h * share_stride)
        if OF_ALL_KEYS:
            count = tl.zeros([ROWS, 1], tl.int32) + tl.maximum((share * cols).to(tl.float32).to(tl.int32), 1)
        else:
            count = tl.ceil((share * there.to(tl.float64)).to(tl.float32)).to(tl.int32)
    count = tl.minimum(count, there).to(tl.float32)
    high = tl.maximum(tl.max(key, 1, keep_dims=True), _NO_KEY + 1)
    low = tl.where(count > 0.0, _NO_KEY, high - 1)
    weight = tl.full([ROWS, COLS], 1.0, tl.float32)
    worst = cut(key, weight, low, high, tl.zeros_like(count) + cols, count, False)
    missing = count - tl.sum((key > worst).to(tl.float32), 1, keep_dims=True)
    tied = key == worst
    number = tl.sum(tied.to(tl.float32), 1, keep_dims=True)
    taken = (key > worst) | first_of(tied, number, 1.0, missing, True)
    tl.store(rows_at(keep_ptr, keep_strides, b, h, row) + col, (taken | always) & reachable, mask=inside)
