"""The softcap of logits on Hopper, and rows that need no maximum because it bounds them."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.attention.hopper.rows import LOWEST, row_max

# With a softcap `c` weights lie between e^-c and e^c. Up to this one bf16 and fp32 hold these, and fp32 holds sums of 2^20 of
# them times values of up to 2^34; fp16 holds nothing of the kind.
_MOST_BOUNDED = 50.0
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
def first_maximum(scores, scale, reference, ROW: gl.constexpr):
    """The maximum of each row of a first tile, `[64]`, or `reference`, which no later tile changes."""
    if reference is None:
        highest = gl.maximum(row_max(scores, ROW) * scale, LOWEST)
    else:
        highest = gl.zeros([64], gl.float32, ROW) + reference
    return highest


@gluon.jit
def capped(scores, factor):
    """`tanh(scores * factor)` as the hardware has it, in one instruction: to 2^-11 of the result.

    A capped logit errs by as much of itself, whatever the cap: a quarter of what rounding it to bf16 may cost.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, $2; tanh.approx.f32 $0, t; }",
        "=f,f,f", [scores, factor], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
