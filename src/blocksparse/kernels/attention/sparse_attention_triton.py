"""The portable kernel of `sparse_attention`: for any GPU that Triton compiles for, and for its interpreter.

One program computes `BLOCK_M` queries of one head; the longest rows start first. Full blocks are visited before partial
ones.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blocksparse.kernels.common.device_functions import alike, capped, head_at, head_strides, log_sum, rows_of
from blocksparse.kernels.common.hardware import Hardware, fp32_products, hardware_of, has_descriptors
from blocksparse.kernels.common.sizes import copies_in_bulk, power_of_2
from blocksparse.kernels.common.tiles import TritonTiles
from blocksparse.kernels.masks.arguments import Approximation, Lists, LogitChange
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.kernels.quantize.tokens import FP8_LIMIT
from blocksparse.launch.launches import remembered

_FP8_LIMIT = tl.constexpr(FP8_LIMIT)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # the least fp32 number
_LARGEST = 1e38  # about the largest number of fp32: times infinity, a logit of 0 would be NaN


def sparse_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: Lists,
    positions: TokenPositions,
    tiles: TritonTiles,
    scale: float,
    approximation: Approximation,
    change: LogitChange,
) -> None:
    """Fills `out` and `lse`; the arguments are those of `sparse_attention`."""
    B, Hq, M, D = q.shape
    Hk, Dv = v.shape[1], v.shape[-1]
    # Matrix products sum over at least 16 numbers, or 32 bytes.
    block_d, block_dv = (max(32 if x.element_size() == 1 else 16, power_of_2(x.shape[-1])) for x in (k, v))
    k_source, v_source = k, v
    by_descriptor = tiles.tma and has_descriptors(k) and copies_in_bulk(k) and copies_in_bulk(v)
    if by_descriptor:
        k_source = TensorDescriptor.from_tensor(k, [1, 1, tiles.block_n, block_d])
        v_source = TensorDescriptor.from_tensor(v, [1, 1, tiles.block_n, block_dv])
    q_split, a = lists.q_block // tiles.block_m, approximation
    # Logits in base 2; those to be capped are first divided by the cap, and get base 2 with it.
    factor, cap = scale * math.log2(math.e), None
    if change.softcap is not None:
        factor, cap = min(scale / change.softcap, _LARGEST), change.softcap * math.log2(math.e)
    _kernel[(lists.full_count.shape[-1] * q_split, Hq, B)](
        q, k_source, v_source, out, lse,
        lists.full_count, lists.partial_count, lists.index, positions.q_position, positions.k_position,
        q.stride()[:3], k.stride()[:3], v.stride()[:3], out.stride()[:3], alike(*lse.stride()[:2]),
        alike(*head_strides(lists.full_count)), alike(*head_strides(lists.index)),
        head_strides(positions.q_position), head_strides(positions.k_position),
        a.pv_skip, a.q_scale, a.k_scale, a.k_copy, a.v_scale,
        *(None if x is None else alike(*head_strides(x)) for x in (a.q_scale, a.k_scale, a.k_copy, a.v_scale)),
        M, k.shape[2], lists.index.shape[-1],
        Hq // Hk, Hq // lists.full_count.shape[1], positions.q_lead, factor, positions.window, cap, change.sinks,
        D=D, DV=Dv,
        BLOCK_D=block_d, BLOCK_DV=block_dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        Q_SPLIT=q_split, K_SPLIT=lists.k_block // tiles.block_n,
        CAUSAL=positions.causal, TMA=by_descriptor, PRECISION=fp32_products(),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **most_registers(hardware_of(q), tiles.num_warps, block_dv * v.element_size()),
    )  # fmt: skip


def most_registers(hardware: Hardware, num_warps: int, value_bytes: int) -> dict[str, int]:
    """The option of a launch that says how many registers a thread may take; a value, padded, has `value_bytes`.

    Without the option, ptxas spills in some forms of the kernel, so that a multiprocessor can hold one program more. With
    the greatest number as the option, it does not spill, and takes few more registers in the other forms. The measurements
    on Hopper were made without the option.
    """
    if not hardware.is_nvidia or hardware.is_hopper:
        return {}
    if (value_bytes <= 128 and hardware.capability < (10, 0)) or (value_bytes <= 256 and num_warps > 4):
        return {}  # no form spills unasked
    return {"maxnreg": min(65536 // (32 * num_warps), 255)}


def runs_interpreted() -> bool:
    """Whether Triton's interpreter, not its compiler, runs the kernel (TRITON_INTERPRET at import time)."""
    return not isinstance(_kernel.jit, triton.JITFunction)


@triton.jit
def _block(
    source, strides, b, h, start, within, limit,
    D: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The keys or values `start + within`. `source` is a pointer, or with `TMA` a descriptor, which fills in zeros."""
    if TMA:
        tile = source.load([b, h, start, 0]).reshape(within.shape[0], BLOCK_D)
    else:
        tile = rows_of(source, strides, b, h, start + within, start + within < limit, D, BLOCK_D, not RAGGED)
    return tile


@triton.jit
def _factors(ptr, at, inside, RAGGED: tl.constexpr):
    """The scales of the tokens of a tile of keys, 0 for those outside; None if the kernel has no scales."""
    if ptr is None:
        factors = None
    elif RAGGED:
        factors = tl.load(ptr + at, mask=inside, other=0.0)
    else:
        factors = tl.load(ptr + at)
    return factors


@triton.jit
def _scores(q_tile, k_tile, q_factor, k_factor, factor, cap, PRECISION: tl.constexpr):
    """Logits in base 2. With scales the products are those of integers, and `q_factor` contains `factor`."""
    if k_factor is None:
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * factor
    else:
        scores = tl.dot(q_tile, tl.trans(k_tile)).to(tl.float32) * q_factor[:, None] * k_factor[None, :]
    if cap is not None:
        scores = capped(scores, cap)
    return scores


@triton.jit
def _add_values(
    accumulator, unit, rescale, weight, scores, values, v_factor, left_out, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rescale what is accumulated, and add the values by their weights; returns it, and the new `unit`.

    With scales, what is accumulated is in units of `unit / FP8_LIMIT`, where `unit` is the largest scale of a value that
    each query has met. So weights times scales, relative to `unit`, are at most 1, and use fp8's whole range.
    """
    if v_factor is None:
        accumulator = accumulator * rescale[:, None]
        accumulator = tl.dot(weight.to(values.dtype), values, accumulator, input_precision=PRECISION)
        new_unit = unit
    else:
        if MASKED:
            largest = tl.max(tl.where(scores > float("-inf"), v_factor[None, :], 0.0), 1)
        else:
            largest = tl.max(v_factor, 0)
        if left_out is not None:
            largest = tl.where(left_out, 0.0, largest)
        new_unit = tl.maximum(unit, largest)
        inverse = 1.0 / tl.where(new_unit == 0.0, 1.0, new_unit)
        share = v_factor[None, :] * inverse[:, None]
        if MASKED:
            # A masked key has no part in `unit`, so its share may be huge or infinite, and its weight is 0.
            share = tl.minimum(share, 1.0)
        weight = weight * share * _FP8_LIMIT
        # `unit * (1 / unit)` need not be 1: a query would learn from it whether another one of its tile left the keys out.
        rescale = rescale * tl.where(new_unit == unit, 1.0, unit * inverse)
        accumulator = accumulator * rescale[:, None]
        # Hopper adds fp8 products in about 14 bits. Products of one tile of keys are added so, and tiles in fp32.
        accumulator = tl.dot(weight.to(values.dtype), values, accumulator, max_num_imprecise_acc=values.shape[0])
    return accumulator, new_unit


@triton.jit
def _softmax_update(
    scores, values, v_factor, running_max, running_sum, unit, accumulator, skip_log2, live, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, in base 2. Masked scores are -inf, and all scores of a query may be masked."""
    best = tl.max(scores, 1)
    new_max = tl.maximum(running_max, best)
    weight_origin = new_max
    left_out = None
    needed = True
    if skip_log2 is not None:
        left_out = best - running_max < skip_log2  # in the first tile true only where all logits are -inf
        weight_origin = tl.where(left_out, float("inf"), new_max)
        kept = (live & ~left_out).to(tl.int32)
        needed = tl.max(tl.max(kept[None, :], 1), 0) > 0  # two axes: Triton 3.7 fails on sm_100 to reduce one
    weight = tl.exp2(scores - weight_origin[:, None])
    rescale = tl.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(weight, 1)
    if needed:  # else every query left the tile out, so no maximum rose and nothing is to be rescaled
        accumulator, unit = _add_values(
            accumulator, unit, rescale, weight, scores, values, v_factor, left_out, MASKED, PRECISION
        )
    return new_max, running_sum, unit, accumulator


@remembered
@triton.jit(do_not_specialize=["full_count_ptr", "partial_count_ptr", "M", "N", "cols", "q_lead", "window"])
def _kernel(
    q_ptr, k_source, v_source, out_ptr, lse_ptr,
    full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    count_strides, index_strides, q_position_strides, k_position_strides,
    pv_skip_ptr, q_scale_ptr, k_scale_ptr, k_copy_ptr, v_scale_ptr,  # what is None is compiled away, below too
    q_scale_strides, k_scale_strides, k_copy_strides, v_scale_strides,
    M, N, cols,
    heads_per_key, heads_per_mask, q_lead, factor, window, cap, sinks_ptr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, Q_SPLIT: tl.constexpr, K_SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows are the longest: start them first
    h = tl.program_id(1)
    b = tl.program_id(2)
    row = tile // Q_SPLIT
    h_key = h // heads_per_key
    h_mask = h // heads_per_mask

    dims_v = tl.arange(0, BLOCK_DV)
    places = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = places - q_lead
    within = tl.arange(0, BLOCK_N)
    stored = (queries >= 0) & (queries < M)
    q_tile = rows_of(q_ptr, q_strides, b, h, queries, stored, D, BLOCK_D, False)  # [BLOCK_M, BLOCK_D]

    h_copy = h_key
    if k_copy_ptr is not None:
        h_copy = h_key + tl.load(k_copy_ptr + head_at(k_copy_strides, b, h) + row) * (
            tl.num_programs(1) // heads_per_key
        )
    q_factor = None
    k_scale_at = 0
    if q_scale_ptr is not None:
        q_scale_at = head_at(q_scale_strides, b, h)
        q_factor = tl.load(q_scale_ptr + q_scale_at + queries, mask=stored, other=0.0) * factor
        k_scale_at = head_at(k_scale_strides, b, h_copy)
    v_scale_at = 0
    if v_scale_ptr is not None:
        v_scale_at = head_at(v_scale_strides, b, h_key)
    skip_log2 = None
    live = None
    if pv_skip_ptr is not None:
        skip_log2 = tl.load(pv_skip_ptr + h) * 1.4426950408889634  # log2(e)
        live = stored

    # Finite, so that tiles whose logits all are -inf, masked or beyond fp32, have weights of 0, not NaN.
    running_max = tl.full([BLOCK_M], _LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    unit = tl.zeros([BLOCK_M], tl.float32)  # the largest scale of a value met so far
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    count_at = head_at(count_strides, b, h_mask) + row
    index_at = head_at(index_strides, b, h_mask) + row.to(tl.int64) * cols

    full_count = tl.load(full_count_ptr + count_at)
    for i in range(full_count * K_SPLIT):
        block = tl.load(index_ptr + index_at + i // K_SPLIT).to(tl.int32)
        start = (block * K_SPLIT + i % K_SPLIT) * BLOCK_N
        k_tile = _block(k_source, k_strides, b, h_copy, start, within, N, D, BLOCK_D, False, TMA)
        k_factor = _factors(k_scale_ptr, k_scale_at + start + within, within >= 0, False)
        scores = _scores(q_tile, k_tile, q_factor, k_factor, factor, cap, PRECISION)
        v_tile = _block(v_source, v_strides, b, h_key, start, within, N, DV, BLOCK_DV, False, TMA)
        v_factor = _factors(v_scale_ptr, v_scale_at + start + within, within >= 0, False)
        running_max, running_sum, unit, accumulator = _softmax_update(
            scores, v_tile, v_factor, running_max, running_sum, unit, accumulator, skip_log2, live, False, PRECISION
        )  # fmt: skip

    q_at = tl.load(
        q_position_ptr + b.to(tl.int64) * q_position_strides[0] + h.to(tl.int64) * q_position_strides[1] + places
    )
    k_position_at = b.to(tl.int64) * k_position_strides[0] + h_key.to(tl.int64) * k_position_strides[1]
    index_at += full_count
    for i in range(tl.load(partial_count_ptr + count_at) * K_SPLIT):
        block = tl.load(index_ptr + index_at + i // K_SPLIT).to(tl.int32)
        start = (block * K_SPLIT + i % K_SPLIT) * BLOCK_N
        k_tile = _block(k_source, k_strides, b, h_copy, start, within, N, D, BLOCK_D, True, TMA)
        k_at = tl.load(k_position_ptr + k_position_at + start + within)
        inside = start + within < N
        k_factor = _factors(k_scale_ptr, k_scale_at + start + within, inside, True)
        scores = _scores(q_tile, k_tile, q_factor, k_factor, factor, cap, PRECISION)
        allowed = (k_at >= 0)[None, :]
        if CAUSAL:
            allowed = allowed & (k_at[None, :] <= q_at[:, None])
        if window is not None:
            allowed = allowed & (k_at[None, :] > q_at[:, None] - window)
        scores = tl.where(allowed, scores, float("-inf"))
        v_tile = _block(v_source, v_strides, b, h_key, start, within, N, DV, BLOCK_DV, True, TMA)
        v_factor = _factors(v_scale_ptr, v_scale_at + start + within, inside, True)
        # Partial blocks hold a query's own neighbours, or the last ones in its window: none is left out, no `skip_log2`.
        running_max, running_sum, unit, accumulator = _softmax_update(
            scores, v_tile, v_factor, running_max, running_sum, unit, accumulator, None, live, True, PRECISION
        )

    # A row without keys is 0, even if a value is not finite: 0 times infinity is not 0.
    accumulator = tl.where((running_sum == 0.0)[:, None], 0.0, accumulator)
    if sinks_ptr is not None:  # one more logit, which has no value
        sink = tl.load(sinks_ptr + h) * 1.4426950408889634  # log2(e)
        new_max = tl.maximum(running_max, sink)
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.exp2(sink - new_max)
        accumulator = accumulator * rescale[:, None]
        running_max = new_max

    empty = running_sum == 0.0
    result = accumulator / tl.where(empty, 1.0, running_sum)[:, None]
    if v_scale_ptr is not None:
        result = result * (unit / _FP8_LIMIT)[:, None]
    out_at = out_ptr + b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
    out_at = out_at + queries.to(tl.int64)[:, None] * out_strides[2] + dims_v[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=stored[:, None] & (dims_v < DV)[None, :])
    lse_at = lse_ptr + head_at(lse_strides, b, h) + queries
    tl.store(lse_at, log_sum(running_max, running_sum), mask=stored)
