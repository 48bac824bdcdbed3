"""The Triton kernels of `order/coarse_order.py`.

Keys that are kept are ordered by a counting sort, a chunk of a row's kept keys by each program. The first kernel counts how
many keys of each step its chunk has. From the counts of all chunks, the second knows where its keys of each step begin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import rows_of
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.order.coarse_order import STEPS
from blocksparse.kernels.order.coarse_steps_triton import (
    ROWS_AT_ONCE,
    SAMPLE,
    TILE,
    choose,
    coarse_steps,
    row_of_maps,
)
from blocksparse.launch.launches import remembered

BYTES_AT_ONCE = 3 << 27  # of workspace: steps, kept keys, and counts of steps
CHUNK, CHUNKS = 1024, 16  # kept keys per program, or more, so that a row has at most this many programs
WIDE, NARROW = 1024, 32  # kept keys at a time: to count them, and to order them, one for each bit of an int32
PIECE = 4  # chunks whose counts are read at a time


def coarse_order_triton(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """Launch the kernels; arguments as in `coarse_order`."""
    B, H, G, count = out.shape
    if count == 0:
        return
    mean, k = mean.to(k.dtype), k if k.stride(-1) == 1 else k.contiguous()
    chunk = CHUNK * cdiv(count, CHUNK * CHUNKS)
    row_bytes = max(0, until + G * S) + 4 * count + 4 * STEPS * cdiv(count, chunk)
    at_once = max(1, BYTES_AT_ONCE // (B * H * row_bytes))
    whole = max(1, ROWS_AT_ONCE * k.shape[1] // H)  # segments whose rows fill a tile of rows
    at_once = at_once // whole * whole or at_once
    for g in range(0, G, at_once):
        some = slice(g, min(g + at_once, G))
        _some_segments(mean[:, :, some], k, until + g * S, S, chunk, out[:, :, some])


def _some_segments(mean: Tensor, k: Tensor, until: int, S: int, chunk: int, out: Tensor) -> None:
    """Fill `out` for as many segments as the workspace holds."""
    B, H, G, count = out.shape
    steps = coarse_steps(mean, k, until, S)  # [B, H, G, width]
    kept = torch.empty(out.shape, dtype=torch.int32, device=out.device)
    choose[(B * H * G,)](
        steps.view(torch.int32), kept, until, S, H, G, steps.shape[-1], count,
        TILE=TILE, SAMPLE=SAMPLE, num_warps=8,
    )  # fmt: skip
    chunks = cdiv(count, chunk)
    numbers = torch.empty((B, H, G, chunks, STEPS), dtype=torch.int32, device=out.device)
    grid = (B * H * G, chunks)
    _count[grid](kept, numbers, until, S, H, G, count, chunk, STEPS=STEPS, WIDE=WIDE, num_warps=1)
    _order[grid](
        kept, numbers, out, out.stride(), until, S, H, G, count, chunk,
        STEPS=STEPS, NARROW=NARROW, PIECE=PIECE, num_warps=1,
    )  # fmt: skip


@remembered
@triton.jit(do_not_specialize=["until", "G"])
def _count(kept_ptr, numbers_ptr, until, S, H, G, count, chunk, STEPS: tl.constexpr, WIDE: tl.constexpr):
    """Stores how many kept keys of this chunk have each step."""
    b, h, g, start, want = row_of_maps(H, G, until, S, count)
    row = (b * H + h).to(tl.int64) * G + g
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, want)
    wide = tl.arange(0, WIDE)
    number = tl.zeros([STEPS], tl.int32)
    for at in range(begin, end, WIDE):
        there = wide < end - at
        kept = tl.load(kept_ptr + row * count + at + wide, mask=there, other=0)
        number += tl.histogram((kept >> 24) & 255, STEPS, mask=there)
    numbers_at = numbers_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * STEPS
    tl.store(numbers_at + tl.arange(0, STEPS), number)


@triton.jit
def _number_of_ones(x):
    """How many bits of the int32 `x` are 1: counted in fields of 2, then 4, then 8 bits, which a product adds up."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 255


@remembered
@triton.jit(do_not_specialize=["until", "G"])
def _order(
    kept_ptr, numbers_ptr, out_ptr, out_strides, until, S, H, G, count, chunk,
    STEPS: tl.constexpr, NARROW: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Stores the positions of this chunk's kept keys by rising step, equal steps in the order in which they come."""
    b, h, g, start, want = row_of_maps(H, G, until, S, count)
    row = (b * H + h).to(tl.int64) * G + g
    out_at = out_ptr + b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
    out_at = out_at + g.to(tl.int64) * out_strides[2]
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, want)
    narrow = tl.arange(0, NARROW)

    if begin < end:
        numbers_at = numbers_ptr + row * tl.num_programs(1) * STEPS + tl.arange(0, STEPS)[None, :]
        number = tl.zeros([STEPS], tl.int32)
        following = tl.zeros([STEPS], tl.int32)  # the slot that the next key of each step goes to
        for at in range(0, tl.cdiv(want, chunk), PIECE):
            other = at + tl.arange(0, PIECE)[:, None]
            some = tl.load(numbers_at + other * STEPS, mask=other < tl.cdiv(want, chunk), other=0)
            number += tl.sum(some, 0)
            following += tl.sum(tl.where(other < tl.program_id(1), some, 0), 0)
        following += tl.cumsum(number, 0) - number
        bit = 1 << narrow
        kept_at = kept_ptr + row * count + narrow
        kept = tl.load(kept_at + begin, mask=narrow < end - begin, other=0)
        for at in range(begin, end, NARROW):
            there = narrow < end - at
            upcoming = tl.load(kept_at + at + NARROW, mask=narrow < end - at - NARROW, other=0)
            step = (kept >> 24) & 255
            # For each of the 32 keys, the bits of all that have the same step; those below its own bit come before it. The
            # sum is over rows, for a thread holds whole columns.
            same = tl.sum(tl.where(step[:, None] == step[None, :], bit[:, None], 0), 0)
            slot = tl.gather(following, step, 0) + _number_of_ones(same & (bit - 1))
            tl.store(out_at + slot, kept & 0xFFFFFF, mask=there)
            following += tl.histogram(step, STEPS, mask=there)
            kept = upcoming
    for at in range(tl.maximum(begin, want), tl.minimum(begin + chunk, count), NARROW):
        tl.store(out_at + at + narrow, narrow * 0 - 1, mask=narrow < tl.minimum(begin + chunk, count) - at)


_MEAN_TILE = 4096  # entries of queries that a program holds at a time


def mean_and_products_triton(q: Tensor, guide: Tensor, S: int, lead: int = 0) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as in `mean_and_products`."""
    B, H, M, D = q.shape
    q, guide = q if q.stride(-1) == 1 else q.contiguous(), guide.float().contiguous()
    segments = cdiv(lead + M, S)
    mean = torch.empty((B, H, segments, D), dtype=torch.float32, device=q.device)
    products = torch.empty((B, H, M), dtype=torch.float32, device=q.device)
    block_d = power_of_2(D)
    _mean_and_products_kernel[(segments, H, B)](
        q, guide, mean, products, q.stride()[:3], M, segments, lead, H // guide.shape[1],
        D=D, BLOCK_D=block_d, S=S, ROWS=max(1, min(power_of_2(S), _MEAN_TILE // block_d)), num_warps=4,
    )  # fmt: skip
    return mean, products


@triton.jit
def _places(start, first, M, S: tl.constexpr, ROWS: tl.constexpr):
    """Queries from place `first` of a segment on, and which of them there are."""
    place = first + tl.arange(0, ROWS)
    row = start + place
    return row, (place < S) & (row >= 0) & (row < M)


@remembered
@triton.jit(do_not_specialize=["M", "segments", "lead"])
def _mean_and_products_kernel(
    q_ptr, guide_ptr, mean_ptr, products_ptr, q_strides, M, segments, lead, heads_per_guide,
    D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    segment, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = b.to(tl.int64) * tl.num_programs(1) + h
    dims = tl.arange(0, BLOCK_D)[None, :]
    guide_at = guide_ptr + (b * (tl.num_programs(1) // heads_per_guide) + h // heads_per_guide) * D
    guide = tl.load(guide_at + dims, mask=dims < D, other=0.0)
    products_at = products_ptr + bh * M
    start = segment * S - lead
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row, there = _places(start, 0, M, S, ROWS)
    upcoming = rows_of(q_ptr, q_strides, b, h, row, there, D, BLOCK_D, False)
    for first in range(0, S, ROWS):
        q = upcoming.to(tl.float32)
        row, there = _places(start, first + ROWS, M, S, ROWS)
        upcoming = rows_of(q_ptr, q_strides, b, h, row, there, D, BLOCK_D, False)
        sums += q
        row, there = _places(start, first, M, S, ROWS)
        tl.store(products_at + row, tl.sum(q * guide, 1), mask=there)
    queries = tl.minimum(start + S, M) - tl.maximum(start, 0)
    mean = tl.sum(sums, 0)[None, :] / queries
    tl.store(mean_ptr + (bh * segments + segment) * D + dims, mean, mask=dims < D)
