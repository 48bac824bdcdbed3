"""The Triton kernel of `line_blocks`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.below_triton import asked, not_asked
from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.common.strides_triton import head_strides
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.block_grid_triton import (
    any_of,
    diagonal_blocks,
    load_blocks,
    load_positions,
    positions,
    reachable_blocks,
    strides,
    tile_of_grid,
)
from blocksparse.kernels.selecting.lines import Lines
from blocksparse.launch.launches import remembered

# Of a launch tile, no wider than it must be: causality leaves nearly half of such tiles without a block that is seen.
_TILE = {"ROWS": 16, "COLS": 64}


def line_blocks_triton(
    columns: Lines,
    bands: Lines,
    grid: BlockGrid,
    *,
    whole: Tensor | None = None,
    first: int | None = None,
    also: Tensor | None = None,
    heads: Below | None = None,
) -> Tensor:
    """Launch the kernel; arguments as of `line_blocks`."""
    (B, H, keys), distances = columns.counts.shape, bands.counts.shape[2]
    rows, cols = grid.q_first.shape[2], grid.k_first.shape[3]
    keep = torch.empty((B, H, rows, cols), dtype=torch.bool, device=columns.counts.device)
    _kernel[(cdiv(rows, _TILE["ROWS"]) * cdiv(cols, _TILE["COLS"]), H, B)](
        *asked(heads), columns.counts.contiguous(), bands.counts.contiguous(), whole, also, keep,
        None if whole is None else head_strides(whole)[1], None if also is None else strides(also), *positions(grid),
        keys - 1, distances - 1, rows, cols, first,
        OTHERS=heads is not None and heads.others, KEY_RUN=columns.run, RUN=bands.run,
        CAUSAL=grid.causal, WINDOW=grid.window, **_TILE,
        num_warps=4,
    )  # fmt: skip
    return keep


@remembered
@triton.jit(do_not_specialize=["whole_stride", "keys", "distances", "rows", "cols", "first"])
def _kernel(
    number_ptr, bound_ptr, bound_stride, keys_ptr, distances_ptr, whole_ptr, also_ptr, keep_ptr, whole_stride, also_strides, positions, position_strides,
    keys, distances, rows, cols, first,
    OTHERS: tl.constexpr, KEY_RUN: tl.constexpr, RUN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride, OTHERS):
            return
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    reachable = inside & reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    keep_at = keep_ptr + (head * rows + row) * cols + col
    if any_of(reachable) == 0:
        tl.store(keep_at, tl.zeros([ROWS, COLS], tl.int1), mask=inside)
        return
    near, far = q_first - k_last, q_last - k_first
    if not CAUSAL:
        near, far = tl.maximum(near, -far), tl.maximum(far, -near)
    at = distances_ptr + head * (distances + 1)
    before = tl.load(at + tl.minimum(tl.maximum(near, 0) // RUN, distances), mask=reachable, other=0)
    end = tl.where(far < 0, 0, tl.maximum(far, 0) // RUN + 1)
    keep = before < tl.load(at + tl.minimum(end, distances), mask=reachable, other=0)
    at = keys_ptr + head * (keys + 1)
    before = tl.load(at + tl.minimum(col * KEY_RUN, keys), mask=col < cols, other=0)
    keep = keep | (before < tl.load(at + tl.minimum((col + 1) * KEY_RUN, keys), mask=col < cols, other=0))
    if whole_ptr is not None:
        keep = keep | (tl.load(whole_ptr + h * whole_stride + tl.zeros_like(row)).to(tl.float32) >= 1.0)
    if first is not None:
        keep = keep | (k_first < first)
    if also_ptr is not None:
        keep = keep | (load_blocks(also_ptr, also_strides, b, h, row, col, inside, 0) != 0)
    keep = (keep & reachable) | diagonal_blocks(reachable, q_first, k_last, CAUSAL)
    tl.store(keep_at, keep, mask=inside)
