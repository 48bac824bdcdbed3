"""Device functions that Triton kernels share.

Triton specialises a kernel on each integer argument: it compiles again when the integer becomes 1, a multiple of 16, or
neither. It can be told not to specialise on an argument, but always does so on entries of a tuple. Strides of q, k and v
are multiples of the head dim, and keep their kind whatever the length; those of lists, masks and scores do not. So these
are multiplied by 16 (`alike`), and the kernel divides by 16 again (`head_at`).

The online softmax is in base 2: sums of weights are relative to the largest score met so far (arXiv 1805.02867). A masked
score is -inf, and all scores of a row may be: then its maximum is -inf, and its sum 0.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import REMEMBERED, Heads


def alike(*strides: int) -> tuple[int, ...]:
    """Sixteen times each stride: all are then multiples of 16, and the kernel is compiled once."""
    return tuple([16 * stride for stride in strides])


def head_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of the first two axes, 0 for an axis of one entry, which holds for all."""
    return _head_strides(x.shape, x.stride())


@functools.lru_cache(maxsize=REMEMBERED)  # shapes alone decide them, and kernels ask for them in every call
def _head_strides(shape: tuple[int, ...], of_memory: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([0 if size == 1 else stride for size, stride in zip(shape[:2], of_memory[:2], strict=True)])


@triton.jit
def head_at(strides, b, h):
    """The offset at which a head begins, from strides as `alike` gives them."""
    return b.to(tl.int64) * (strides[0] >> 4) + h.to(tl.int64) * (strides[1] >> 4)


@triton.jit
def rows_of(ptr, strides, b, h, at, there, D: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """Rows `at` of head `(b, h)` of a tensor `[B, H, N, D]`, `[len(at), BLOCK_D]`; columns past `D` are zeros.

    So are rows that are not `there`, unless `WHOLE` says that all are. `h` may be a head for each row.
    """
    dims = tl.arange(0, BLOCK_D)
    source = ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + at.to(tl.int64) * strides[2]
    source = source[:, None] + dims[None, :]
    if WHOLE and BLOCK_D == D:
        rows = tl.load(source)
    elif WHOLE:
        rows = tl.load(source, mask=(dims < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        rows = tl.load(source, mask=there[:, None], other=0.0)
    else:
        rows = tl.load(source, mask=there[:, None] & (dims < D)[None, :], other=0.0)
    return rows


@triton.jit
def store_rows(out_ptr, x, head, M, row, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores `x` as rows `row` of head `head` of a contiguous tensor `[B * H, M, D]`, those that are `there`."""
    dims = tl.arange(0, BLOCK_D)
    target = out_ptr + (head * M + row)[:, None] * D + dims[None, :]
    if BLOCK_D == D:
        tl.store(target, x, mask=there[:, None])
    else:
        tl.store(target, x, mask=there[:, None] & (dims < D)[None, :])


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


def asked(heads: Heads) -> tuple[Tensor | None, Tensor | None, int | None]:
    """The first arguments of `not_asked`."""
    if heads is None:
        return None, None, None
    return heads.number.contiguous(), heads.bound, head_strides(heads.bound)[1]


@triton.jit
def not_asked(number_ptr, bound_ptr, bound_stride, OTHERS: tl.constexpr = False):
    """Whether no caller asks for this program's head: axis 1 of the programs is the head, and axis 2 the batch entry."""
    head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    below = tl.load(number_ptr + head).to(tl.float64) < tl.load(bound_ptr + tl.program_id(1) * bound_stride)
    if OTHERS:
        found = below
    else:
        found = below == 0
    return found
