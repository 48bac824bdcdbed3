"""The online softmax, in base 2: sums of weights relative to the largest score met so far (arXiv 1805.02867).

A masked score is -inf, and all scores of a row may be: then its maximum is -inf, and its sum 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(scores, highest, MASKED: tl.constexpr):
    """With one more tile of scores `[rows, n]`: the new maximum of each row, weights, and by what old sums are multiplied.

    Without `MASKED` no maximum may be -inf.
    """
    new = tl.maximum(highest, tl.max(scores, 1))
    if MASKED:
        origin = tl.where(new == float("-inf"), 0.0, new)
    else:
        origin = new
    return new, tl.exp2(scores - origin[:, None]), tl.exp2(highest - origin)


@triton.jit
def joined(log_sum_ptr, parts, ROWS: tl.constexpr):
    """The base-2 logarithms of `ROWS` sums, each in as many parts, whose logarithms are `[parts, ROWS]`; 0 where all are -inf."""
    row = tl.arange(0, ROWS)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in range(parts):
        log_sum = tl.load(log_sum_ptr + part * ROWS + row)
        new = tl.maximum(peak, log_sum)
        origin = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(peak - origin) + tl.exp2(log_sum - origin)
        peak = new
    return peak + tl.log2(tl.where(total == 0.0, 1.0, total))


@triton.jit
def log_sum(highest, total):
    """The natural logarithm of each row's sum of weights, whatever they are relative to; -inf where it is 0."""
    sums = (highest + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453  # ln 2
    return tl.where(total == 0.0, float("-inf"), sums)
