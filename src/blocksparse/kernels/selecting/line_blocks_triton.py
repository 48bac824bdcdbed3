"""The Triton kernel of `line_blocks`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.common.strides_triton import head_strides
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.block_grid_triton import (
    diagonal_blocks,
    load_blocks,
    load_positions,
    positions,
    reachable_blocks,
    strides,
    tile_of_blocks,
    tile_of_grid,
)
from blocksparse.kernels.selecting.lines import Lines
from blocksparse.runtime.launches import remembered

_TILE = 2048  # blocks of a launch tile


def line_blocks_triton(
    columns: Lines,
    bands: Lines,
    grid: BlockGrid,
    *,
    whole: Tensor | None = None,
    first: int | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Launch the kernel; arguments as of `line_blocks`."""
    (B, H, keys), distances = columns.counts.shape, bands.counts.shape[2]
    rows, cols = grid.q_first.shape[2], grid.k_first.shape[3]
    keep = torch.empty((B, H, rows, cols), dtype=torch.bool, device=columns.counts.device)
    tile = tile_of_blocks(_TILE)
    _kernel[(cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B)](
        columns.counts.contiguous(), bands.counts.contiguous(), whole, also, keep,
        None if whole is None else head_strides(whole)[1], None if also is None else strides(also), *positions(grid),
        keys - 1, columns.run, distances - 1, bands.run, rows, cols, first,
        CAUSAL=grid.causal, WINDOW=grid.window, **tile,
        num_warps=4,
    )  # fmt: skip
    return keep


@remembered
@triton.jit(do_not_specialize=["whole_stride", "keys", "key_run", "distances", "run", "rows", "cols", "first"])
def _kernel(
    keys_ptr, distances_ptr, whole_ptr, also_ptr, keep_ptr, whole_stride, also_strides, positions, position_strides,
    keys, key_run, distances, run, rows, cols, first,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    reachable = inside & reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    near, far = q_first - k_last, q_last - k_first
    if not CAUSAL:
        near, far = tl.maximum(near, -far), tl.maximum(far, -near)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    at = distances_ptr + head * (distances + 1)
    before = tl.load(at + tl.minimum(tl.maximum(near, 0) // run, distances), mask=reachable, other=0)
    end = tl.where(far < 0, 0, tl.maximum(far, 0) // run + 1)
    keep = before < tl.load(at + tl.minimum(end, distances), mask=reachable, other=0)
    at = keys_ptr + head * (keys + 1)
    before = tl.load(at + tl.minimum(col * key_run, keys), mask=col < cols, other=0)
    keep = keep | (before < tl.load(at + tl.minimum((col + 1) * key_run, keys), mask=col < cols, other=0))
    if whole_ptr is not None:
        keep = keep | (tl.load(whole_ptr + h * whole_stride + tl.zeros_like(row)).to(tl.float32) >= 1.0)
    if first is not None:
        keep = keep | (k_first < first)
    if also_ptr is not None:
        keep = keep | (load_blocks(also_ptr, also_strides, b, h, row, col, inside, 0) != 0)
    keep = (keep & reachable) | diagonal_blocks(reachable, q_first, k_last, CAUSAL)
    tl.store(keep_ptr + (head * rows + row) * cols + col, keep, mask=inside)
