"""The Triton kernel of `fp8_value_tiles`."""

from __future__ import annotations

import triton
import triton.language as tl

from blocksparse.kernels.rounding.fp8_values_triton import fp8_bits
from blocksparse.kernels.rounding.quantize import FP8_LIMIT, LEAST_LOG2
from blocksparse.kernels.rounding.quantize_triton import largest_of, read_tokens, scale_of
from blocksparse.kernels.rounding.tile_groups_triton import inverse_of, of_groups, of_tokens, store_groups
from blocksparse.launch.launches import remembered

_FP8_LIMIT = tl.constexpr(FP8_LIMIT)
_LEAST = tl.constexpr(2.0**LEAST_LOG2)


@triton.jit
def _fp8_scale(largest):
    scale = scale_of(largest, _FP8_LIMIT)
    return tl.where(scale < _LEAST, _LEAST, scale)


@triton.jit
def _values_at(source, slot, inside, at, inverse_at, D: tl.constexpr):
    """Values in the slots `slot`, their largest entries, and the inverses of their tokens' scales.

    Stores the logarithms of these scales at `at`, and the inverses `inverse_at` entries later.
    """
    x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source = source
    dims = tl.arange(0, D)[None, :]
    x, there = read_tokens(
        x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, dims, D, D
    )
    largest = largest_of(x)
    scale = _fp8_scale(largest)
    inverse = inverse_of(scale)
    tl.store(at, tl.log2(scale), mask=inside)
    tl.store(at + inverse_at, tl.reshape(inverse, slot.shape), mask=inside)
    return x, largest, inverse


@triton.jit
def _codes(x0, x1, x2, x3, HARDWARE: tl.constexpr):
    """Four numbers rounded to fp8, as the bytes of an int32, that of `x0` lowest."""
    if HARDWARE:
        # One instruction rounds two numbers. These are numbers that stay neighbours, so that no byte has to move.
        codes = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        codes = fp8_bits(x0).to(tl.int32) | fp8_bits(x1).to(tl.int32) << 8
        codes |= fp8_bits(x2).to(tl.int32) << 16 | fp8_bits(x3).to(tl.int32) << 24
    return codes


@remembered
@triton.jit(do_not_specialize=["slots"])
def value_kernel(
    x_ptr, index_ptr, mean_ptr, heads_per_mean, values_ptr, tile_log2_ptr, of_tokens_ptr, x_strides, index_strides,
    slots, heads_per_source, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    H = tl.num_programs(1)
    head = b.to(tl.int64) * H + h
    # Four neighbouring places hold slots of one group: `slot`, and those 1, 8 and 9 later (`fp8_value_tiles` has the order).
    # Their bytes make one int32, so the transposition moves them together.
    four = tl.program_id(0) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    slot = four // 4 * 16 + four % 4 * 2
    left, at = slots - slot, of_tokens_ptr + (head + b.to(tl.int64) * H) * slots + slot
    further = H.to(tl.int64) * slots
    source = x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source
    x0, largest0, inverse0 = _values_at(source, slot, left > 0, at, further, D)
    x1, largest1, inverse1 = _values_at(source, slot + 1, left > 1, at + 1, further, D)
    x2, largest2, inverse2 = _values_at(source, slot + 8, left > 8, at + 8, further, D)
    x3, largest3, inverse3 = _values_at(source, slot + 9, left > 9, at + 9, further, D)
    largest = tl.maximum(tl.maximum(largest0, largest1), tl.maximum(largest2, largest3))
    tile_scale = _fp8_scale(of_groups(largest, ROWS // 4, TILE // 4, 1))
    store_groups(tile_log2_ptr, tl.log2(tile_scale), head, tl.program_id(0), slots, ROWS, TILE)
    inverse = inverse_of(of_tokens(tile_scale, ROWS // 4, TILE // 4, 1))
    down = tl.arange(0, D)[:, None]
    fours = tl.cdiv(slots, 16) * 4
    for copy in tl.static_range(2):
        if copy == 1:
            codes = _codes(
                x0 * inverse0, x1 * inverse1, x2 * inverse2, x3 * inverse3, HARDWARE,
            )  # fmt: skip
        else:
            codes = _codes(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse, HARDWARE)
        values_at = values_ptr + (((b.to(tl.int64) * 2 + copy) * H + h) * D + down) * fours + four[None, :]
        tl.store(values_at, tl.trans(codes), mask=(four < fours)[None, :])
