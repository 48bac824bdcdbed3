"""What the kernels that round to 8 bits share: tokens read through an index map, and their scales."""

from __future__ import annotations

import triton
import triton.language as tl

from blocksparse.kernels.common.strides_triton import head_at


@triton.jit
def read_tokens(
    x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, dims,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tokens in slots `slot` `[ROWS]` as fp32 `[ROWS, BLOCK_D]`, and which of them exist; zeros for the others."""
    there = inside
    token = slot
    if index_ptr is not None:
        token = tl.load(index_ptr + head_at(index_strides, b, h) + slot, mask=inside, other=-1)
        there = token >= 0
    x_at = x_ptr + b.to(tl.int64) * x_strides[0] + (h // heads_per_source).to(tl.int64) * x_strides[1]
    x_at = x_at + token.to(tl.int64)[:, None] * x_strides[2] + dims
    if BLOCK_D == D:
        x = tl.load(x_at, mask=there[:, None], other=0.0)
    else:
        x = tl.load(x_at, mask=there[:, None] & (dims < D), other=0.0)
    return x.to(tl.float32), there


@triton.jit
def earliest_token(index_ptr, index_strides, b, h, start, slots, STEP: tl.constexpr, ROWS: tl.constexpr):
    """The least token number in the `STEP` slots from `start` on; an empty slot counts as -1."""
    earliest = start
    if index_ptr is not None:
        place = tl.arange(0, ROWS)[None, :]
        index_at = index_ptr + head_at(index_strides, b, h)
        inside = (place < STEP) & (start + place < slots)
        token = tl.load(index_at + start + place, mask=inside, other=2147483647)
        earliest = tl.min(tl.min(token, 1), 0)
    return earliest


@triton.jit
def largest_of(x):
    """The largest absolute entry of each row, as the bits of a float in an int32.

    Without their sign, floats stand in the same order as their bits, and a NaN is larger than any number.
    """
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of(largest, LIMIT: tl.constexpr):
    """The scale by which `largest`, given as `largest_of` does, is divided to become `LIMIT`.

    It is 0 for a `largest` below 1e-30, and NaN for infinity: the difference added to it is 0, or NaN if `largest` is not
    finite.
    """
    largest = largest.to(tl.float32, bitcast=True)
    return tl.where(largest < 1e-30, 0.0, tl.div_rn(largest, LIMIT) + (largest - largest))


@triton.jit
def divided(x, scale):
    """Rows `x` divided by their scales, to the bit as division rounds, with one division for a row (Markstein 1990).

    A product with the inverse is off by less than one step; each of two corrections adds the remainder, which a fused
    multiply-add gives exactly, times the inverse. Unlike division this makes 0.0 of -0.0, and of rows whose scale is 0.
    """
    lift = tl.where(scale < 1e-20, 18446744073709551616.0, 1.0)  # 2^64: else remainders could underflow
    divisor = tl.where(scale == 0.0, 1.0, scale * lift)
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, divisor))[:, None]
    divisor = -divisor[:, None]
    x = x * lift[:, None]
    quotient = x * inverse
    quotient = _fma(_fma(quotient, divisor, x), inverse, quotient)  # off by less than one step
    return _fma(_fma(quotient, divisor, x), inverse, quotient)


@triton.jit
def _fma(x, y, z):
    """`x * y + z`, rounded once. It is computed in float64 in the interpreter, whose `tl.fma` rounds twice."""
    if INTERPRETED:
        result = (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(x, y + tl.zeros_like(x), z)
    return result


INTERPRETED = tl.constexpr(not isinstance(_fma, triton.JITFunction))
