"""The Triton kernel of `visiting_order`: one program for a row of blocks.

A block's place is the number of blocks before it, those of a smaller rank and those of the same rank in a smaller column.
They are counted instead of sorted: a row of `cols` blocks takes `cols^2` comparisons, and no exchange between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.positions.block_grid_triton import rows_at, strides
from blocksparse.launch.launches import remembered

_CHUNK = 16  # columns that all others are compared with at a time
_DROPPED = tl.constexpr(2**31 - 1)  # stands for the rank of a block that is not kept
_GREATEST = tl.constexpr(2**31 - 2)  # the greatest rank of one that is


def visiting_order_triton(keep: Tensor, rank: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as of `visiting_order`."""
    B, H, rows, cols = keep.shape
    index = torch.empty(keep.shape, dtype=torch.int32, device=keep.device)
    opened, count = (torch.empty((B, H, rows), dtype=torch.int32, device=keep.device) for _ in range(2))
    wide = max(power_of_2(cols), 2 * _CHUNK)
    _kernel[(rows, H, B)](
        keep, rank, tau.contiguous(), index, opened, count, strides(keep), strides(rank), cols,
        COLS=wide, CHUNK=_CHUNK, num_warps=4 if wide > 128 else 1,
    )  # fmt: skip
    return index, opened, count


@triton.jit
def _ranks(keep_at, rank_at, keep_stride, rank_stride, col, cols):
    """Ranks of the columns `col`, that of dropped blocks where nothing is kept, and which are kept."""
    inside = col < cols
    keep = tl.load(keep_at + col * keep_stride, mask=inside, other=0) != 0
    rank = tl.load(rank_at + col * rank_stride, mask=inside, other=0)
    return tl.where(keep, tl.minimum(rank, _GREATEST), _DROPPED), keep


@remembered
@triton.jit(do_not_specialize=["cols"])
def _kernel(
    keep_ptr, rank_ptr, tau_ptr, index_ptr, opened_ptr, count_ptr, keep_strides, rank_strides, cols,
    COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keep_at = rows_at(keep_ptr, keep_strides, b, h, row)
    rank_at = rows_at(rank_ptr, rank_strides, b, h, row)
    col = tl.arange(0, COLS)[:, None]
    mine, keep = _ranks(keep_at, rank_at, keep_strides[3], rank_strides[3], col, cols)
    place = tl.zeros([COLS, 1], tl.int32)
    for start in range(0, cols, CHUNK):
        other = start + tl.arange(0, CHUNK)[None, :]
        its, _ = _ranks(keep_at, rank_at, keep_strides[3], rank_strides[3], other, cols)
        before = (other < cols) & ((its < mine) | ((its == mine) & (other < col)))
        place += tl.sum(before.to(tl.int32), 1, keep_dims=True)
    list_at = (b * tl.num_programs(1) + h).to(tl.int64) * tl.num_programs(0) + row
    tl.store(index_ptr + list_at * cols + place, col, mask=col < cols)
    opened = keep & (mine <= tl.where(tl.load(tau_ptr + h) == 0.0, _DROPPED, -1))  # no rank is above `_DROPPED`
    tl.store(opened_ptr + list_at, tl.sum(tl.sum(opened.to(tl.int32), 1), 0))
    tl.store(count_ptr + list_at, tl.sum(tl.sum(keep.to(tl.int32), 1), 0))
