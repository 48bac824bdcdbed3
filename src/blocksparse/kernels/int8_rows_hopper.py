"""Rows of 8-bit scores in the registers of a consumer on Hopper: scales, softmax, fp8 weights.

What belongs to a row and a thread (`by_thread`), as a scale or a sum does, is `[64, 4]`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.hopper_rows import LOWEST, beside, by_thread, masked_scores, of_threads, row_max

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


@gluon.constexpr_function
def _rescale_constraints(n):
    n = int(n)
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def of_rows(x, LAYOUT: gl.constexpr):
    """`[64, 4]` of equal numbers as `[64]`."""
    return gl.convert_layout(gl.max(x, 1), LAYOUT)


@gluon.jit
def rescaled(sums, rescale):
    """`sums * rescale`, skipped by a warp all of whose factors are 1."""
    LAYOUT: gl.constexpr = sums.type.layout
    N: gl.constexpr = sums.shape[1] // 2
    x = by_thread(sums)
    y = gl.inline_asm_elementwise(
        _rescale_asm(N), _rescale_constraints(N), [x, beside(rescale, x)], gl.float32, is_pure=True, pack=N
    )
    return gl.convert_layout(y.reshape([sums.shape[0], sums.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _maximum_asm(lazy):
    lazy = float(lazy)
    return (
        "{ .reg .pred p, q; .reg .f32 a, b, c, d, e, f;"
        f" add.f32 c, $6, {lazy}; add.f32 d, $7, {lazy}; setp.gt.f32 p, $4, c; setp.gt.f32 q, $5, d;"
        " or.pred p, p, q; vote.sync.any.pred p, p, -1; mov.f32 $0, $6; mov.f32 $1, $7; @!p bra DONE;"
        " shfl.sync.bfly.b32 a, $4, 2, 31, -1; shfl.sync.bfly.b32 b, $5, 2, 31, -1;"
        " max.f32 a, a, $4; max.f32 b, b, $5;"
        " shfl.sync.bfly.b32 e, a, 1, 31, -1; shfl.sync.bfly.b32 f, b, 1, 31, -1;"
        " max.f32 a, a, e; max.f32 b, b, f; setp.gt.f32 p, a, c; setp.gt.f32 q, b, d;"
        " selp.f32 $0, a, $6, p; selp.f32 $1, b, $7, q; DONE: mul.f32 $2, $8, $10; mul.f32 $3, $9, $11; }"
    )


@gluon.jit
def _new_maximum(best, highest, queries, keys, LAZY: gl.constexpr):
    """Of `[64, 4]`: the row's maximum of `best` where it passes `highest` by `LAZY`, else `highest`; and `queries * keys`.

    A warp without such a row, and that is most, does not look for maxima across threads. The product is here because
    ptxas else has it, and the wait for `keys` to load, before the values' products begin.
    """
    return gl.inline_asm_elementwise(
        _maximum_asm(LAZY), "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f", [best, highest, queries, keys],
        (gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def operand_of(weight, WEIGHT: gl.constexpr, C):
    """Weights as the first operand of the product with values.

    fp8: the registers of the scores are read again as those of the operand, which stand for keys in another order; the
    values are stored in that order, so nothing moves.
    """
    if C.PV8:
        y = gl.join(weight, weight)
        y = gl.join(y, y).reshape([64, C.BLOCK_N])
        y = gl.convert_layout(y, WEIGHT, assert_trivial=True)
        y = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [y], gl.float8e4nv, is_pure=True, pack=4)
    else:
        y = weight
    return y


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
def whole_tile(
    scores, highest, met, q_factor, pv_skip, of_tiles, stage, C, SKIP: gl.constexpr, BASE: gl.constexpr
):
    """The softmax over a tile that every query sees whole: new maxima, weights, and a thread's part of their sums.

    Where values have scales the maximum is that of logits plus the scale's logarithm, for weights carry the scale.
    """
    SCORES: gl.constexpr = scores.type.layout
    whole = by_thread(scores)
    LAYOUT: gl.constexpr = whole.type.layout
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))  # [64, 4]
    queries = gl.convert_layout(q_factor, gl.SliceLayout(1, THREAD))[:, None]
    keys = of_tiles.index(stage).slice(0, 4).load(gl.SliceLayout(0, THREAD))
    if C.PV8:
        logs = of_tiles.index(C.STAGES + stage).slice(0, 4).load(gl.SliceLayout(0, THREAD))
    # Maxima of integers: an instruction compares three.
    best = gl.max(gl.max(whole, 1), 2).to(gl.float32)
    best = gl.convert_layout(best, THREAD, assert_trivial=True) * queries * keys[None, :]
    if SKIP:
        best_logit = of_threads(gl.max(best, 1), THREAD)
    if C.PV8:
        best = best + logs[None, :]
    new, factor = _new_maximum(best, highest, queries, keys[None, :], LAZY if C.PV8 else 0.0)
    origin = new - BASE
    if SKIP:
        origin = gl.where(best_logit - met < pv_skip, -LOWEST, origin)  # weights come to 0
        met = gl.maximum(met, best_logit)
    if C.PV8:
        origin = origin - logs[None, :]
    weight = gl.exp2(whole.to(gl.float32) * beside(factor, whole) - beside(origin, whole))
    parts = gl.convert_layout(gl.sum(gl.sum(weight, 1), 2), THREAD, assert_trivial=True)
    if C.PV8:
        parts = parts * gl.exp2(-logs)[None, :]
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
