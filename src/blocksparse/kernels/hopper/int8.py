"""8-bit operands on Hopper: rows of scores in registers, and one step of a consumer.

`hopper/rows.py` describes which scores a thread holds: two rows of the 64, and a quarter of each row's keys. A scale or a
sum that belongs to a row and to one of its four threads is an entry of a tensor `[64, 4]`. A thread holds two of these
entries, one for each of its rows. Logits, maxima and scales of values are in base 2, as logarithms.

A row's maximum follows its logits late ("lazy"). A row keeps the maximum `highest` until a logit passes it by more than
`LAZY`, and only then takes the new one. So in most steps no sum is rescaled. In masked steps the maximum follows at once.
Apart from rounding, the result is the same for any `highest`, since weights and sums are relative to the same one. `highest`
only has to prevent overflow. Weights in fp8 are `2^(logit - highest + BASE)` with `BASE = 8 - LAZY`, so at most 2^8, and fp8
(e4m3) holds 448. With fp8 values, "logit" stands for the logit plus the logarithm of the value's scale, here and in the
maximum: a weight then brings its value's scale along (`whole_tile`).
Weights of 16 bits have `BASE = 0`, and their maximum follows at once. Each row decides by its own logits, so no row depends
on another.

A step starts the scores of the next tile of keys, then the product of the last tile's weights with its values. It computes
the softmax of the scores as soon as they are there. `hopper/tile_scheduler.py` explains stages and barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from blocksparse.kernels.hopper.rows import (
    LOWEST,
    beside,
    by_thread,
    masked_scores,
    of_rows,
    of_threads,
    rescaled,
    row_max,
)

# By how much, as a logarithm in base 2, a logit may pass its row's maximum before that follows, if weights are fp8.
LAZY = gl.constexpr(1.0)


@gluon.constexpr_function
def _maximum_asm(lazy):
    """PTX for `_new_maximum`, on the two numbers that a thread holds of each `[64, 4]`, one for each of its rows.

    $2 and $3 are the thread's best logits of its two rows, $4 and $5 the rows' maxima so far, $0 and $1 the new ones.

    1. `c` and `d` are the maxima plus `lazy`. `p` is whether the thread has a logit above its row's bound, and the vote
       tells all lanes whether any has. If none has, no row of the warp passes its bound, and the old maxima stay.
    2. Else two exchanges, with the lanes whose number differs in bit 1 and then in bit 0, leave in `a` and `b` the best
        logits of whole rows. The four lanes that share a row have numbers that differ in these two bits only.
    3. A row whose best logit passes its bound takes that as its maximum; the others keep theirs. The four threads of a row
       have the same `highest`, `a` and bound, and so decide alike.
    """
    lazy = float(lazy)
    return (
        f"{{ .reg .pred p, q; .reg .f32 a, b, c, d, e, f; add.f32 c, $4, {lazy}; add.f32 d, $5, {lazy}; "
        "setp.gt.f32 p, $2, c; setp.gt.f32 q, $3, d; or.pred p, p, q; vote.sync.any.pred p, p, -1; mov.f32 $0, "
        "$4; mov.f32 $1, $5; @!p bra DONE; shfl.sync.bfly.b32 a, $2, 2, 31, -1; shfl.sync.bfly.b32 b, $3, 2, 31, "
        "-1; max.f32 a, a, $2; max.f32 b, b, $3; shfl.sync.bfly.b32 e, a, 1, 31, -1; shfl.sync.bfly.b32 f, b, 1, "
        "31, -1; max.f32 a, a, e; max.f32 b, b, f; setp.gt.f32 p, a, c; setp.gt.f32 q, b, d; selp.f32 $0, a, $4, "
        "p; selp.f32 $1, b, $5, q; DONE: }"
    )


@gluon.jit
def _new_maximum(best, highest, LAZY: gl.constexpr):
    """The row's maximum of `best` `[64, 4]` where it passes `highest` by more than `LAZY`, else `highest`."""
    return gl.inline_asm_elementwise(
        _maximum_asm(LAZY), "=&f,=&f,f,f,f,f", [best, highest], gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def operands_of(weight, WEIGHT: gl.constexpr, C):
    """Weights as first operands of the products with values: one, or for fp8 one for each piece.

    No fp8 weight moves between threads. Of 16 keys, thread `t` of a row has the weights of `2 t`, `2 t + 1`, `2 t + 8` and
    `2 t + 9` (`hopper/rows.py`). The fp8 operand takes from it the columns `4 t` to `4 t + 3`, in one register. So the four
    weights are used as these columns. The product sums over keys in any order, as long as values stand in the same
    one. They are stored in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 (`tile_operands.py`).
    """
    if not C.PV8:
        operands = (weight,)
    elif C.PIECES == 1:
        operands = (_fp8_operand(weight, WEIGHT),)
    else:
        first, second = gl.split(weight.reshape([64, 2, C.BLOCK_N // 8]).permute([0, 2, 1]))
        operands = (_fp8_operand(first, WEIGHT), _fp8_operand(second, WEIGHT))  # type: ignore[assignment]
    return operands


@gluon.jit
def _fp8_operand(weight, WEIGHT: gl.constexpr):
    """The operand `[64, 4 n]` in fp8 that four numbers in each int32 of `weight` `[64, n]` stand for.

    Elementwise code must have as many inputs as outputs, so each int32 comes four times, of which the first is used.
    """
    y = gl.join(weight, weight)
    y = gl.join(y, y).reshape([64, 4 * weight.shape[1]])
    y = gl.convert_layout(y, WEIGHT, assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [y], gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def kept(weight, WEIGHT: gl.constexpr, C, HALF: gl.constexpr):
    """The weights as the next step needs them: for fp8 int32 `[64, n / 4]`, with the four weights that make a register.

    `operands_of` says which four. A tensor of fp8 would cross the edge of a loop as single bytes. Weights of 16 bits are
    kept as the operand itself.
    """
    if C.PV8:
        x = weight.reshape([64, C.BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, C.BLOCK_N])
        x = gl.convert_layout(x, WEIGHT, assert_trivial=True)
        # Four numbers at a time become one register, the first lowest. Triton's own conversion takes them apart again.
        # The four outputs are equal, since elementwise code has as many outputs as inputs; the splits keep one.
        y = gl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $5, $4; cvt.rn.satfinite.e4m3x2.f32 hi, $7, $6;"
            " mov.b32 $0, {lo, hi}; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; }",
            "=r,=r,=r,=r,f,f,f,f", [x], gl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        y = gl.split(gl.split(y.reshape([64, C.BLOCK_N // 4, 2, 2]))[0])[0]
    else:
        y = gl.convert_layout(weight.to(HALF), WEIGHT)
    return y


@gluon.jit
def _scales_of(of_tiles, stage, p: gl.constexpr, C, FOUR: gl.constexpr):
    """The four scales of a piece's keys, and log2 of those of its values (of keys if values have none), `[1, 4]`."""
    keys = of_tiles.index(stage * C.PIECES + p).slice(0, 4).load(FOUR)
    logs = keys
    if C.PV8:
        logs = of_tiles.index((C.STAGES + stage) * C.PIECES + p).slice(0, 4).load(FOUR)
    return keys[None, :], logs[None, :]


@gluon.jit
def _best_of(piece, factor, THREAD: gl.constexpr):
    """The best logit of each row and thread, `[64, 4]`: of integers, of which one instruction compares three."""
    best = gl.max(gl.max(piece, 1), 2).to(gl.float32)
    return gl.convert_layout(best, THREAD, assert_trivial=True) * factor


@gluon.jit
def _weights_of(piece, factor, origin, THREAD: gl.constexpr):
    """Weights `2^(factor * piece - origin)`, and their sums by row and thread, `[64, 4]`."""
    weight = gl.exp2(piece.to(gl.float32) * beside(factor, piece) - beside(origin, piece))
    return weight, gl.convert_layout(gl.sum(gl.sum(weight, 1), 2), THREAD, assert_trivial=True)


@gluon.jit
def _without(origin, best, met, pv_skip, THREAD: gl.constexpr):
    """`pv_skip`: an origin so large that negligible weights of a piece are 0, and the best logit met by now, `[64, 4]`."""
    best = of_threads(gl.max(best, 1), THREAD)
    return gl.where(best - met < pv_skip, -LOWEST, origin), gl.maximum(met, best)


@gluon.jit
def whole_tile(
    scores, highest, met, q_factor, pv_skip, of_tiles, stage, C, SKIP: gl.constexpr, BASE: gl.constexpr
):
    """The softmax over a tile of keys that every query sees whole.

    Returns new maxima `[64, 4]`, the best logits met `[64, 4]`, weights `[64, n]`, and each thread's part of their sums
    `[64, 4]`. If values have scales, weights carry them. The scale's logarithm `logs` is added to the logit, and the maximum
    is that of these sums. The denominator's parts are divided by the scale again.
    """
    SCORES: gl.constexpr = scores.type.layout
    whole = by_thread(scores)
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, whole.type.layout))  # [64, 4]
    FOUR: gl.constexpr = gl.SliceLayout(0, THREAD)
    queries = gl.convert_layout(q_factor, gl.SliceLayout(1, THREAD))[:, None]
    keys, logs = _scales_of(of_tiles, stage, 0, C, FOUR)
    factor = queries * keys
    if C.PIECES == 1:
        best_logit = _best_of(whole, factor, THREAD)
        best = best_logit + logs if C.PV8 else best_logit
    else:
        pieces = whole.reshape([64, 2, C.BLOCK_N // 16, 4, 2]).permute([0, 2, 3, 4, 1])
        whole, second = gl.split(pieces)
        second_keys, second_logs = _scales_of(of_tiles, stage, 1, C, FOUR)
        second_factor = queries * second_keys
        best_logit, second_logit = _best_of(whole, factor, THREAD), _best_of(second, second_factor, THREAD)
        if C.PV8:
            best = gl.maximum(best_logit + logs, second_logit + second_logs)
        else:
            best = gl.maximum(best_logit, second_logit)
    new = _new_maximum(best, highest, LAZY if C.PV8 else 0.0)
    origin = new - BASE
    if C.PIECES == 2:
        second_origin = origin - second_logs if C.PV8 else origin
    if C.PV8:
        origin = origin - logs
    if SKIP:
        origin, met = _without(origin, best_logit, met, pv_skip, THREAD)
        if C.PIECES == 2:
            second_origin, met = _without(second_origin, second_logit, met, pv_skip, THREAD)
    weight, parts = _weights_of(whole, factor, origin, THREAD)
    if C.PV8:
        parts = parts * gl.exp2(-logs)
    if C.PIECES == 2:
        second_weight, second_parts = _weights_of(second, second_factor, second_origin, THREAD)
        if C.PV8:
            second_parts = second_parts * gl.exp2(-second_logs)
        weight, parts = gl.join(weight, second_weight).permute([0, 4, 1, 2, 3]), parts + second_parts
    weight = gl.convert_layout(weight.reshape([64, C.BLOCK_N]), SCORES, assert_trivial=True)
    return new, met, weight, parts


@gluon.jit
def masked_tile(
    scores, highest, met, q_factor, shift, of_tokens, given, stage, valid, last, position_at, C,
    SKIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """The softmax over a tile of keys with a scale for each key, and with masks; it returns what `whole_tile` does.

    These keys still hold their mean, and tiles that are seen whole do not. `shift` `[64]` is by how much the mean raises a
    query's logits; maxima are kept without it.
    """
    SCORES: gl.constexpr = scores.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    scores = scores.to(gl.float32) * of_tokens.index(stage).load(COLUMN)[None, :] * q_factor[:, None]
    if C.PV8:
        logs = of_tokens.index(C.STAGES + stage).load(COLUMN)
        scores = scores + logs[None, :]
    scores = masked_scores(scores, last, given, stage, valid, position_at, C)
    LAYOUT: gl.constexpr = by_thread(scores).type.layout
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    row = gl.maximum(of_rows(highest, ROW), row_max(scores, ROW) - shift)
    new = of_threads(row, THREAD)
    if SKIP:
        logits = scores
        if C.PV8:
            logits = scores - logs[None, :]
        met = gl.maximum(met, of_threads(row_max(logits, ROW) - shift, THREAD))
    weight = gl.exp2(scores - (row + shift - BASE)[:, None])
    if C.PV8:
        parts = by_thread(weight * of_tokens.index(2 * C.STAGES + stage).load(COLUMN)[None, :])
    else:
        parts = by_thread(weight)
    parts = gl.convert_layout(gl.sum(gl.sum(parts, 1), 2), THREAD, assert_trivial=True)
    return new, met, weight, parts


@gluon.jit
def promoted(result, relative, highest, sums):
    """The fp32 sums over all tiles so far, relative to `highest`.

    `result` holds earlier tiles, relative to the maxima `relative`; `sums` holds the last ones, relative to `highest`.
    """
    LAYOUT: gl.constexpr = result.type.layout
    x = by_thread(result)
    x = x * beside(gl.exp2(relative - highest), x)
    return gl.convert_layout(x.reshape([64, result.shape[1]]), LAYOUT, assert_trivial=True) + sums


@gluon.jit
def after(stage, phase, C):
    """The stage after `stage`, and the parity that readers wait for there: it flips when the ring begins again."""
    stage += 1
    phase = gl.where(stage == C.STAGES, 1 - phase, phase)
    return gl.where(stage == C.STAGES, 0, stage), phase


@gluon.jit
def products(operands, v_bufs, stage, sums, ON_TOP, C):
    """Starts the products of weights and values; fp8 values of each piece lie apart, so each has its own product."""
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
    MASKED: gl.constexpr, C, given, q, k_bufs, v_bufs, of_tokens, of_tiles, last, position_at,
    q_factor, shift, pv_skip, stage, phase, highest, met, total, sums, weight, result, relative,
    ON_TOP, HALF: gl.constexpr, SKIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """Starts the scores of the next keys and the product with the values of the last ones; then the softmax of the scores.

    `weight` is what `kept` gave of the last keys, and becomes that of these. `sums` is what the tensor cores add up, and
    with fp8 `result` is what was added in fp32 before (`promoted`), relative to the maxima `relative`. `ON_TOP` says whether
    the product is added to `sums` or replaces them.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = given.barriers
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
    if MASKED and C.PV8:  # the product is not kept in flight during a masked softmax, since registers are short
        result = promoted(result, relative, highest, warpgroup_mma_wait(0, [sums_token]))
        relative = highest
        mbarrier.arrive(v_empty.index(v_stage), count=1)
    if MASKED:
        new, met, weight, parts = masked_tile(
            scores, highest, met, q_factor, shift, of_tokens, given, stage, C.PIECES, last, position_at, C, SKIP, BASE,
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
