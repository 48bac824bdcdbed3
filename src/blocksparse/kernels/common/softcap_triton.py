"""The softcap of logits, in arithmetic that every target of Triton has, and its interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(x, cap):
    """`cap * tanh(x)`, as exact as fp32 is; `cap` and `-cap` of infinities, and NaN of NaN.

    With `t = exp(-2|x|)`, which cannot overflow, tanh(|x|) is (1 - t) / (1 + t). Near 0 the difference would cancel, so
    there stands the polynomial of Cephes' tanhf (S. Moshier, relative error below 1.3e-7 for |x| < 0.625).
    """
    square = x * x
    series = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    series = ((series + 1.33314422036e-1) * square - 3.33332819422e-1) * square
    t = tl.exp2(tl.abs(x) * -2.8853900817779268)  # -2 log2(e)
    far = (1.0 - t) / (1.0 + t)
    return cap * tl.where(tl.abs(x) < 0.625, series * x + x, tl.where(x < 0.0, -far, far))
