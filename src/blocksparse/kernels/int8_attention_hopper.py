"""Attention over block lists on Hopper from int8 queries and keys, and values of 16 bits or fp8.

The loaders and the queue are those of `sparse_attention_hopper.py`. A consumer differs in three ways. Scales come in
between scores and softmax: one factor for each query and for each of the four threads that share a row of
scores, so that rescaling costs what `scale` alone would; masked tiles have a factor for each key. fp8 weights are
the registers of the scores, read again in an order in which values are stored. And fp8 products, which the tensor
cores add in some 14 bits, are added to each other in fp32 after every tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blocksparse.kernels.hopper_loaders import PANEL, load_keys, load_values, padded, panels, turned
from blocksparse.kernels.hopper_queue import (
    LOADER_REGISTERS,
    Constants,
    consumer_registers,
    extent,
    make_barriers,
    read,
    registers,
    unpacked_place,
)
from blocksparse.kernels.hopper_rows import LOWEST, masked_scores, partial_sum, query_positions, row_max
from blocksparse.kernels.sparse_attention_triton import batch_head_strides

_LOG2_E = gl.constexpr(math.log2(math.e))


def int8_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    full_count: Tensor,
    partial_count: Tensor,
    index: Tensor,
    q_position: Tensor,
    k_position: Tensor,
    q_scale: Tensor,
    k_tile_scale: Tensor,
    k_token_scale: Tensor,
    v_tile_log2: Tensor | None,
    v_token_log2: Tensor | None,
    taken: Tensor | None,
    pv_skip: Tensor | None,
    q_block: int,
    k_block: int,
    q_lead: int,
    causal: bool,
    scale: float,
    consumers: int,
    block_n: int,
    num_stages: int,
    per_sm: int,
    q_in_order: bool,
    k_in_order: bool,
) -> None:
    """Fills `out` and `lse`; the arguments are those of `int8_attention` and of `HopperTiles`."""
    if scale <= 0:  # the maximum is taken before the scale comes in
        q, scale = (torch.zeros_like(q), 1.0) if scale == 0 else (-q, -scale)
    filled = out, lse
    if q_lead:  # the copy engine takes no negative row
        q = pad(q, (0, 0, q_lead, 0))
        q_scale, taken = (x if x is None else pad(x, (q_lead, 0)) for x in (q_scale, taken))
        out, lse = (x.new_empty((*q.shape[:3], *x.shape[3:])) for x in filled)
    B, Hq, M, D = q.shape
    Hk, N, Dv = k.shape[1] // 2, k.shape[2], out.shape[-1]
    fp8 = v_tile_log2 is not None
    block_m = 64 * consumers
    rows = full_count.shape[-1] * (q_block // block_m)
    tiles = B * Hq * rows
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count * per_sm
    queue = torch.zeros(1, dtype=torch.int32, device=q.device)
    factors = (q_scale, k_tile_scale, k_token_scale, v_tile_log2, v_token_log2, taken, pv_skip)
    _kernel[(min(programs, tiles),)](
        panels(q, 64), panels(k, block_n), turned(v, block_n) if fp8 else panels(v, block_n), panels(out, 64), lse,
        full_count, partial_count, index, q_position, k_position, queue,
        *(lse if x is None else x for x in factors),
        batch_head_strides(full_count), batch_head_strides(index),
        batch_head_strides(q_position), batch_head_strides(k_position), lse.stride()[:2],
        tiles, M, N, index.shape[-1], rows, Hk, Hq // Hk, Hq // full_count.shape[1],
        N - M if causal else 0, scale * math.log2(math.e),
        DQ=padded(D), DV=padded(Dv), CONSUMERS=consumers, BLOCK_N=block_n, STAGES=num_stages,
        K_SPLIT=k_block // block_n, Q_SPLIT=q_block // block_m,
        CAUSAL=causal, Q_IN_ORDER=q_in_order, K_IN_ORDER=k_in_order,
        FP8=fp8, TAKEN=taken is not None, SKIP=pv_skip is not None,
        CONSUMER_REGISTERS=consumer_registers(consumers, per_sm),
        num_warps=4, maxnreg=registers(consumers, per_sm),
    )  # fmt: skip
    if q_lead:
        for x, longer in zip(filled, (out, lse), strict=True):
            x.copy_(longer[:, :, q_lead:])


@gluon.jit
def _operand(weight, WEIGHT: gl.constexpr, C, HALF: gl.constexpr):
    """Weights as the first operand of the product with values.

    fp8: the registers of the scores are read again as those of the operand, which stand for keys in another order; the
    values are stored in that order, so nothing moves.
    """
    if C.PV8:
        x = weight.reshape([64, C.BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, C.BLOCK_N])
        x = gl.convert_layout(x, WEIGHT, assert_trivial=True)
        # Four at a time: the language's own conversion takes them apart again.
        y = gl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f", [x], gl.float8e4nv, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        y = gl.convert_layout(weight.to(HALF), WEIGHT)
    return y


@gluon.jit
def _scales_of(factors, tile, C, LAYOUT: gl.constexpr):
    """Of a tile, `[4]`, one for each thread that shares a row: the factor of its keys, and log2 of that of its values."""
    at = tile * 4 + gl.arange(0, 4, layout=LAYOUT)
    keys = gl.load(factors[1] + at)
    logs = keys
    if C.PV8:
        logs = gl.load(factors[3] + at)
    return keys, logs


@gluon.jit
def _whole_tile(scores, highest, met, q_factor, pv_skip, keys, logs, C, SKIP: gl.constexpr, BASE: gl.constexpr):
    """The softmax over a tile that every query sees whole: new maxima, weights, and their sums as far as a thread holds them.

    `[64, BLOCK_N]` is `[64, BLOCK_N / 8, 4, 2]` here; the third axis runs over the threads that share a row. Where values
    have scales the maximum is that of logits plus the scale's logarithm, for weights carry the scale.
    """
    SCORES: gl.constexpr = scores.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    scores = scores.to(gl.float32)
    PARTIAL: gl.constexpr = partial_sum(scores).type.layout
    scores = scores.reshape([64, C.BLOCK_N // 8, 4, 2])
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, scores.type.layout))  # [64, 4]
    factor = gl.convert_layout(q_factor, gl.SliceLayout(1, THREAD))[:, None] * keys[None, :]
    best = gl.max(gl.max(scores, 3), 1) * factor
    if SKIP:
        best_logit = gl.convert_layout(gl.max(best, 1), ROW)
    if C.PV8:
        best = best + logs[None, :]
    new = gl.maximum(highest, gl.convert_layout(gl.max(best, 1), ROW))
    origin = new - BASE
    if SKIP:
        origin = gl.where(best_logit - met < pv_skip, -LOWEST, origin)  # weights come to 0
        met = gl.maximum(met, best_logit)
    origin = gl.convert_layout(origin, gl.SliceLayout(1, THREAD))[:, None]
    if C.PV8:
        origin = origin - logs[None, :]
    weight = gl.exp2(
        scores * gl.expand_dims(gl.expand_dims(factor, 1), 3) - gl.expand_dims(gl.expand_dims(origin, 1), 3)
    )
    by_thread = gl.sum(weight, 1)  # [64, 4, 2]
    if C.PV8:
        PAIR: gl.constexpr = by_thread.type.layout
        inverse = gl.convert_layout(gl.exp2(-logs), gl.SliceLayout(0, gl.SliceLayout(2, PAIR)))
        by_thread = by_thread * gl.expand_dims(gl.expand_dims(inverse, 0), 2)
    parts = gl.convert_layout(by_thread.reshape([64, 8]), PARTIAL, assert_trivial=True)
    weight = gl.convert_layout(weight.reshape([64, C.BLOCK_N]), SCORES, assert_trivial=True)
    return new, met, weight, parts


@gluon.jit
def _masked_tile(
    scores, highest, met, q_factor, shift, factors, keys_at, starts, stage, valid, last, k_position_ptr, position_at, N,
    C, TAKEN: gl.constexpr, SKIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """The softmax over a tile with a scale for each key, and masks."""
    SCORES: gl.constexpr = scores.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    slot = read(starts, stage, 4) + gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    factor = gl.load(factors[2] + keys_at + slot, mask=slot < N, other=0.0)
    scores = scores.to(gl.float32) * factor[None, :] * q_factor[:, None]
    if TAKEN:
        scores = scores - shift[:, None]
    if C.PV8:
        logs = gl.load(factors[4] + keys_at + slot, mask=slot < N, other=0.0)
        scores = scores + logs[None, :]
    scores = masked_scores(scores, last, starts, stage, valid, k_position_ptr, position_at, N, C)
    new = gl.maximum(highest, row_max(scores, ROW))
    if SKIP:
        if C.PV8:
            met = gl.maximum(met, row_max(scores - logs[None, :], ROW))
        else:
            met = gl.maximum(met, row_max(scores, ROW))
    weight = gl.exp2(scores - (new - BASE)[:, None])
    if C.PV8:
        parts = partial_sum(weight * gl.exp2(-logs)[None, :])
    else:
        parts = partial_sum(weight)
    return new, met, weight, parts


@gluon.jit
def _step(
    MASKED: gl.constexpr, C, bars, q, k_bufs, v_bufs, starts, factors, tiles_at, keys_at, last, position_at,
    k_position_ptr, N, q_factor, shift, pv_skip, step, highest, met, rescale, total, sums, weight,
    HALF: gl.constexpr, TAKEN: gl.constexpr, SKIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """The scores of the next keys beside the values of the last ones, then the softmax of the scores."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    SCORES: gl.constexpr = weight.type.layout
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    SUMS: gl.constexpr = sums.type.layout
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4 if C.PV8 else 2)
    v_stage = step % C.STAGES
    v_phase = (step // C.STAGES) & 1
    step += 1
    stage = step % C.STAGES
    none = gl.zeros([64, C.BLOCK_N], gl.int32, SCORES)
    mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
    scores_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
    if not MASKED:
        KEYS: gl.constexpr = gl.SliceLayout(3, none.reshape([64, C.BLOCK_N // 8, 4, 2]).type.layout)
        tile = tiles_at + read(starts, stage, 4) // C.BLOCK_N
        keys, logs = _scales_of(factors, tile, C, gl.SliceLayout(0, gl.SliceLayout(1, KEYS)))
    operand = _operand(weight, WEIGHT, C, HALF)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    if C.PV8:
        no_sums = gl.zeros([64, C.DV], gl.float32, SUMS)
        values = v_bufs.index(v_stage).permute([1, 0])
        sums_token = warpgroup_mma(operand, values, no_sums, use_acc=False, is_async=True)
    else:
        sums_token = warpgroup_mma(operand, v_bufs.index(v_stage), sums, is_async=True)
    scores = warpgroup_mma_wait(1, [scores_token])
    if not MASKED:
        mbarrier.arrive(k_empty.index(stage), count=1)
    if C.PV8:
        sums = sums * gl.convert_layout(rescale, OUT_ROW)[:, None] + warpgroup_mma_wait(0, [sums_token])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
    if MASKED:
        new, met, weight, parts = _masked_tile(
            scores, highest, met, q_factor, shift, factors, keys_at, starts, stage, 1, last, k_position_ptr,
            position_at, N, C, TAKEN, SKIP, BASE,
        )  # fmt: skip
        mbarrier.arrive(k_empty.index(stage), count=1)  # until then `starts` is read
    else:
        new, met, weight, parts = _whole_tile(
            scores, highest, met, q_factor, pv_skip, keys, logs, C, SKIP, BASE
        )
    rescale = gl.exp2(highest - new)
    total = total * gl.convert_layout(rescale, SUM_ROW)[:, None] + parts
    if not C.PV8:
        sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        sums = sums * gl.convert_layout(rescale, OUT_ROW)[:, None]
    return step, new, met, rescale, total, sums, weight


@gluon.jit
def _query_numbers(factors, b, h, heads, row, M, scale, WG: gl.constexpr, C, TAKEN: gl.constexpr, ROW: gl.constexpr):
    """What makes logits in base 2 of a query's products, and what is subtracted from them where keys hold their mean."""
    query = (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=ROW)
    at = (b * heads + h).to(gl.int64) * M + query
    factor = gl.load(factors[0] + at, mask=query < M, other=0.0) * scale
    shift = gl.full([64], 0.0, gl.float32, ROW)
    if TAKEN:
        shift = gl.load(factors[5] + at, mask=query < M, other=0.0) * _LOG2_E
    return factor, shift


@gluon.jit
def _head_numbers(factors, b, h, h_key, kv_heads, N, C, SKIP: gl.constexpr):
    """Where the scales of a head's tiles and keys begin, and its `pv_skip` in base 2."""
    key = b * kv_heads + h_key
    pv_skip = 0.0
    if SKIP:
        pv_skip = gl.load(factors[6] + h) * _LOG2_E
    return key * ((N + C.BLOCK_N - 1) // C.BLOCK_N), key.to(gl.int64) * N, pv_skip


@gluon.jit
def _consume(
    WG: gl.constexpr, C, TAKEN: gl.constexpr, SKIP: gl.constexpr, sources, pointers, factors, bars, bufs, strides, sizes
):
    """The softmax of 64 queries of each tile, and its products."""
    out_target = sources[3]
    q_position_ptr, k_position_ptr, lse_ptr = pointers[3], pointers[4], pointers[6]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_pieces, k_pieces, v_pieces, out_pieces, words, starts = bufs
    q_position_strides, k_position_strides, lse_strides = strides[2], strides[3], strides[4]
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale = sizes
    HALF: gl.constexpr = out_pieces.dtype
    PANELS: gl.constexpr = C.DV // PANEL
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    EIGHTS: gl.constexpr = gl.NVMMASharedLayout(C.DQ, 8, rank=2)
    TURNED: gl.constexpr = gl.NVMMASharedLayout(C.BLOCK_N, 8, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 32 if C.PV8 else 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4 if C.PV8 else 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    BASE: gl.constexpr = 8.0 if C.PV8 else 0.0  # weights up to 2^8: fp8 holds 448
    q_bufs = q_pieces._reinterpret(q_pieces.dtype, [2 * C.CONSUMERS, 64, C.DQ], EIGHTS)
    k_bufs = k_pieces._reinterpret(k_pieces.dtype, [C.STAGES, C.BLOCK_N, C.DQ], EIGHTS)
    if C.PV8:
        v_bufs = v_pieces._reinterpret(v_pieces.dtype, [C.STAGES, C.DV, C.BLOCK_N], TURNED)
    else:
        v_bufs = v_pieces._reinterpret(v_pieces.dtype, [C.STAGES, C.BLOCK_N, C.DV], HALVES)
    out_bufs = out_pieces._reinterpret(HALF, [C.CONSUMERS, 64, C.DV], HALVES)
    none = gl.zeros([64, C.BLOCK_N], gl.int32, SCORES)
    lowest = gl.full([64], LOWEST, gl.float32, ROW)

    # The weights of the very first keys.
    mbarrier.wait(q_full.index(0), 0)
    word = read(words, 0, 4)
    b, h, h_key, row = unpacked_place(read(words, 2, 4))
    pieces, steps, first, masked = extent(word, C)
    last = query_positions(q_position_ptr, q_position_strides, b, h, row, offset, WG, C, ROW)
    position_at = b.to(gl.int64) * k_position_strides[0] + h_key.to(gl.int64) * k_position_strides[1]
    q_factor, shift = _query_numbers(factors, b, h, kv_heads * group, row, M, scale, WG, C, TAKEN, ROW)
    tiles_at, keys_at, pv_skip = _head_numbers(factors, b, h, h_key, kv_heads, N, C, SKIP)
    mbarrier.wait(k_full.index(0), 0)
    q = q_bufs.index(WG)
    scores_token = warpgroup_mma(q, k_bufs.index(0).permute([1, 0]), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores_token])
    highest, met, weight, total = _masked_tile(
        scores, lowest, lowest, q_factor, shift, factors, keys_at, starts, 0, first, last, k_position_ptr,
        position_at, N, C, TAKEN, SKIP, BASE,
    )  # fmt: skip
    mbarrier.arrive(k_empty.index(0), count=1)
    step = 0
    visit = 0
    slot = 0
    while word >= 0:
        pieces, steps, first, masked = extent(word, C)
        # Two names of one buffer: ptxas 12.8 shares what both loops derive from it, but computes it before the first
        # alone, which may not run.
        q = q_bufs.index((visit % 2) * C.CONSUMERS + WG)
        q_again = q_bufs.index(slot * C.CONSUMERS + WG)
        sums = gl.zeros([64, C.DV], gl.float32, SUMS)
        rescale = gl.full([64], 1.0, gl.float32, ROW)
        for _ in range(1, masked):
            step, highest, met, rescale, total, sums, weight = _step(
                True, C, bars, q, k_bufs, v_bufs, starts, factors, tiles_at, keys_at, last, position_at,
                k_position_ptr, N, q_factor, shift, pv_skip, step, highest, met, rescale, total, sums, weight,
                HALF, TAKEN, SKIP, BASE,
            )  # fmt: skip
        for _ in range(masked, steps):
            step, highest, met, rescale, total, sums, weight = _step(
                False, C, bars, q_again, k_bufs, v_bufs, starts, factors, tiles_at, keys_at, last, position_at,
                k_position_ptr, N, q_factor, shift, pv_skip, step, highest, met, rescale, total, sums, weight,
                HALF, TAKEN, SKIP, BASE,
            )  # fmt: skip

        # The border: the first scores of the next tile beside the last values of this one.
        v_stage = step % C.STAGES
        v_phase = (step // C.STAGES) & 1
        step += 1
        stage = step % C.STAGES
        mbarrier.arrive(q_empty.index(visit % 2), count=1)
        visit += 1
        slot = 1 - slot
        mbarrier.wait(q_full.index(visit % 2), (visit // 2) & 1)
        word = read(words, visit % 2, 4)
        place = read(words, 2 + visit % 2, 4)
        mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
        q = q_bufs.index((visit % 2) * C.CONSUMERS + WG)
        scores_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
        operand = _operand(weight, WEIGHT, C, HALF)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        if C.PV8:
            no_sums = gl.zeros([64, C.DV], gl.float32, SUMS)
            values = v_bufs.index(v_stage).permute([1, 0])
            sums_token = warpgroup_mma(operand, values, no_sums, use_acc=False, is_async=True)
        else:
            sums_token = warpgroup_mma(operand, v_bufs.index(v_stage), sums, is_async=True)
        next_b, next_h, next_key, next_row = unpacked_place(place)
        pieces, steps, first, masked = extent(word, C)
        last = query_positions(
            q_position_ptr, q_position_strides, next_b, next_h, next_row, offset, WG, C, ROW,
        )  # fmt: skip
        position_at = next_b.to(gl.int64) * k_position_strides[0] + next_key.to(gl.int64) * k_position_strides[1]
        q_factor, shift = _query_numbers(
            factors, next_b, next_h, kv_heads * group, next_row, M, scale, WG, C, TAKEN, ROW
        )
        tiles_at, keys_at, pv_skip = _head_numbers(factors, next_b, next_h, next_key, kv_heads, N, C, SKIP)
        whole = gl.convert_layout(gl.sum(total, 1), ROW)
        log_sum = (highest - BASE + gl.log2(whole)) * 0.6931471805599453  # ln 2: scores are in base 2
        log_sum = gl.where(whole == 0.0, float("-inf"), log_sum)
        query = (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=ROW)
        lse_at = b.to(gl.int64) * lse_strides[0] + h.to(gl.int64) * lse_strides[1]
        gl.store(lse_ptr + lse_at + query, log_sum, mask=query < M)
        scores = warpgroup_mma_wait(1, [scores_token])
        if C.PV8:
            sums = sums * gl.convert_layout(rescale, OUT_ROW)[:, None] + warpgroup_mma_wait(0, [sums_token])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
        highest, met, weight, total = _masked_tile(
            scores, lowest, lowest, q_factor, shift, factors, keys_at, starts, stage, first, last, k_position_ptr,
            position_at, N, C, TAKEN, SKIP, BASE,
        )  # fmt: skip
        mbarrier.arrive(k_empty.index(stage), count=1)
        if not C.PV8:
            sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
        inverse = gl.where(whole == 0.0, 0.0, 1.0 / whole)
        result = (sums * gl.convert_layout(inverse, OUT_ROW)[:, None]).to(HALF)
        tma.store_wait(0)
        out_bufs.index(WG).store(result)
        fence_async_shared()
        for panel in gl.static_range(PANELS):
            tma.async_copy_shared_to_global(
                out_target, [b, h, (row * C.CONSUMERS + WG) * 64, panel * PANEL],
                out_pieces.index(WG * PANELS + panel),
            )  # fmt: skip
        b, h, row = next_b, next_h, next_row
    tma.store_wait(0)


@gluon.jit
def _kernel(
    q_source, k_source, v_source, out_target, lse_ptr,
    full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, queue_ptr,
    q_scale_ptr, k_tile_ptr, k_token_ptr, v_tile_ptr, v_token_ptr, taken_ptr, pv_skip_ptr,
    count_strides, index_strides, q_position_strides, k_position_strides, lse_strides,
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2,
    DQ: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    K_SPLIT: gl.constexpr, Q_SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, Q_IN_ORDER: gl.constexpr, K_IN_ORDER: gl.constexpr,
    FP8: gl.constexpr, TAKEN: gl.constexpr, SKIP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    V_PANELS: gl.constexpr = DV // PANEL
    q_pieces = gl.allocate_shared_memory(gl.int8, [2 * CONSUMERS, 1, 1, 64, DQ], q_source.layout)
    k_pieces = gl.allocate_shared_memory(gl.int8, [STAGES, 1, 1, BLOCK_N, DQ], k_source.layout)
    if FP8:
        v_pieces = gl.allocate_shared_memory(v_source.dtype, [STAGES, 1, 1, DV, BLOCK_N], v_source.layout)
    else:
        v_pieces = gl.allocate_shared_memory(
            v_source.dtype, [STAGES * V_PANELS, 1, 1, BLOCK_N, PANEL], v_source.layout
        )
    out_pieces = gl.allocate_shared_memory(
        out_target.dtype, [CONSUMERS * V_PANELS, 1, 1, 64, PANEL], out_target.layout
    )
    words = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    starts = gl.allocate_shared_memory(gl.int32, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = make_barriers(2, 1)
    q_empty = make_barriers(2, CONSUMERS + 1)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, CONSUMERS)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    sources = (q_source, k_source, v_source, out_target)
    pointers = (full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, queue_ptr, lse_ptr)
    factors = (q_scale_ptr, k_tile_ptr, k_token_ptr, v_tile_ptr, v_token_ptr, taken_ptr, pv_skip_ptr)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    bufs = (q_pieces, k_pieces, v_pieces, out_pieces, words, starts)
    strides = (count_strides, index_strides, q_position_strides, k_position_strides, lse_strides)
    sizes = (tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2)
    C = Constants(DQ, DV, CONSUMERS, BLOCK_N, STAGES, 1, K_SPLIT, Q_SPLIT, CAUSAL, Q_IN_ORDER, K_IN_ORDER, True, FP8)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (first, C, TAKEN, SKIP, sources, pointers, factors, bars, bufs, strides, sizes)),
            (_consume, (second, C, TAKEN, SKIP, sources, pointers, factors, bars, bufs, strides, sizes)),
            (load_keys, (C, sources, pointers, bars, bufs, strides, sizes)),
            (load_values, (C, sources, pointers, bars, bufs, strides, sizes)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (first, C, TAKEN, SKIP, sources, pointers, factors, bars, bufs, strides, sizes)),
            (load_keys, (C, sources, pointers, bars, bufs, strides, sizes)),
            (load_values, (C, sources, pointers, bars, bufs, strides, sizes)),
        ], [1, 1], [LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
