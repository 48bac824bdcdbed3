"""The softcap of logits on Hopper, and rows that need no maximum because it bounds them.

A capped logit takes a `tanh` and a power of 2, both from a unit that makes 16 results in a clock, while the units for sums
and products make 128. So where no maximum is looked for, `capped_powers` takes some of the powers on these (its `SHARE`).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
    3. The polynomial takes the whole part `m` of an exponent `x` by adding 1.5 * 2^23 + 1 (0f4B400001), which leaves `m + 1` in the
    lowest bits, and half of 2^(x - m) from a polynomial of degree 3, to 2^-13.7 of itself (minimax). Shifted to the
    exponent's place, `m + 1` is added to its bits. `sat` makes 0 of NaN, to which -inf has come by then, and its shifted bits are 0.
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
