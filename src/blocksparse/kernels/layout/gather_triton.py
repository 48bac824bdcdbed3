"""The Triton kernels of `layout/gather.py`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, head_at, head_strides, rows_of, store_rows
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.layout.gather import LEAST_RMS
from blocksparse.launch.launches import remembered

_GATHER_ROWS_TILE = 8192  # entries of a tensor per program


def gather_rows_triton(x: Tensor, index: Tensor) -> Tensor:
    """Launch the kernel to gather rows; arguments as in `gather_rows`."""
    out = x.new_empty((*index.shape, x.shape[-1]))
    _launch((x,), (out,), index, heads_per_source=index.shape[1] // x.shape[1], scatter=False)
    return out


def gather_two_triton(
    x: Tensor, y: Tensor, index: Tensor, wanted: Tensor | None = None, block: int = 1
) -> tuple[Tensor, Tensor]:
    """Launch the kernel to gather rows of two tensors; arguments as in `gather_two`."""
    out = x.new_empty((*index.shape, x.shape[-1])), y.new_empty((*index.shape, y.shape[-1]))
    heads_per_source = index.shape[1] // x.shape[1]
    _launch((x, y), out, index, heads_per_source=heads_per_source, scatter=False, wanted=wanted, block=block)
    return out


def scatter_rows_triton(x: Tensor, index: Tensor) -> Tensor:
    """Launch the kernel to move the rows of `x` to their places; arguments as in `scatter_rows`."""
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
    rows = min(max(_GATHER_ROWS_TILE // max(wide), 1), 1024)
    if wanted is not None:
        # A power of two that divides the block, so that all rows of a program are wanted, or none is: the lowest bit of
        # `block` is the largest power that does.
        rows = min(rows, block & -block)
        wanted = wanted if wanted.stride(-1) == 1 else wanted.contiguous()
    _gather_rows_kernel[(cdiv(M, rows), H, B)](
        x, out[0], y, out[-1], index,
        wanted,
        x.stride()[:3], y.stride()[:3], alike(*index.stride()[:2]),
        None if wanted is None else alike(*head_strides(wanted)),
        M, heads_per_source, 1 if wanted is None else H // wanted.shape[1],
        DX=x.shape[-1], DY=y.shape[-1], BLOCK_DX=wide[0], BLOCK_DY=wide[1], ROWS=rows,
        BLOCK=block, TWO=len(tensors) == 2, SCATTER=scatter,
        num_warps=4,
    )  # fmt: skip


@remembered
@triton.jit(do_not_specialize=["M", "wanted_ptr"])
def _gather_rows_kernel(
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
    x = rows_of(x_ptr, x_strides, b, h // heads_per_source, source, there, DX, BLOCK_DX, False)
    if TWO:
        y = rows_of(y_ptr, y_strides, b, h // heads_per_source, source, there, DY, BLOCK_DY, False)
        store_rows(y_out_ptr, y, head, M, target, there, DY, BLOCK_DY)
    store_rows(x_out_ptr, x, head, M, target, there, DX, BLOCK_DX)


_GATHER_PAGES_TILE = 8192  # entries of a tensor per program


def gather_pages_triton(keys: Tensor, values: Tensor, pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Launch the kernel; arguments as in `gather_pages`."""
    (_, Hkv, N, D), Dv = k.shape, v.shape[3]
    wide = power_of_2(D), power_of_2(Dv)
    rows = min(max(_GATHER_PAGES_TILE // max(wide), 1), 1024)
    _gather_pages_kernel[(cdiv(N, rows), Hkv)](
        keys, values, pages, k, v, keys.stride(), values.stride(), k.stride()[1:3], v.stride()[1:3], N,
        PAGE=keys.shape[2], D=D, DV=Dv, BLOCK_D=wide[0], BLOCK_DV=wide[1], ROWS=rows, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather_pages_read(x_ptr, strides, page, h, slot, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Slots of pages of a head, `[ROWS, BLOCK_D]`."""
    dims = tl.arange(0, BLOCK_D)
    source = x_ptr + page.to(tl.int64)[:, None] * strides[0] + h.to(tl.int64) * strides[1]
    source = source + slot[:, None] * strides[2] + dims[None, :] * strides[3]
    return tl.load(source, mask=there[:, None] & (dims < D)[None, :])


@triton.jit
def _gather_pages_write(out_ptr, x, strides, h, row, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    target = out_ptr + h.to(tl.int64) * strides[0] + row.to(tl.int64)[:, None] * strides[1] + dims[None, :]
    tl.store(target, x, mask=there[:, None] & (dims < D)[None, :])


@remembered
@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["pages_ptr"])
def _gather_pages_kernel(
    keys_ptr, values_ptr, pages_ptr, k_ptr, v_ptr, keys_strides, values_strides, k_strides, v_strides, N,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < N
    page = tl.load(pages_ptr + row // PAGE, mask=there, other=0)
    # The loads of both are in flight before either is written.
    k = _gather_pages_read(keys_ptr, keys_strides, page, h, row % PAGE, there, D, BLOCK_D)
    v = _gather_pages_read(values_ptr, values_strides, page, h, row % PAGE, there, DV, BLOCK_DV)
    _gather_pages_write(k_ptr, k, k_strides, h, row, there, D, BLOCK_D)
    _gather_pages_write(v_ptr, v, v_strides, h, row, there, DV, BLOCK_DV)


_BAND_CHANNELS_TILE = 4096  # entries that a program holds at a time


def band_channels_triton(
    queries: Tensor, keys: Tensor, first: int, end: int, temperature: float | None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as in `band_channels`."""
    queries, keys = queries.contiguous(), keys.contiguous()
    (B, Hq, rows, D), (_, H, cols, _), width = queries.shape, keys.shape, 2 * (end - first)
    mine = torch.empty((B, Hq, rows, width), dtype=torch.float32, device=queries.device)
    its = torch.empty((B, H, cols, width), dtype=torch.float32, device=queries.device)
    block_d = power_of_2(D)
    _band_channels_kernel[(Hq, B)](
        queries, keys, mine, its, rows, cols, Hq // H, first, end, math.sqrt(width / D), temperature, LEAST_RMS,
        D=D, BLOCK_D=block_d, ROWS=max(_BAND_CHANNELS_TILE // block_d, 1), num_warps=8,
    )  # fmt: skip
    return mine, its


@triton.jit
def _channels(first, end, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which channels `[1, BLOCK_D]` are in the band, and their places there."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    pair = dim % (D // 2)
    return (dim < D) & (pair >= first) & (pair < end), dim // (D // 2) * (end - first) + pair - first


@triton.jit
def _at_least(x, least):
    return tl.where(x < least, least, x)  # NaN stays, which `tl.maximum` would drop


@triton.jit
def _smaller(x_at, rows, first, end, least, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """The root mean square of a head's band over that of all its channels."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    banded, _ = _channels(first, end, D, BLOCK_D)
    of_all = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for top in range(0, rows, ROWS):
        row = top + tl.arange(0, ROWS)[:, None]
        x = tl.load(x_at + row.to(tl.int64) * D + dim, mask=(row < rows) & (dim < D), other=0.0)
        of_all += x * x
    of_channel = tl.sum(of_all, 0, keep_dims=True)
    whole = tl.sqrt_rn(tl.sum(of_channel, 1) / (rows * D))
    part = tl.sqrt_rn(tl.sum(tl.where(banded, of_channel, 0.0), 1) / (rows * 2 * (end - first)))
    return _at_least(part / _at_least(whole, least), least)


@triton.jit
def _store_band(
    x_at, out_at, rows, first, end, divisor, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    dim = tl.arange(0, BLOCK_D)[None, :]
    banded, place = _channels(first, end, D, BLOCK_D)
    for top in range(0, rows, ROWS):
        row = top + tl.arange(0, ROWS)[:, None]
        there = (row < rows) & banded
        x = tl.load(x_at + row.to(tl.int64) * D + dim, mask=there, other=0.0)
        tl.store(out_at + row.to(tl.int64) * (2 * (end - first)) + place, x / divisor, mask=there)


@remembered
@triton.jit(do_not_specialize=["rows", "cols", "first", "end", "root_of_share", "temperature", "least"])
def _band_channels_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, rows, cols, group, first, end, root_of_share, temperature, least,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    head = (tl.program_id(1) * tl.num_programs(0) + h).to(tl.int64)
    k_head = (tl.program_id(1) * (tl.num_programs(0) // group) + h // group).to(tl.int64)
    q_at = q_ptr + head * rows * D
    k_at = k_ptr + k_head * cols * D
    if temperature is None:
        smaller = _smaller(q_at, rows, first, end, least, D, BLOCK_D, ROWS) * _smaller(
            k_at, cols, first, end, least, D, BLOCK_D, ROWS
        )
        divisor = (root_of_share * smaller)[:, None]
    else:
        divisor = tl.full([1, 1], 1.0, tl.float32) * temperature
    width = 2 * (end - first)
    _store_band(q_at, q_out_ptr + head * rows * width, rows, first, end, divisor, D, BLOCK_D, ROWS)
    if h % group == 0:
        one = tl.full([1, 1], 1.0, tl.float32)
        _store_band(k_at, k_out_ptr + k_head * cols * width, cols, first, end, one, D, BLOCK_D, ROWS)
