"""The Triton kernel of `band_channels`: a program takes a query head, and the keys of its KV head."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.moving.band_channels import LEAST_RMS
from blocksparse.launch.launches import remembered

_TILE = 4096  # entries that a program holds at a time


def band_channels_triton(
    queries: Tensor, keys: Tensor, first: int, end: int, temperature: float | None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as of `band_channels`."""
    queries, keys = queries.contiguous(), keys.contiguous()
    (B, Hq, rows, D), (_, H, cols, _), width = queries.shape, keys.shape, 2 * (end - first)
    mine = torch.empty((B, Hq, rows, width), dtype=torch.float32, device=queries.device)
    its = torch.empty((B, H, cols, width), dtype=torch.float32, device=queries.device)
    block_d = power_of_2(D)
    _kernel[(Hq, B)](
        queries, keys, mine, its, rows, cols, Hq // H, first, end, math.sqrt(width / D), temperature, LEAST_RMS,
        D=D, BLOCK_D=block_d, ROWS=max(_TILE // block_d, 1), num_warps=8,
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
def _kernel(
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
