"""The softmax of a tile of scores on Hopper, which looks for a row's maximum only where a weight would be large.

`hopper/rows.py` says which scores a thread holds. Weights are powers of 2 relative to a row's *reference*. Apart from
rounding the result is the same for any reference, which only has to keep weights from overflowing. So a row keeps its
reference, at first the maximum of its first tile of keys, as long as sums of weights stay small. That is so if each of the
four threads that share the row has a sum of at most `_most` in a tile. Where they come to more, its maximum becomes its
reference, sums are rescaled, and the tile's weights are computed once more. Most tiles have no such row, and look for no
maximum at all.

Each row decides by its own weights, and computing them once more gives a row whose reference stays the same bits. So no row
depends on another. A row without a key so far has the reference `LOWEST`, relative to which the weight of any logit is
infinite, so that its first keys raise it.

A capped logit takes a `tanh` and a power of 2. Both come from a unit that makes 16 results in a clock, while the units for
sums and products make 128. So where no maximum is looked for, `capped_powers` takes some of the powers on these (its
`SHARE`).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.hopper.rows import beside, by_thread

_APART = gl.constexpr(16)  # how many powers stand between a thread's weights and the sums that they are added to


@gluon.constexpr_function
def _most(half):
    """What a row's weights in one thread, at most 32 of a tile, may come to.

    fp16 holds numbers up to 65504. In bf16 and fp32 nothing overflows by 2^40: a million weights of it come to 2^60, and leave
    2^67 to the values that they are multiplied with. The larger this is, the fewer rows pass it.
    """
    return 2.0**14 if half == gl.float16 else 2.0**40


@gluon.constexpr_function
def _logits(numbers, scores):
    """PTX: logits in base 2, relative to the rows' references, of some of a thread's scores, operands from `scores` on.

    They stand where weights are to stand. `r0` and `r1` are the two rows' references, negated, and `c` makes logits of scores.
    """
    return "".join(f"fma.rn.f32 ${i}, ${scores + i}, c, r{i // 2 % 2}; " for i in numbers)


@gluon.constexpr_function
def _powers(numbers):
    """PTX: weights of these logits, in their places."""
    return "".join(f"ex2.approx.ftz.f32 ${i}, ${i}; " for i in numbers)


@gluon.constexpr_function
def _sums(numbers):
    """PTX: adds weights to `s0` and `s1`."""
    return "".join(f"add.f32 s{i // 2 % 2}, s{i // 2 % 2}, ${i}; " for i in numbers)


@gluon.constexpr_function
def _rounded_weights(n, scores, pair):
    """PTX: a thread's `n` weights as pairs of type `pair`, and their sums."""
    text = ""
    for i in range(0, n, 2):
        row = i // 2 % 2
        for x, score in (("x", scores + i), ("y", scores + i + 1)):
            text += (
                f"fma.rn.f32 {x}, ${score}, c, r{row}; ex2.approx.ftz.f32 {x}, {x}; add.f32 s{row}, s{row}, {x}; "
            )
        text += f"cvt.rn.{pair}.f32 ${i // 2}, y, x; "
    return text


@gluon.constexpr_function
def _weights(n, scores):
    """PTX: a thread's `n` weights in fp32, and their sums.

    A power takes about 30 clocks to come, and the next can start after 8. Left alone, ptxas adds each to its sum as soon as
    it is there, and the warp waits for most of them (docs/evidence/kernel-notes.md). So the sums of a part of `_APART`
    powers stand behind a branch, next to the powers of the next part, and logits are computed one part ahead. No branch is
    ever taken, for `c` is positive, but what they lead to needs the powers before them. `tests/kernels/machine_code.py`
    checks the order that ptxas makes.
    """
    apart = int(_APART.value)
    parts = [range(at, at + apart) for at in range(0, n, apart)]
    none = range(0)
    text = _logits(parts[0], scores) + _powers(parts[0]) + _logits(parts[1], scores)
    for k, part in enumerate(parts):
        following, ahead = (*parts[k + 1 :], none, none)[:2]
        text += f"setp.lt.f32 p, c, {-float(k)}; @p bra DONE; "
        text += _powers(following) + _sums(part) + _logits(ahead, scores)
    return text


@gluon.constexpr_function
def _across(operation, x, t):
    """PTX: `x` combined by `operation` with those of the row's other threads, by way of `t`."""
    return "".join(f"shfl.sync.bfly.b32 {t}, {x}, {lane}, 31, -1; {operation} {x}, {x}, {t}; " for lane in (2, 1))


@gluon.constexpr_function
def _maximum(row, n, scores):
    """PTX: `m`, the maximum of a row's scores as a logit, or its reference so far if that is greater."""
    first, second, *others = (f"${scores + i}" for i in range(n) if i // 2 % 2 == row)
    text = f"max.f32 m, {first}, {second}; " + "".join(f"max.f32 m, m, {x}; " for x in others)
    return text + _across("max.f32", "m", "x") + f"mul.f32 m, m, c; max.f32 m, m, h{row}; "


@gluon.constexpr_function
def _softmax_asm(n, pair, first, most):
    """PTX for `softmax`, on the `n` scores of a thread, in the order that `on_registers` states.

    Operands: first `n` weights, or `n/2` pairs of them, of type `pair`. Of the next `n`, a tile of fp32, three entries for
    each of the two rows are written. They are the row's new reference, the factor for its sums, and the sum of its weights.
    Then come `n` scores, `n` times the references so far, and `n` times the factor that makes logits of scores.

    1. Weights and sums relative to the references so far. A vote tells all lanes of a warp whether any lane's sum passes
       `most`. If none does, this was all.
    2. Else a row, whose four threads share what they know, takes its maximum if a sum of it passes `most`.
    3. Weights and sums once more, for all rows of the warp.

    With `first` every row takes its maximum, and what was its reference so far is a floor under it.
    """
    n, pair, first, most = int(n), str(pair), bool(first), float(most)
    rows = n // 2 if pair else n
    scores, reference, scale = rows + n, rows + 2 * n, rows + 3 * n
    again = (
        _rounded_weights(n, scores, pair)
        if pair
        else _logits(range(n), scores) + _powers(range(n)) + _sums(range(n))
    )
    text = "{ .reg .f32 x, y, c, m, h0, h1, r0, r1, s0, s1; .reg .pred p, q; "
    text += f"mov.f32 c, ${scale}; mov.f32 h0, ${reference}; mov.f32 h1, ${reference + 2}; "
    text += f"mov.f32 ${rows + 4}, 1.0; mov.f32 ${rows + 6}, 1.0; "
    if not first:
        text += "mov.f32 s0, 0.0; mov.f32 s1, 0.0; neg.f32 r0, h0; neg.f32 r1, h1; "
        text += _rounded_weights(n, scores, pair) if pair else _weights(n, scores)
        text += f"setp.gt.f32 p, s0, {most}; setp.gt.f32 q, s1, {most}; or.pred p, p, q; "
        text += "vote.sync.any.pred p, p, -1; @!p bra DONE; "
    for row in (0, 1):
        text += _maximum(row, n, scores)
        if not first:
            text += _across("max.f32", f"s{row}", "x") + f"setp.gt.f32 p, s{row}, {most}; "
            text += (
                f"selp.f32 m, m, h{row}, p; sub.f32 x, h{row}, m; ex2.approx.ftz.f32 ${rows + 4 + 2 * row}, x; "
            )
        text += f"mov.f32 h{row}, m; neg.f32 r{row}, h{row}; mov.f32 s{row}, 0.0; "
    text += again + "DONE: "
    for row in (0, 1):
        text += f"mov.f32 ${rows + 2 * row}, h{row}; mov.f32 ${rows + 8 + 2 * row}, s{row}; "
    return text + "}"


@gluon.constexpr_function
def _constraints(n, pair):
    """Operands of `_softmax_asm`; outputs may not share registers with scores, which are read twice."""
    n = int(n)
    return ",".join((["=&r"] * (n // 2) if pair else ["=&f"] * n) + ["=&f"] * n + ["f"] * (3 * n))


@gluon.constexpr_function
def _pair(dtype):
    return {gl.float16: "f16x2", gl.bfloat16: "bf16x2"}.get(dtype, "")


@gluon.constexpr_function
def _types(dtype):
    return dtype, gl.float32


@gluon.constexpr_function
def _bits(n):
    return int(n).bit_length() - 1


@gluon.jit
def _entry(tile, J: gl.constexpr, THREAD: gl.constexpr):
    """`[64, 4]`: what `tile` `[64, n / 8, 4, 2]` holds at `j = J`, in the first of two places, without moving anything."""
    x, _ = gl.split(tile)
    BITS: gl.constexpr = _bits(tile.shape[1])
    for bit in gl.static_range(BITS):
        low, high = gl.split(x.reshape([64, 2, x.shape[1] // 2, 4]).permute([0, 2, 3, 1]))
        if (J >> (BITS - 1 - bit)) & 1:
            x = high
        else:
            x = low
    return gl.convert_layout(x.reshape([64, 4]), THREAD, assert_trivial=True)


@gluon.jit
def softmax(scores, reference, scale, FIRST: gl.constexpr, HALF: gl.constexpr, ROUNDED: gl.constexpr):
    """Weights `[64, n]` of `scores`, their sums, their reference, and the factor for earlier sums.

    All but the weights are `[64, 4]`, for each row and thread. Weights are relative to the reference that is returned. The
    factor turns sums that are relative to `reference` into sums that are relative to the new one. With `FIRST` rows take
    their maxima, and `reference` is a floor under these. Weights fit into `HALF`, and are of that type if they are to be
    `ROUNDED`, and of fp32 otherwise.
    """
    N: gl.constexpr = scores.shape[1] // 2
    DTYPE: gl.constexpr = HALF if ROUNDED else gl.float32
    PAIR: gl.constexpr = _pair(DTYPE)
    x = by_thread(scores)
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    weight, rows = gl.inline_asm_elementwise(
        _softmax_asm(N, PAIR, FIRST, _most(HALF)), _constraints(N, PAIR), [x, beside(reference, x), scale],
        _types(DTYPE), is_pure=True, pack=N,
    )  # fmt: skip
    weight = weight.reshape([64, scores.shape[1]])
    return weight, _entry(rows, 2, THREAD), _entry(rows, 0, THREAD), _entry(rows, 1, THREAD)


# With a softcap `c` weights lie between e^-c and e^c. Up to this one bf16 and fp32 hold these, and fp32 holds sums of 2^20 of
# them times values of up to 2^34; fp16 holds nothing of the kind.
_MOST_BOUNDED = 50.0
SHARE = gl.constexpr(4)  # of 8 powers, so many by a polynomial
_LARGEST = 1e38  # about the largest number of fp32: times infinity, a score of 0 would be NaN


def scale_and_cap(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """The factor of scores in the softmax, and what `capped` takes first; the factor is then the cap."""
    if softcap is None:
        return scale, None
    return softcap, min(scale / softcap, _LARGEST)


def reference_of(softcap: float | None, dtype: torch.dtype) -> float | None:
    """What stands for a row's maximum where a softcap bounds all logits; None where each row needs its own."""
    bounded = softcap is not None and softcap <= _MOST_BOUNDED and dtype == torch.bfloat16
    return 0.0 if bounded else None


@gluon.jit
def capped(scores, factor):
    """`tanh(scores * factor)` as the hardware has it, in one instruction: to 2^-11 of the result.

    A capped logit errs by as much of itself, whatever the cap: a quarter of what rounding it to bf16 may cost.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, $2; tanh.approx.f32 $0, t; }",
        "=f,f,f", [scores, factor], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _powers_asm(n, share):
    """PTX for `capped_powers`: operand $i becomes 2 to the power of $(n+i) times $(2n+i).

    By the order that `on_registers` states, a thread has the numbers 0, 1, 4 and 5 of 8 of one row, and of its keys 0, 1, 2 and
    3. Adding 1.5 * 2^23 + 1 (0f4B400001) to an exponent `x` with the whole part `m` leaves `m + 1` in the lowest bits. A
    polynomial of degree 3 (minimax) gives half of 2^(x - m), to 2^-13.7 of itself. Shifted to the exponent's place, `m + 1`
    is added to its bits. `sat` makes 0 of NaN, to which -inf has come by then, and its shifted bits are 0.
    """
    n, share = int(n), int(share)
    text = "{ .reg .f32 t, m, p; .reg .b32 i, k; "
    for i in range(n):
        key = i // 4 * 2 + i % 2
        x, scale = f"${n + i}", f"${2 * n + i}"
        if key * share % 8 < share:
            text += f"fma.rn.f32 t, {x}, {scale}, 0f4B400001; sub.f32 m, t, 0f4B400001; neg.f32 m, m; "
            text += f"fma.rn.f32 m, {x}, {scale}, m; fma.rn.f32 p, m, 0f3CE1FBB0, 0f3DF86F0D; "
            text += "fma.rn.f32 p, p, m, 0f3EB1798D; fma.rn.sat.f32 p, p, m, 0f3EFFFB49; "
            text += f"mov.b32 i, t; mov.b32 k, p; shl.b32 i, i, 23; add.s32 k, k, i; mov.b32 ${i}, k; "
        else:
            text += f"mul.f32 t, {x}, {scale}; ex2.approx.ftz.f32 ${i}, t; "
    return text + "}"


@gluon.constexpr_function
def _powers_constraints(n):
    return ",".join(["=&f"] * int(n) + ["f"] * (2 * int(n)))


@gluon.jit
def capped_powers(scores, scale):
    """`2^(scores * scale)` for scores from -1 to 1, or -inf, which gives 0; `scale` is at most `_MOST_BOUNDED` * log2(e).

    A polynomial takes `SHARE` of 8 keys. A key's place in its block alone decides which, so that no bit of a row depends on what
    else is in the call. A score that is NaN gives NaN or -inf, either of which makes the row's mean NaN.
    """
    N: gl.constexpr = scores.shape[1] // 2
    return gl.inline_asm_elementwise(
        _powers_asm(N, SHARE), _powers_constraints(N), [scores, scale], gl.float32, is_pure=True, pack=N
    )
