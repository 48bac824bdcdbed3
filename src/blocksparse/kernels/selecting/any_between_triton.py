"""The Triton kernel of `any_between`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.positions.block_grid_triton import rows_at, strides, tile_of_blocks, tile_of_grid
from blocksparse.runtime.device import device_of
from blocksparse.runtime.launches import remembered

_TILE = 2048  # blocks of a launch tile


def any_between_triton(count: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Launch the kernel; arguments as of `any_between_reference`."""
    (B, H, entries), (rows, cols) = count.shape, low.shape[2:]
    out = torch.empty((B, H, rows, cols), dtype=torch.bool, device=count.device)
    tile = tile_of_blocks(_TILE)
    with device_of(count):
        _kernel[(cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B)](
            count.contiguous(), low, high, out, strides(low), strides(high), entries - 1, rows, cols,
            **tile, num_warps=4,
        )  # fmt: skip
    return out


@remembered
@triton.jit(do_not_specialize=["n", "rows"])
def _kernel(
    count_ptr, low_ptr, high_ptr, out_ptr, low_strides, high_strides, n, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    inside = (row < rows) & (col < cols)
    low = tl.load(rows_at(low_ptr, low_strides, b, h, row) + col * low_strides[3], mask=inside, other=0)
    high = tl.load(rows_at(high_ptr, high_strides, b, h, row) + col * high_strides[3], mask=inside, other=0)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    count_at = count_ptr + head * (n + 1)
    before = tl.load(count_at + tl.minimum(tl.maximum(low, 0), n), mask=inside, other=0)
    up_to = tl.load(count_at + tl.minimum(tl.maximum(high + 1, 0), n), mask=inside, other=0)
    tl.store(out_ptr + (head * rows + row) * cols + col, before < up_to, mask=inside)
