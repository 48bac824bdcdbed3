"""Rows of 8-bit scores in the registers of a consumer on Hopper: scales, softmax, fp8 weights.

What belongs to a row and a thread (`by_thread`), as a scale or a sum does, is `[64, 4]`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.attention.hopper_rows import (
    LOWEST,
    beside,
    by_thread,
    masked_scores,
    of_threads,
    on_registers,
    row_max,
)

# By how much (log2) a row may pass its maximum before that follows, where weights are fp8.
LAZY = gl.constexpr(1.0)


@gluon.constexpr_function
def _rescale_asm(n):
    n = int(n)
    text = (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000;"
        " or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; "
    )
    return text + " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)) + " DONE: }"


@gluon.jit
def of_rows(x, LAYOUT: gl.constexpr):
    """`[64, 4]` of equal numbers as `[64]`."""
    return gl.convert_layout(gl.max(x, 1), LAYOUT)


@gluon.jit
def rescaled(sums, rescale):
    """`sums * rescale`, skipped by a warp all of whose factors are 1."""
    return on_registers(sums, rescale, _rescale_asm(sums.shape[1] // 2), "f")


@gluon.constexpr_function
def _maximum_asm(lazy):
    lazy = float(lazy)
    return (
        "{ .reg .pred p, q; .reg .f32 a, b, c, d, e, f;"
        f" add.f32 c, $4, {lazy}; add.f32 d, $5, {lazy}; setp.gt.f32 p, $2, c; setp.gt.f32 q, $3, d;"
        " or.pred p, p, q; vote.sync.any.pred p, p, -1; mov.f32 $0, $4; mov.f32 $1, $5; @!p bra DONE;"
        " shfl.sync.bfly.b32 a, $2, 2, 31, -1; shfl.sync.bfly.b32 b, $3, 2, 31, -1;"
        " max.f32 a, a, $2; max.f32 b, b, $3;"
        " shfl.sync.bfly.b32 e, a, 1, 31, -1; shfl.sync.bfly.b32 f, b, 1, 31, -1;"
        " max.f32 a, a, e; max.f32 b, b, f; setp.gt.f32 p, a, c; setp.gt.f32 q, b, d;"
        " selp.f32 $0, a, $4, p; selp.f32 $1, b, $5, q; DONE: }"
    )


@gluon.jit
def _new_maximum(best, highest, LAZY: gl.constexpr):
    """Of `[64, 4]`: the row's maximum of `best` where it passes `highest` by `LAZY`, else `highest`.

    A warp without such a row, and that is most, does not look for maxima across threads.
    """
    return gl.inline_asm_elementwise(
        _maximum_asm(LAZY), "=&f,=&f,f,f,f,f", [best, highest], gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def operands_of(weight, WEIGHT: gl.constexpr, C):
    """Weights as first operands of the products with values, one for each piece of fp8.

    fp8: the registers of the scores are read again as those of the operand, which stand for keys in another order; the
    values are stored in that order, so nothing moves.
    """
    if not C.PV8:
        operands = (weight,)
    elif C.PIECES == 1:
        operands = (_fp8_operand(weight, WEIGHT),)
    else:
        first, second = gl.split(weight.reshape([64, 2, C.BLOCK_N // 8]).permute([0, 2, 1]))
        operands = (_fp8_operand(first, WEIGHT), _fp8_operand(second, WEIGHT))
    return operands


@gluon.jit
def _fp8_operand(weight, WEIGHT: gl.constexpr):
    y = gl.join(weight, weight)
    y = gl.join(y, y).reshape([64, 4 * weight.shape[1]])
    y = gl.convert_layout(y, WEIGHT, assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [y], gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def kept(weight, WEIGHT: gl.constexpr, C, HALF: gl.constexpr):
    """What is kept of weights for the next step: as the operand's registers are, four fp8 numbers in an int32.

    fp8 tensors would cross a loop's edge as single bytes.
    """
    if C.PV8:
        x = weight.reshape([64, C.BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, C.BLOCK_N])
        x = gl.convert_layout(x, WEIGHT, assert_trivial=True)
        # Four at a time: the language's own conversion takes them apart again.
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
    """Of a piece, `[4]`, one for each thread that shares a row: the factor of its keys, and log2 of that of its values."""
    keys = of_tiles.index(stage * C.PIECES + p).slice(0, 4).load(FOUR)
    logs = keys
    if C.PV8:
        logs = of_tiles.index((C.STAGES + stage) * C.PIECES + p).slice(0, 4).load(FOUR)
    return keys[None, :], logs[None, :]


@gluon.jit
def _best_of(piece, factor, THREAD: gl.constexpr):
    """The best logit of each row and thread, `[64, 4]`. Maxima of integers: an instruction compares three."""
    best = gl.max(gl.max(piece, 1), 2).to(gl.float32)
    return gl.convert_layout(best, THREAD, assert_trivial=True) * factor


@gluon.jit
def _weights_of(piece, factor, origin, THREAD: gl.constexpr):
    """Weights, and their sums by row and thread."""
    weight = gl.exp2(piece.to(gl.float32) * beside(factor, piece) - beside(origin, piece))
    return weight, gl.convert_layout(gl.sum(gl.sum(weight, 1), 2), THREAD, assert_trivial=True)


@gluon.jit
def _without(origin, best, met, pv_skip, THREAD: gl.constexpr):
    """An origin that makes weights 0 where a piece's best logit is negligible beside those met before; and the best met."""
    best = of_threads(gl.max(best, 1), THREAD)
    return gl.where(best - met < pv_skip, -LOWEST, origin), gl.maximum(met, best)


@gluon.jit
def whole_tile(
    scores, highest, met, q_factor, pv_skip, of_tiles, stage, C, SKIP: gl.constexpr, BASE: gl.constexpr
):
    """The softmax over a tile that every query sees whole: new maxima, weights, and a thread's part of their sums.

    Where values have scales the maximum is that of logits plus the scale's logarithm, for weights carry the scale.
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
    scores, highest, met, q_factor, shift, of_tokens, starts, stage, valid, last, k_position_ptr, position_at, N, C,
    SKIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """The softmax over a tile with a scale for each key, and masks; `shift` is what smoothing took from other tiles."""
    SCORES: gl.constexpr = scores.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    scores = scores.to(gl.float32) * of_tokens.index(stage).load(COLUMN)[None, :] * q_factor[:, None]
    if C.PV8:
        logs = of_tokens.index(C.STAGES + stage).load(COLUMN)
        scores = scores + logs[None, :]
    scores = masked_scores(scores, last, starts, stage, valid, k_position_ptr, position_at, N, C)
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
    """The sums of all tiles, relative to `highest`, from those relative to `relative` and the last ones."""
    LAYOUT: gl.constexpr = result.type.layout
    x = by_thread(result)
    x = x * beside(gl.exp2(relative - highest), x)
    return gl.convert_layout(x.reshape([64, result.shape[1]]), LAYOUT, assert_trivial=True) + sums
