"""The Triton kernel of `mean_and_products`: fp16, bf16 and fp32; one program per segment, which loads ahead of its sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.launch.launches import remembered

TILE = 4096  # entries of queries that a program holds at a time


def mean_and_products_triton(q: Tensor, guide: Tensor, S: int, lead: int = 0) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as of `mean_and_products`."""
    B, H, M, D = q.shape
    q, guide = q if q.stride(-1) == 1 else q.contiguous(), guide.float().contiguous()
    segments = cdiv(lead + M, S)
    mean = torch.empty((B, H, segments, D), dtype=torch.float32, device=q.device)
    products = torch.empty((B, H, M), dtype=torch.float32, device=q.device)
    block_d = power_of_2(D)
    _kernel[(segments, H, B)](
        q, guide, mean, products, q.stride()[:3], M, segments, lead, H // guide.shape[1],
        D=D, BLOCK_D=block_d, S=S, ROWS=rows_of(S, block_d), num_warps=4,
    )  # fmt: skip
    return mean, products


def rows_of(S: int, block_d: int) -> int:
    """How many queries a program holds at a time."""
    return max(1, min(power_of_2(S), TILE // block_d))


@triton.jit
def _some_queries(
    q_at, q_stride, start, first, M,
    D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The queries from place `first` of a segment on, `[ROWS, BLOCK_D]`; zeros where there are none."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    place = first + tl.arange(0, ROWS)
    row = start + place
    there = (place < S) & (row >= 0) & (row < M)
    if BLOCK_D == D:
        inside = there[:, None]
    else:
        inside = there[:, None] & (dims < D)
    return tl.load(q_at + row.to(tl.int64)[:, None] * q_stride + dims, mask=inside, other=0.0)


@remembered
@triton.jit(do_not_specialize=["M", "segments", "lead"])
def _kernel(
    q_ptr, guide_ptr, mean_ptr, products_ptr, q_strides, M, segments, lead, heads_per_guide,
    D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    segment, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = b.to(tl.int64) * tl.num_programs(1) + h
    dims = tl.arange(0, BLOCK_D)[None, :]
    guide_at = guide_ptr + (b * (tl.num_programs(1) // heads_per_guide) + h // heads_per_guide) * D
    guide = tl.load(guide_at + dims, mask=dims < D, other=0.0)
    q_at = q_ptr + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    products_at = products_ptr + bh * M
    start = segment * S - lead
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    upcoming = _some_queries(q_at, q_strides[2], start, 0, M, D, BLOCK_D, S, ROWS)
    for first in range(0, S, ROWS):
        q = upcoming.to(tl.float32)
        upcoming = _some_queries(q_at, q_strides[2], start, first + ROWS, M, D, BLOCK_D, S, ROWS)
        sums += q
        place = first + tl.arange(0, ROWS)
        row = start + place
        tl.store(products_at + row, tl.sum(q * guide, 1), mask=(place < S) & (row >= 0) & (row < M))
    queries = tl.minimum(start + S, M) - tl.maximum(start, 0)
    mean = tl.sum(sums, 0)[None, :] / queries
    tl.store(mean_ptr + (bh * segments + segment) * D + dims, mean, mask=dims < D)
