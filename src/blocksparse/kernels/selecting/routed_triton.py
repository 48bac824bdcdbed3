"""The Triton kernel of `routed`, and one that joins two masks, since calls cannot repeat PyTorch's own operation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.common.strides_triton import head_strides
from blocksparse.launch.launches import remembered

_TILE = 4096  # blocks per program


def routed_triton(heads: Below, below: Tensor, otherwise: Tensor) -> Tensor:
    """Launch the kernel; arguments as of `routed`."""
    (number, bound, others), (B, H, rows, cols) = heads, below.shape
    if others:
        below, otherwise = otherwise, below
    out = torch.empty(below.shape, dtype=torch.bool, device=below.device)
    _kernel[(cdiv(rows * cols, _TILE), H, B)](
        number.contiguous(), bound, below.contiguous(), otherwise.contiguous(), out, head_strides(bound)[1],
        rows * cols,
        TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return out


def either_triton(mine: Tensor, its: Tensor) -> Tensor:
    """Entries that are true in either of two masks of one shape, bool, each without gaps in memory."""
    out = torch.empty(mine.shape, dtype=torch.bool, device=mine.device)
    n = mine.numel()
    _either[(cdiv(n, _TILE),)](mine, its, out, n, TILE=_TILE, num_warps=4)
    return out


@remembered
@triton.jit(do_not_specialize=["bound_stride"])
def _kernel(number_ptr, bound_ptr, below_ptr, otherwise_ptr, out_ptr, bound_stride, n, TILE: tl.constexpr):
    h = tl.program_id(1)
    head = (tl.program_id(2) * tl.num_programs(1) + h).to(tl.int64)
    one = tl.zeros([TILE], tl.int32)
    is_below = tl.load(number_ptr + head + one).to(tl.float64) < tl.load(bound_ptr + h * bound_stride + one)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    first = tl.load(below_ptr + head * n + at, mask=there & is_below, other=0)
    second = tl.load(otherwise_ptr + head * n + at, mask=there & ~is_below, other=0)
    tl.store(out_ptr + head * n + at, (first != 0) | (second != 0), mask=there)


@remembered
@triton.jit
def _either(mine_ptr, its_ptr, out_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    mine = tl.load(mine_ptr + at, mask=there, other=0) != 0
    its = tl.load(its_ptr + at, mask=there, other=0) != 0
    tl.store(out_ptr + at, mine | its, mask=there)
