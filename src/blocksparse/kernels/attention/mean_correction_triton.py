"""The Triton kernels of `add_mean_correction`: means of keys and values, which columns a row takes, and attention to them.

A program of the last computes `BLOCK_M` queries of one row of blocks. So what they take is told by one bit per column,
which is the same in whatever thread it is asked for, and costs no exchange between threads.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, capped, head_at, log_sum, rows_of, step
from blocksparse.kernels.common.hardware import fp32_products
from blocksparse.kernels.common.sizes import cdiv, empty_together, power_of_2
from blocksparse.kernels.common.tiles import TritonTiles
from blocksparse.kernels.masks.arguments import KeptBlocks
from blocksparse.kernels.masks.grid_triton import positions, rows_at, strides
from blocksparse.launch.launches import remembered

_TILE = 4096  # entries of keys, and of values, that a program that pools holds at a time
_WORD = 64  # columns of which one number has the bits; means are filled up to a multiple with zeros, to load whole tiles
_LARGEST = 1e38  # about the largest number of fp32: times infinity, a logit of 0 would be NaN


def add_mean_correction_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: KeptBlocks,
    *,
    scale: float,
    softcap: float | None = None,
    tiles: TritonTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels; arguments as in `add_mean_correction`.

    `tiles.block_m` divides `kept.grid.q_block`, and `tiles.block_n` 64.
    """
    assert tiles is not None  # or plain torch would run
    keep, grid, q_index, key_slots, k_block = kept.keep, kept.grid, kept.q_index, kept.key_slots, kept.grid.k_block
    q, k, v, out, lse = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, out, lse))
    (B, Hq, M, D), (N, Dv) = q.shape, v.shape[2:]
    H, cols = k.shape[1] if key_slots is None else key_slots.shape[1], cdiv(N, k_block)
    block_d, block_dv = (max(power_of_2(x), 16) for x in (D, Dv))
    filled = cdiv(cols, _WORD) * _WORD
    keys, values = (q.new_empty((B, H, filled, x)) for x in (block_d, block_dv))
    rows = keep.shape[2]
    bad = torch.empty((B, H, filled), dtype=torch.uint8, device=q.device)
    taken = torch.empty((B, Hq, rows, filled // _WORD), dtype=torch.int64, device=q.device)
    ends, spoilt = empty_together(torch.int32, q.device, (B, Hq, rows), (B, Hq, rows))
    result, sums = torch.empty_like(out), torch.empty_like(lse, dtype=torch.float32)
    # Logits in base 2; those to be capped are first divided by the cap, and get base 2 with it.
    factor, cap = scale * math.log2(math.e), None
    if softcap is not None:
        factor, cap = min(scale / softcap, _LARGEST), softcap * math.log2(math.e)
    at, of_positions = positions(grid)
    _pool[(filled, H, B)](
        k, v, key_slots, keys, values, bad,
        k.stride()[:3], v.stride()[:3], None if key_slots is None else alike(*key_slots.stride()[:2]),
        N, cols, H // k.shape[1],
        D=D, DV=Dv, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK=k_block,
        ROWS=max(min(power_of_2(k_block), _TILE // max(block_d, block_dv)), 1), num_warps=4,
    )  # fmt: skip
    _take[(rows, Hq, B)](
        keep, at, bad, taken, ends, spoilt, strides(keep), of_positions,
        rows, cols, filled, Hq // H, *(Hq // x.shape[1] for x in (keep, at[0], at[2])),
        WORDS=16, WORD=_WORD, CAUSAL=grid.causal, WINDOW=grid.window, num_warps=4,
    )  # fmt: skip
    _add[(cdiv(kept.grid.q_lead + M, tiles.block_m), Hq, B)](
        q, keys, values, out, lse, result, sums, q_index, taken, ends, spoilt,
        q.stride()[:3], out.stride()[:3], result.stride()[:3], alike(*lse.stride()[:2]),
        alike(*sums.stride()[:2]), None if q_index is None else alike(*q_index.stride()[:2]),
        M, rows, cols, filled, Hq // H, kept.grid.q_lead, factor, cap,
        math.log2(k_block), math.log2(N - (cols - 1) * k_block) - math.log2(k_block),
        D=D, DV=Dv, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        SPLIT=kept.grid.q_block // tiles.block_m, WORD=_WORD, PRECISION=fp32_products(),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return result, sums


@remembered
@triton.jit(do_not_specialize=["N", "cols"])
def _pool(
    k_ptr, v_ptr, slots_ptr, keys_ptr, values_ptr, bad_ptr, k_strides, v_strides, slots_strides,
    N, cols, heads_per_source,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The mean key and the mean value of a block, and whether either is not finite: then both are zeros."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source_h = h // heads_per_source
    keys = tl.zeros([ROWS, BLOCK_D], tl.float32)
    values = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for first in range(0, BLOCK, ROWS):
        place = first + tl.arange(0, ROWS)
        slot = block * BLOCK + place
        there = (place < BLOCK) & (slot < N)
        token = slot
        if slots_ptr is not None:
            token = tl.load(slots_ptr + head_at(slots_strides, b, h) + slot, mask=there, other=0)
        keys += rows_of(k_ptr, k_strides, b, source_h, token, there, D, BLOCK_D, False).to(tl.float32)
        values += rows_of(v_ptr, v_strides, b, source_h, token, there, DV, BLOCK_DV, False).to(tl.float32)
    tokens = tl.maximum(tl.minimum(N - block * BLOCK, BLOCK), 1)
    key = tl.sum(keys, 0)[None, :] / tokens
    value = tl.sum(values, 0)[None, :] / tokens
    # Of NaN no comparison is true.
    finite = tl.min((tl.abs(key) < float("inf")).to(tl.int32), 1) * tl.min(
        (tl.abs(value) < float("inf")).to(tl.int32), 1
    )
    finite = finite > 0
    key = tl.where(finite[:, None], key, 0.0)
    value = tl.where(finite[:, None], value, 0.0)
    at = (b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + block
    tl.store(keys_ptr + at * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], key.to(keys_ptr.dtype.element_ty))
    tl.store(values_ptr + at * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :], value.to(values_ptr.dtype.element_ty))
    tl.store(bad_ptr + at + tl.arange(0, 1), tl.where(finite, 0, 1).to(tl.uint8))


@remembered
@triton.jit(do_not_specialize=["rows", "cols", "filled"])
def _take(
    keep_ptr, at, bad_ptr, taken_ptr, ends_ptr, spoilt_ptr, keep_strides, of_positions,
    rows, cols, filled, heads_per_key, heads_per_mask, heads_per_row, heads_per_block,
    WORDS: tl.constexpr, WORD: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """As bits, the columns that a row takes by their means; after which there is none; whether one is not finite."""
    row, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keep_at = rows_at(keep_ptr, keep_strides, b, h // heads_per_mask, row)
    q_first, q_last = 0, 0
    if CAUSAL:
        q_first = tl.load(rows_at(at[0], of_positions[0], b, h // heads_per_row, row))
    if WINDOW is not None:
        q_last = tl.load(rows_at(at[1], of_positions[1], b, h // heads_per_row, row))
    k_first_at = rows_at(at[2], of_positions[2], b, h // heads_per_block, row)
    k_last_at = rows_at(at[3], of_positions[3], b, h // heads_per_block, row)
    bad_at = bad_ptr + (b.to(tl.int64) * (tl.num_programs(1) // heads_per_key) + h // heads_per_key) * filled
    of_row = (b.to(tl.int64) * tl.num_programs(1) + h) * rows + row
    word, place = tl.arange(0, WORDS), tl.arange(0, WORD)[None, :]
    end = tl.zeros([WORDS], tl.int32)
    spoilt = tl.zeros([WORDS], tl.int32)
    for first in range(0, cols, WORDS * WORD):
        col = first + word[:, None] * WORD + place
        inside = col < cols
        taken = tl.load(keep_at + col * keep_strides[3], mask=inside, other=1) == 0
        if CAUSAL:
            k_last = tl.load(k_last_at + col * of_positions[3][3], mask=inside, other=0)
            taken = taken & (k_last <= q_first)
        if WINDOW is not None:
            k_first = tl.load(k_first_at + col * of_positions[2][3], mask=inside, other=0)
            taken = taken & (k_first > q_last - WINDOW)
        bad = tl.load(bad_at + col, mask=taken, other=0)
        end = tl.maximum(end, tl.max(tl.where(taken, col + 1, 0), 1))
        spoilt = tl.maximum(spoilt, tl.max(bad.to(tl.int32), 1))
        bits = tl.sum(taken.to(tl.int64) << place, 1)
        tl.store(
            taken_ptr + of_row * (filled // WORD) + first // WORD + word, bits, mask=first + word * WORD < cols
        )
    tl.store(ends_ptr + of_row, tl.max(end, 0))
    tl.store(spoilt_ptr + of_row, tl.max(spoilt, 0))


@remembered
@triton.jit(do_not_specialize=["M", "rows", "cols", "filled", "q_lead", "last_log2"])
def _add(
    q_ptr, keys_ptr, values_ptr, out_ptr, lse_ptr, result_ptr, sums_ptr, q_index_ptr, taken_ptr, ends_ptr, spoilt_ptr,
    q_strides, out_strides, result_strides, lse_strides, sums_strides, q_index_strides,
    M, rows, cols, filled, heads_per_key, q_lead, factor, cap, size_log2, last_log2,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WORD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries to the means that its row takes, joined to what there is."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows are the longest: start them first
    h, b = tl.program_id(1), tl.program_id(2)
    of_row = (b.to(tl.int64) * tl.num_programs(1) + h) * rows + tile // SPLIT
    end, spoilt = tl.load(ends_ptr + of_row), tl.load(spoilt_ptr + of_row) > 0
    taken_at = taken_ptr + of_row * (filled // WORD)

    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M) - q_lead
    stored = (queries >= 0) & (queries < M)
    if q_index_ptr is not None:
        queries = tl.load(q_index_ptr + head_at(q_index_strides, b, h) + queries, mask=stored, other=0)
    q_tile = rows_of(q_ptr, q_strides, b, h, queries, stored, D, BLOCK_D, False)  # [BLOCK_M, BLOCK_D]

    key_at = (b.to(tl.int64) * (tl.num_programs(1) // heads_per_key) + h // heads_per_key) * filled
    within = tl.arange(0, BLOCK_N)
    keys_at = keys_ptr + (key_at + within[:, None]) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    values_at = values_ptr + (key_at + within[:, None]) * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first in range(0, end, BLOCK_N):
        word = tl.load(taken_at + first // WORD) >> (first % WORD)
        scores = tl.dot(q_tile, tl.trans(tl.load(keys_at + first * BLOCK_D)), input_precision=PRECISION) * factor
        if cap is not None:
            scores = capped(scores, cap)
        taken = ((word >> within) & 1) != 0
        scores += tl.where(first + within == cols - 1, last_log2, 0.0)[None, :]  # a short block counts less
        scores = tl.where(taken[None, :], scores, float("-inf"))
        highest, weight, rescale = step(scores, highest, True)
        total = total * rescale + tl.sum(weight, 1)
        values = tl.load(values_at + first * BLOCK_DV)
        accumulator = tl.dot(
            weight.to(values.dtype), values, accumulator * rescale[:, None], input_precision=PRECISION
        )

    dims = tl.arange(0, BLOCK_DV)[None, :]
    exact = rows_of(out_ptr, out_strides, b, h, queries, stored, DV, BLOCK_DV, False)
    lse = tl.load(lse_ptr + head_at(lse_strides, b, h) + queries, mask=stored, other=0.0)
    # Shares of the two parts, by weights relative to the greater one.
    none = total == 0.0
    of_exact = lse * 1.4426950408889634  # log2(e)
    of_rest = tl.where(none, float("-inf"), highest + tl.log2(tl.where(none, 1.0, total)) + size_log2)
    origin = tl.maximum(of_exact, of_rest)
    origin = tl.where(origin == float("-inf"), 0.0, origin)
    exact_weight, rest_weight = tl.exp2(of_exact - origin), tl.exp2(of_rest - origin)
    whole = exact_weight + rest_weight
    share = rest_weight / (whole * tl.where(none, 1.0, total))
    joined = exact.to(tl.float32) * (exact_weight / whole)[:, None] + accumulator * share[:, None]
    joined_lse = log_sum(origin, whole)
    if spoilt:
        joined = joined * float("nan")
        joined_lse = joined_lse * float("nan")
    # Where a query sees no means, not a bit of its output changes.
    joined = tl.where(none[:, None], exact, joined.to(exact.dtype))
    joined_lse = tl.where(none, lse, joined_lse)
    result_at = result_ptr + b.to(tl.int64) * result_strides[0] + h.to(tl.int64) * result_strides[1]
    result_at = result_at + queries.to(tl.int64)[:, None] * result_strides[2] + dims
    tl.store(result_at, joined, mask=stored[:, None] & (dims < DV))
    tl.store(sums_ptr + head_at(sums_strides, b, h) + queries, joined_lse, mask=stored)
