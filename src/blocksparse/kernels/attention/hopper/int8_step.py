"""One step of a consumer on Hopper with 8-bit operands: two matrix products in flight, and the softmax between them.

A step starts the scores of the next tile of keys, then the product of the last tile's weights with its values, and
computes the softmax of the scores as soon as these are there. `hopper/queue.py` explains stages and barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from blocksparse.kernels.attention.hopper.int8_rows import (
    kept,
    masked_tile,
    operands_of,
    promoted,
    whole_tile,
)
from blocksparse.kernels.attention.hopper.rows import rescaled


@gluon.jit
def after(stage, phase, C):
    """The stage after `stage`, and the parity that readers wait for there: it flips when the ring begins again."""
    stage += 1
    phase = gl.where(stage == C.STAGES, 1 - phase, phase)
    return gl.where(stage == C.STAGES, 0, stage), phase


@gluon.jit
def products(operands, v_bufs, stage, sums, ON_TOP, C):
    """Starts the products of weights and values; fp8 values of each piece lie apart, so each has a product of its own."""
    if C.PV8:
        token = warpgroup_mma(
            operands[0], v_bufs.index(stage * C.PIECES).permute([1, 0]), sums, use_acc=ON_TOP, is_async=True
        )
        if C.PIECES == 2:
            token = warpgroup_mma(operands[1], v_bufs.index(stage * 2 + 1).permute([1, 0]), token, is_async=True)
    else:
        token = warpgroup_mma(operands[0], v_bufs.index(stage), sums, use_acc=ON_TOP, is_async=True)
    return token


@gluon.jit
def step(
    MASKED: gl.constexpr, C, bars, q, k_bufs, v_bufs, starts, of_tokens, of_tiles, last, position_at, k_position_ptr, N,
    q_factor, shift, pv_skip, stage, phase, highest, met, total, sums, weight, result, relative,
    ON_TOP, HALF: gl.constexpr, SKIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """Starts the scores of the next keys and the product with the values of the last ones; then the softmax of the scores.

    `weight` is what `kept` gave of the last keys, and becomes that of these. `sums` is what the tensor cores add up, and
    with fp8 `result` is what was added in fp32 before (`promoted`), relative to the maxima `relative`. `ON_TOP` says whether
    the product is added to `sums` or replaces them.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 32])
    SUMS: gl.constexpr = sums.type.layout
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4 if C.PV8 else 2)
    v_stage, v_phase = stage, phase
    stage, phase = after(stage, phase, C)
    none = gl.zeros([64, C.BLOCK_N], gl.int32, SCORES)
    mbarrier.wait(k_full.index(stage), phase)
    scores_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
    operands = operands_of(weight, WEIGHT, C)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    sums_token = products(operands, v_bufs, v_stage, sums, ON_TOP, C)
    # Of the products in flight only the oldest one, the scores, is waited for. fp8 values have one product per piece.
    scores = warpgroup_mma_wait(C.PIECES if C.PV8 else 1, [scores_token])
    if MASKED and C.PV8:  # the product is not kept in flight beside a masked softmax, for registers are short
        result = promoted(result, relative, highest, warpgroup_mma_wait(0, [sums_token]))
        relative = highest
        mbarrier.arrive(v_empty.index(v_stage), count=1)
    if MASKED:
        new, met, weight, parts = masked_tile(
            scores, highest, met, q_factor, shift, of_tokens, starts, stage, C.PIECES, last, k_position_ptr, position_at,
            N, C, SKIP, BASE,
        )  # fmt: skip
        mbarrier.arrive(k_empty.index(stage), count=1)  # the softmax has read `starts` and `of_tokens`, too
    else:
        new, met, weight, parts = whole_tile(
            scores, highest, met, q_factor, pv_skip, of_tiles, stage, C, SKIP, BASE
        )
    rescale = gl.exp2(highest - new)
    total = total * rescale + parts
    if not (MASKED and C.PV8):
        sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
        if not MASKED:  # keys and values are given back together, so that the warps meet once and not twice
            mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        sums = rescaled(sums, rescale)
    weight = kept(weight, WEIGHT, C, HALF)
    return stage, phase, new, met, total, sums, weight, result, relative
