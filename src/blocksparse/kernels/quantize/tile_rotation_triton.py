"""The Triton kernels of `int8_query_tiles` and `int8_key_tiles`: rotation, then rounding."""

from __future__ import annotations

import triton
import triton.language as tl

from blocksparse.kernels.common.device_functions import rows_of
from blocksparse.kernels.quantize.tokens import INT8_LIMIT
from blocksparse.kernels.quantize.tokens_triton import INTERPRETED, largest_of, scale_of, tokens_in
from blocksparse.launch.launches import remembered


@triton.jit
def inverse_of(scale):
    """Inverses of scales `[n]` as `[n, 1]`, 0 where the scale is 0."""
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))[:, None]


@triton.jit
def of_groups(largest, ROWS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """The largest of each group, `[tiles, 4]`; runs of `RUN` entries of `largest` `[ROWS]` belong to the groups in turn."""
    largest = tl.reshape(largest, [ROWS // TILE, TILE // (4 * RUN), 4, RUN])
    return tl.max(tl.max(largest, 3), 1)


@triton.jit
def of_tokens(x, ROWS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """Numbers of groups `[tiles, 4]`, repeated for each of their tokens, `[ROWS]`; undoes `of_groups`' order."""
    x = tl.broadcast_to(x[:, None, :, None], [ROWS // TILE, TILE // (4 * RUN), 4, RUN])
    return tl.reshape(x, [ROWS])


@triton.jit
def store_groups(ptr, x, head, part, slots, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Stores the scales `x` `[tiles, 4]` of the tiles in `ROWS` slots, which are the `part`-th such run of slots."""
    tiles = tl.cdiv(slots, TILE)
    tile = part * (ROWS // TILE) + tl.arange(0, ROWS // TILE)[:, None]
    tl.store(ptr + (head * tiles + tile) * 4 + tl.arange(0, 4)[None, :], x, mask=tile < tiles)


_INT8_LIMIT = tl.constexpr(INT8_LIMIT)


@triton.jit
def _sign(i, j):
    """Entries `(-1)^popcount(i & j)` of the Hadamard matrix, for `i` and `j` below 256: exclusive ors leave a parity."""
    bits = i & j
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    return tl.where(((bits ^ (bits >> 1)) & 1) != 0, -1.0, 1.0)


@triton.jit
def _matrix(dtype: tl.constexpr, HALF: tl.constexpr):
    """The Hadamard matrix of half the size, in the dtype in which `_product` multiplies."""
    sign = _sign(tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :])
    if dtype == tl.float32 and not INTERPRETED:
        matrix = sign.to(tl.bfloat16)
    else:
        matrix = sign.to(dtype)
    return matrix


@triton.jit
def _rotated_mean(mean_ptr, b, h, heads_per_mean, matrix, D: tl.constexpr, ROWS: tl.constexpr):
    """A mean times the whole Hadamard matrix, as two halves `[1, D / 2]`."""
    HALF: tl.constexpr = D // 2
    at = mean_ptr + (b.to(tl.int64) * (tl.num_programs(1) // heads_per_mean) + h // heads_per_mean) * D
    # The matrix comes out of a product with the identity, and so lies in threads as a product of tokens does. Its sums then
    # lie where such a product has its columns; in another layout each thread would keep whole rows.
    i = tl.arange(0, ROWS)[:, None]
    sign = tl.dot((i == tl.arange(0, HALF)[None, :]).to(matrix.dtype), matrix, input_precision="ieee")
    even = tl.sum(tl.load(at + i, mask=i < HALF, other=0.0) * sign, 0)[None, :]
    odd = tl.sum(tl.load(at + HALF + i, mask=i < HALF, other=0.0) * sign, 0)[None, :]
    return even + odd, even - odd


@triton.jit
def _product(x, matrix, dtype: tl.constexpr):
    """Tokens of dtype `dtype`, held in fp32, times the matrix. Entries of the matrix are 1 or -1: all products are exact."""
    if dtype == tl.float32 and not INTERPRETED:
        # A significand of 24 bits is the sum of three of 8, which matrix units multiply. The interpreter takes fp32 itself.
        high = x.to(tl.bfloat16)
        x = x - high.to(tl.float32)
        middle = x.to(tl.bfloat16)
        low = (x - middle.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(high, matrix, tl.dot(middle, matrix, tl.dot(low, matrix)))
    else:
        result = tl.dot(x.to(dtype), matrix, input_precision="ieee")
    return result


@triton.jit
def _rotated(x_ptr, x_strides, b, h, heads_per_source, token, there, matrix, D: tl.constexpr):
    """Tokens times the whole Hadamard matrix [[M, M], [M, -M]], as the first and the second half of the entries."""
    HALF: tl.constexpr = D // 2
    source_h = h // heads_per_source
    first = rows_of(x_ptr, x_strides, b, source_h, token, there, HALF, HALF, False).to(tl.float32)
    second = rows_of(x_ptr + HALF, x_strides, b, source_h, token, there, HALF, HALF, False).to(tl.float32)
    first = _product(first, matrix, x_ptr.dtype.element_ty)
    second = _product(second, matrix, x_ptr.dtype.element_ty)
    return first + second, first - second


@triton.jit
def _whole(x):
    """`x` rounded to even, and raised by 1.5 * 2^23, so that its lowest byte is the number in two's complement."""
    return x + 12582912.0


@triton.jit
def _store(values_ptr, first, second, at, inside, D: tl.constexpr):
    """Stores the lowest bytes of both halves of rows, in another shape than the loads, so that threads are arranged anew."""
    for half in tl.static_range(2):
        values = (first, second)[half].to(tl.int32, bitcast=True).to(tl.int8)[:, None, :]
        values_at = values_ptr + half * (D // 2) + at[:, None, None] * D + tl.arange(0, D // 2)[None, None, :]
        tl.store(values_at, values, mask=inside[:, None, None])


@triton.jit
def _larger(first, second):
    """The largest absolute entry of each token, as `largest_of` gives it, from both halves."""
    return tl.maximum(largest_of(first), largest_of(second))


@remembered
@triton.jit(do_not_specialize=["slots", "steps", "early"])
def query_kernel(
    x_ptr, index_ptr, mean_ptr, heads_per_mean, values_ptr, scale_ptr, taken_ptr, x_strides, index_strides,
    slots, heads_per_source, steps, root, factor, early, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    matrix = _matrix(x_ptr.dtype.element_ty, D // 2)
    if mean_ptr is not None:
        mean_first, mean_second = _rotated_mean(mean_ptr, b, h, heads_per_mean, matrix, D, ROWS)
    for step in range(steps):
        slot = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = slot < slots
        token, there = tokens_in(index_ptr, index_strides, b, h, slot, inside)
        first, second = _rotated(x_ptr, x_strides, b, h, heads_per_source, token, there, matrix, D)
        scale = scale_of(_larger(first, second), _INT8_LIMIT)
        inverse = inverse_of(scale)
        first, second = _whole(first * inverse), _whole(second * inverse)
        at = (b.to(tl.int64) * tl.num_programs(1) + h) * slots + slot
        tl.store(scale_ptr + at, scale * root, mask=inside)
        _store(values_ptr, first, second, at, inside, D)
        if mean_ptr is not None:
            taken = (first - 12582912.0) * mean_first + (second - 12582912.0) * mean_second
            taken = tl.sum(taken, 1) * (scale * root * root * factor)
            tl.store(taken_ptr + at, tl.where(token < early, 0.0, taken), mask=inside)


@remembered
@triton.jit(do_not_specialize=["slots", "steps"])
def key_kernel(
    x_ptr, index_ptr, mean_ptr, heads_per_mean, values_ptr, tile_scale_ptr, token_scale_ptr, x_strides, index_strides,
    slots, heads_per_source, steps, root, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    matrix = _matrix(x_ptr.dtype.element_ty, D // 2)
    if mean_ptr is not None:
        mean_first, mean_second = _rotated_mean(mean_ptr, b, h, heads_per_mean, matrix, D, ROWS)
    H = tl.num_programs(1)
    head = b.to(tl.int64) * H + h
    for step in range(steps):
        part = tl.program_id(0) * steps + step
        slot = part * ROWS + tl.arange(0, ROWS)
        inside = slot < slots
        token, there = tokens_in(index_ptr, index_strides, b, h, slot, inside)
        first, second = _rotated(x_ptr, x_strides, b, h, heads_per_source, token, there, matrix, D)
        scale = scale_of(_larger(first, second), _INT8_LIMIT)
        tl.store(token_scale_ptr + head * slots + slot, scale * root, mask=inside)
        inverse = inverse_of(scale)
        at = ((b.to(tl.int64) * 2 + 1) * H + h) * slots + slot
        _store(values_ptr, _whole(first * inverse), _whole(second * inverse), at, inside, D)
        if mean_ptr is not None:
            first = tl.where(there[:, None], first - mean_first, 0.0)
            second = tl.where(there[:, None], second - mean_second, 0.0)
        scale = scale_of(of_groups(_larger(first, second), ROWS, TILE, 2), _INT8_LIMIT)
        store_groups(tile_scale_ptr, scale * root, head, part, slots, ROWS, TILE)
        inverse = inverse_of(of_tokens(scale, ROWS, TILE, 2))
        at = (b.to(tl.int64) * 2 * H + h) * slots + slot
        _store(values_ptr, _whole(first * inverse), _whole(second * inverse), at, inside, D)
