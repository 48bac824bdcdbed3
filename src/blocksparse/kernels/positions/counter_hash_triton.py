"""The Triton kernel of `counter_hash`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.positions.block_grid_triton import strides
from blocksparse.kernels.positions.counter_hash import mix
from blocksparse.launch.launches import remembered

_ROWS, _COLS = 4, 256  # numbers per program


def counter_hash_triton(seed: int, *counters: Tensor) -> Tensor:
    """Launch the kernel; arguments as of `counter_hash`."""
    shape = torch.broadcast_shapes(*(x.shape for x in counters))
    out = torch.empty(shape, dtype=torch.int64, device=counters[0].device)
    depth, rows, cols = (1,) * (3 - len(shape)) + tuple(shape)
    given = tuple(x[(None,) * (3 - x.ndim)] for x in counters)
    _kernel[(cdiv(rows, _ROWS) * cdiv(cols, _COLS), depth)](
        given, tuple(strides(x) for x in given), out, mix(seed), rows, cols,
        COUNTERS=len(given), ROWS=_ROWS, COLS=_COLS,
    )  # fmt: skip
    return out


@triton.jit
def _mix(x):
    """`mix` on uint32, whose sums and products wrap around as they should."""
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def folded(state, counter):
    """The hash of the counters so far (`state`) and of one more, which is hashed by itself before it is folded in."""
    return _mix(_mix(counter.to(tl.uint32)) ^ state.to(tl.uint32))


@remembered
@triton.jit(do_not_specialize=["state", "rows", "cols"])
def _kernel(
    counters, counter_strides, out_ptr, state, rows, cols,
    COUNTERS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    wide = tl.cdiv(cols, COLS)
    z = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // wide * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.program_id(0) % wide * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    mixed = tl.zeros([ROWS, COLS], tl.uint32) + state.to(tl.uint32)
    for i in tl.static_range(COUNTERS):
        of_z, of_row, of_col, unit = counter_strides[i]
        at = (z * (of_z >> 4) + row * (of_row >> 4)) * unit + col * of_col
        mixed = folded(mixed, tl.load(counters[i] + at, mask=inside, other=0))
    tl.store(out_ptr + (z * rows + row) * cols + col, mixed.to(tl.int64), mask=inside)
