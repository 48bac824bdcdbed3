"""The Triton kernel of `gather_pages`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.launch.launches import remembered

_TILE = 8192  # entries of a tensor per program


def gather_pages_triton(keys: Tensor, values: Tensor, pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Launch the kernel; arguments as of `gather_pages`."""
    (_, Hkv, N, D), Dv = k.shape, v.shape[3]
    wide = power_of_2(D), power_of_2(Dv)
    rows = min(max(_TILE // max(wide), 1), 1024)
    _kernel[(cdiv(N, rows), Hkv)](
        keys, values, pages, k, v, keys.stride(), values.stride(), k.stride()[1:3], v.stride()[1:3], N,
        PAGE=keys.shape[2], D=D, DV=Dv, BLOCK_D=wide[0], BLOCK_DV=wide[1], ROWS=rows, num_warps=4,
    )  # fmt: skip


@triton.jit
def _read(x_ptr, strides, page, h, slot, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Slots of pages of a head, `[ROWS, BLOCK_D]`."""
    dims = tl.arange(0, BLOCK_D)
    source = x_ptr + page.to(tl.int64)[:, None] * strides[0] + h.to(tl.int64) * strides[1]
    source = source + slot[:, None] * strides[2] + dims[None, :] * strides[3]
    return tl.load(source, mask=there[:, None] & (dims < D)[None, :])


@triton.jit
def _write(out_ptr, x, strides, h, row, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    target = out_ptr + h.to(tl.int64) * strides[0] + row.to(tl.int64)[:, None] * strides[1] + dims[None, :]
    tl.store(target, x, mask=there[:, None] & (dims < D)[None, :])


@remembered
@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["pages_ptr"])
def _kernel(
    keys_ptr, values_ptr, pages_ptr, k_ptr, v_ptr, keys_strides, values_strides, k_strides, v_strides, N,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < N
    page = tl.load(pages_ptr + row // PAGE, mask=there, other=0)
    # The loads of both are in flight before either is written.
    k = _read(keys_ptr, keys_strides, page, h, row % PAGE, there, D, BLOCK_D)
    v = _read(values_ptr, values_strides, page, h, row % PAGE, there, DV, BLOCK_DV)
    _write(k_ptr, k, k_strides, h, row, there, D, BLOCK_D)
    _write(v_ptr, v, v_strides, h, row, there, DV, BLOCK_DV)
