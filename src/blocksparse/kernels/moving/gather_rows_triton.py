"""The Triton kernel of `gather_rows`, `gather_two` and `scatter_rows`: any dtype, in accesses of 16 bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.common.strides_triton import alike, head_at, head_strides
from blocksparse.launch.launches import remembered

_TILE = 8192  # entries of a tensor per program


def gather_rows_triton(x: Tensor, index: Tensor) -> Tensor:
    """Launch the kernel to gather rows; arguments as of `gather_rows`."""
    out = x.new_empty((*index.shape, x.shape[-1]))
    _launch((x,), (out,), index, heads_per_source=index.shape[1] // x.shape[1], scatter=False)
    return out


def gather_two_triton(
    x: Tensor, y: Tensor, index: Tensor, wanted: Tensor | None = None, block: int = 1
) -> tuple[Tensor, Tensor]:
    """Launch the kernel to gather rows of two tensors; arguments as of `gather_two`."""
    out = x.new_empty((*index.shape, x.shape[-1])), y.new_empty((*index.shape, y.shape[-1]))
    heads_per_source = index.shape[1] // x.shape[1]
    _launch((x, y), out, index, heads_per_source=heads_per_source, scatter=False, wanted=wanted, block=block)
    return out


def scatter_rows_triton(x: Tensor, index: Tensor) -> Tensor:
    """Launch the kernel to move the rows of `x` to their places; arguments as of `scatter_rows`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = (*index.shape, -1)
    _launch((x.reshape(rows),), (out.view(rows),), index, heads_per_source=1, scatter=True)
    return out


def _launch(
    tensors: tuple[Tensor, ...],
    out: tuple[Tensor, ...],
    index: Tensor,
    *,
    heads_per_source: int,
    scatter: bool,
    wanted: Tensor | None = None,
    block: int = 1,
) -> None:
    B, H, M = index.shape
    index = index if index.stride(-1) == 1 else index.contiguous()
    x, y = ((x if x.stride(-1) == 1 else x.contiguous()) for x in (tensors[0], tensors[-1]))
    wide = [power_of_2(x.shape[-1]) for x in (x, y)]
    rows = min(max(_TILE // max(wide), 1), 1024)
    if wanted is not None:
        # A power of two that divides the block, so that all rows of a program are wanted, or none is: the lowest bit of
        # `block` is the largest power that does.
        rows = min(rows, block & -block)
        wanted = wanted if wanted.stride(-1) == 1 else wanted.contiguous()
    _kernel[(cdiv(M, rows), H, B)](
        x, out[0], y, out[-1], index,
        wanted,
        x.stride()[:3], y.stride()[:3], alike(*index.stride()[:2]),
        None if wanted is None else alike(*head_strides(wanted)),
        M, heads_per_source, 1 if wanted is None else H // wanted.shape[1],
        DX=x.shape[-1], DY=y.shape[-1], BLOCK_DX=wide[0], BLOCK_DY=wide[1], ROWS=rows,
        BLOCK=block, TWO=len(tensors) == 2, SCATTER=scatter,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _read(x_ptr, strides, b, h, row, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `row` of head `(b, h)` of a tensor `[B, H, N, D]`."""
    dims = tl.arange(0, BLOCK_D)
    source = x_ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    source = source + row.to(tl.int64)[:, None] * strides[2] + dims[None, :]
    if BLOCK_D == D:
        x = tl.load(source, mask=there[:, None])
    else:
        x = tl.load(source, mask=there[:, None] & (dims < D)[None, :])
    return x


@triton.jit
def _write(out_ptr, x, head, M, row, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores `x` as rows `row` of head `head` of a contiguous tensor `[B * H, M, D]`."""
    dims = tl.arange(0, BLOCK_D)
    target = out_ptr + (head * M + row)[:, None] * D + dims[None, :]
    if BLOCK_D == D:
        tl.store(target, x, mask=there[:, None])
    else:
        tl.store(target, x, mask=there[:, None] & (dims < D)[None, :])


@remembered
@triton.jit(do_not_specialize=["M", "wanted_ptr"])
def _kernel(
    x_ptr, x_out_ptr, y_ptr, y_out_ptr, index_ptr, wanted_ptr,
    x_strides, y_strides, index_strides, wanted_strides,
    M, heads_per_source, heads_per_wanted,
    DX: tl.constexpr, DY: tl.constexpr, BLOCK_DX: tl.constexpr, BLOCK_DY: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, TWO: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2)
    if wanted_ptr is not None:
        block = tl.program_id(0) * ROWS // BLOCK
        if tl.load(wanted_ptr + head_at(wanted_strides, b, h // heads_per_wanted) + block) == 0:
            return
    here = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = here < M
    named = tl.load(index_ptr + head_at(index_strides, b, h) + here, mask=there, other=0)
    if SCATTER:
        source, target = here, named
    else:
        source, target = named, here
    head = b.to(tl.int64) * tl.num_programs(1) + h
    # The loads of both tensors are in flight before either is written.
    x = _read(x_ptr, x_strides, b, h // heads_per_source, source, there, DX, BLOCK_DX)
    if TWO:
        y = _read(y_ptr, y_strides, b, h // heads_per_source, source, there, DY, BLOCK_DY)
        _write(y_out_ptr, y, head, M, target, there, DY, BLOCK_DY)
    _write(x_out_ptr, x, head, M, target, there, DX, BLOCK_DX)
