"""The Triton kernels of `gemm/products.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import asked, not_asked
from blocksparse.kernels.common.hardware import Hardware, fp32_products, hardware_of
from blocksparse.kernels.common.sizes import Heads, cdiv, power_of_2
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.masks.grid_triton import any_of, rows_at, strides
from blocksparse.launch.launches import remembered

_TILE = 64  # rows and columns of a launch tile


def block_products_triton(pooled_q: Tensor, pooled_k: Tensor, grid: BlockGrid, *, heads: Heads = None) -> Tensor:
    """Launch the kernel; arguments as in `block_products`."""
    skips = grid.causal and grid.k_first.shape[2] == 1
    positions = grid.q_last, grid.k_first, strides(grid.q_last), strides(grid.k_first)
    return _launch(pooled_q, pooled_k, positions, skips, heads)


def products_triton(q: Tensor, k: Tensor) -> Tensor:
    """Launch the kernel; arguments as in `products`, fp32."""
    return _launch(q, k, (None,) * 4, False)


def _launch(q: Tensor, k: Tensor, positions: tuple[Any, ...], skips: bool, heads: Heads = None) -> Tensor:
    (B, Hq, rows, D), (_, H, cols, _) = q.shape, k.shape
    q, k = q.contiguous(), k.contiguous()
    logits = torch.empty((B, Hq, rows, cols), dtype=torch.float32, device=q.device)
    _block_products_kernel[(cdiv(cols, _TILE) * cdiv(rows, _TILE), Hq, B)](
        *asked(heads), q, k, logits, *positions,
        rows, cols, D, Hq // H,
        SKIPS=skips,
        PRECISION=fp32_products(),
        TILE=_TILE, num_stages=2, **_options(hardware_of(q)),
    )  # fmt: skip
    return logits


def _options(hardware: Hardware) -> dict[str, int]:
    """Dims that are multiplied at a time, and warps; with more dims, products from registers spill."""
    if hardware.multiplies_from_shared:
        return {"DIMS": 64, "num_warps": 4}
    return {"DIMS": 16 if hardware.is_nvidia else 64, "num_warps": 8}


@remembered
@triton.jit(do_not_specialize=["rows"])
def _block_products_kernel(
    number_ptr, bound_ptr, bound_stride, q_ptr, k_ptr, logits_ptr, q_last_ptr, k_first_ptr, q_last_strides, k_first_strides,
    rows, cols, D, group,
    SKIPS: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride):
            return
    b, h = tl.program_id(2), tl.program_id(1)
    wide = tl.cdiv(cols, TILE)
    row = tl.program_id(0) // wide * TILE + tl.arange(0, TILE)[:, None]
    col = tl.program_id(0) % wide * TILE + tl.arange(0, TILE)[None, :]
    if SKIPS:
        last = tl.load(rows_at(q_last_ptr, q_last_strides, b, h, row), mask=row < rows, other=-1)
        at = rows_at(k_first_ptr, k_first_strides, b, h, tl.zeros([1, 1], tl.int32))
        first = tl.load(at + col * k_first_strides[3], mask=col < cols, other=2**31 - 1)
        seen = any_of(tl.min(first, 1, keep_dims=True) <= tl.max(last, 0, keep_dims=True))
    else:
        seen = rows > 0
    if seen:
        heads = tl.num_programs(1)
        q_at = q_ptr + ((b * heads + h).to(tl.int64) * rows + row) * D
        k_at = k_ptr + ((b * (heads // group) + h // group).to(tl.int64) * cols + col) * D
        sums = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, D, DIMS):
            dim = start + tl.arange(0, DIMS)
            q = tl.load(q_at + dim[None, :], mask=(row < rows) & (dim[None, :] < D), other=0.0)
            k = tl.load(k_at + dim[:, None], mask=(col < cols) & (dim[:, None] < D), other=0.0)
            sums = tl.dot(q, k, sums, input_precision=PRECISION)
        out_at = logits_ptr + ((b * heads + h).to(tl.int64) * rows + row) * cols + col
        tl.store(out_at, sums, mask=(row < rows) & (col < cols))


_ENTRIES = 2048  # per program


def run_sums_triton(x: Tensor, run: int) -> Tensor:
    """Launch the kernel; arguments as in `run_sums`."""
    (B, H, n), x, wide = x.shape, x.contiguous(), power_of_2(run)
    out = torch.empty((B, H, cdiv(n, run)), dtype=torch.float32, device=x.device)
    runs = max(_ENTRIES // wide, 1)
    _run_sums_kernel[(cdiv(out.shape[2], runs), B * H)](
        x, out, n, run, out.shape[2], RUNS=runs, WIDE=wide, num_warps=4
    )
    return out


@remembered
@triton.jit(do_not_specialize=["n", "runs"])
def _run_sums_kernel(x_ptr, out_ptr, n, run, runs, RUNS: tl.constexpr, WIDE: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * RUNS + tl.arange(0, RUNS)[:, None]
    each = tl.arange(0, WIDE)[None, :]
    entry = at * run + each
    x = tl.load(x_ptr + head * n + entry, mask=(each < run) & (entry < n), other=0.0)
    tl.store(out_ptr + head * runs + at, tl.sum(x, 1, keep_dims=True), mask=at < runs)
