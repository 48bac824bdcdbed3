"""The Triton kernels of `quantize/tokens.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, head_at, rows_of, store_rows
from blocksparse.kernels.common.hardware import converts_to_fp8
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.quantize.tokens import FP8_LIMIT, INT8_LIMIT
from blocksparse.launch.launches import remembered


@triton.jit
def tokens_in(index_ptr, index_strides, b, h, slot, inside):
    """The token in each slot, and whether there is one."""
    token, there = slot, inside
    if index_ptr is not None:
        token = tl.load(index_ptr + head_at(index_strides, b, h) + slot, mask=inside, other=-1)
        there = token >= 0
    return token, there


@triton.jit
def read_tokens(
    x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Tokens in slots `slot` `[ROWS]` as fp32 `[ROWS, BLOCK_D]`, and which of them exist; zeros for the others."""
    token, there = tokens_in(index_ptr, index_strides, b, h, slot, inside)
    x = rows_of(x_ptr, x_strides, b, h // heads_per_source, token, there, D, BLOCK_D, False)
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


_TILE = 8192  # entries per program, if every token has its own scale
_BLOCK_TILE = 16384  # entries that a program holds at a time, if the tokens of a block share a scale
_INT8_TOKENS_LIMIT = tl.constexpr(INT8_LIMIT)


def int8_queries_triton(
    q: Tensor,
    index: Tensor | None,
    block: int,
    lead: int,
    shared: bool,
    mean: Tensor | None = None,
    scale: float = 1.0,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel; arguments as in `int8_queries`."""
    taken = None
    if mean is not None:
        taken = torch.empty(q.shape[:3] if index is None else index.shape, dtype=torch.float32, device=q.device)
    values, q_scale = _launch(q, index, block, lead, shared, mean, 0, taken, scale, plain)
    return values, q_scale, taken


def int8_keys_triton(
    k: Tensor, index: Tensor | None, block: int, shared: bool, mean: Tensor | None = None, plain_below: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as in `int8_keys`."""
    return _launch(k, index, block, 0, shared, mean, plain_below, None, 1.0, None)


def _launch(
    x: Tensor,
    index: Tensor | None,
    block: int,
    lead: int,
    shared: bool,
    mean: Tensor | None,
    plain_below: int,
    taken: Tensor | None,
    factor: float,
    plain: Tensor | None,
) -> tuple[Tensor, Tensor]:
    D, copies = x.shape[-1], 2 if plain_below else 1
    B, H, slots = x.shape[:3] if index is None else index.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if index is not None and index.stride(-1) != 1:
        index = index.contiguous()
    mean = None if mean is None else mean.contiguous()
    plain = None if plain is None else plain.contiguous().expand(B, H, -1)
    values = torch.empty((B, copies * H, slots, D), dtype=torch.int8, device=x.device)
    scales = torch.empty(values.shape[:3], dtype=torch.float32, device=x.device)
    rows, warps = tile_of(D, block if shared else 0)
    step = block if shared else rows
    _int8_tokens_kernel[(copies * cdiv(lead + slots, step), H, B)](
        x, values, scales, index, mean, taken, plain,
        x.stride()[:3], *(None if y is None else alike(*y.stride()[:2]) for y in (index, plain)),
        slots, lead, plain_below, factor,
        D=D, BLOCK_D=power_of_2(D), STEP=step, ROWS=rows, BLOCK=block, SHARED=shared, COPIES=copies,
        HEADS_PER_SOURCE=H // x.shape[1], HEADS_PER_MEAN=1 if mean is None else H // mean.shape[1],
        num_warps=warps,
    )  # fmt: skip
    return values, scales


def tile_of(head_dim: int, block: int) -> tuple[int, int]:
    """How many tokens a program holds at a time, and its warps; `block` is 0 if every token has its own scale."""
    block_d = power_of_2(head_dim)
    if block == 0:
        return max(_TILE // block_d, 1), 4
    return max(min(_BLOCK_TILE // block_d, power_of_2(block)), 1), 8


@triton.jit
def _tokens(
    x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, start, first, slots, centre,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tokens `[ROWS, BLOCK_D]` fp32 less `centre`; their slots, which this program writes, and which hold a token."""
    place = first + tl.arange(0, ROWS)
    slot = start + place
    inside = (place < STEP) & (slot >= 0) & (slot < slots)
    x, there = read_tokens(
        x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, D, BLOCK_D
    )
    if centre is not None:
        x = tl.where(there[:, None], x - centre, 0.0)
    return x, slot, inside, there


@remembered
@triton.jit(do_not_specialize=["slots", "lead", "plain_below"])
def _int8_tokens_kernel(
    x_ptr, values_ptr, scales_ptr, index_ptr, mean_ptr, taken_ptr, plain_ptr,  # what is None is compiled away
    x_strides, index_strides, plain_strides,
    slots, lead, plain_below, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, COPIES: tl.constexpr,
    HEADS_PER_SOURCE: tl.constexpr, HEADS_PER_MEAN: tl.constexpr,
):  # fmt: skip
    # The programs of both copies of the same tokens are neighbours, so that the second one reads them from the cache.
    copy = tl.program_id(0) % COPIES
    start = tl.program_id(0) // COPIES * STEP - lead
    h = tl.program_id(1)
    b = tl.program_id(2)
    H = tl.num_programs(1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    mean = None
    centre = None
    if mean_ptr is not None:
        mean_at = mean_ptr + (b.to(tl.int64) * (H // HEADS_PER_MEAN) + h // HEADS_PER_MEAN) * D
        # Of the second copy no column; a mask of all columns and a scalar one is refused by 3.9's interpreter.
        mean = tl.load(mean_at + dims, mask=dims < tl.where(copy == 0, D, 0), other=0.0)  # [1, BLOCK_D]
        if taken_ptr is None:
            centre = mean
    largest = tl.zeros([1], tl.int32)
    end = STEP
    if COPIES == 2 and STEP <= ROWS:
        earliest = earliest_token(index_ptr, index_strides, b, h, start, slots, STEP, ROWS)
        end = tl.where((copy == 1) & (earliest >= plain_below), 0, STEP)  # no kernel reads this block
    if SHARED:
        for first in range(0, end, ROWS):
            x, slot, inside, there = _tokens(
                x_ptr, x_strides, index_ptr, index_strides, b, h, HEADS_PER_SOURCE, start, first, slots, centre,
                D, BLOCK_D, STEP, ROWS,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(largest_of(x)[None, :], 1))
    out_h = (b.to(tl.int64) * COPIES + copy) * H + h
    for first in range(0, end, ROWS):  # if one round holds all tokens, none is read again
        x, slot, inside, there = _tokens(
            x_ptr, x_strides, index_ptr, index_strides, b, h, HEADS_PER_SOURCE, start, first, slots, centre,
            D, BLOCK_D, STEP, ROWS,
        )  # fmt: skip
        if taken_ptr is not None:
            taken = tl.sum(x * mean, 1) * factor
            if plain_ptr is not None:
                plain_at = plain_ptr + head_at(plain_strides, b, h)
                plain = tl.load(plain_at + (slot + lead) // BLOCK, mask=inside, other=0)
                taken = tl.where(plain != 0, 0.0, taken)
            tl.store(taken_ptr + out_h * slots + slot, taken, mask=inside)
        if SHARED:
            scale = tl.where(there, scale_of(largest, _INT8_TOKENS_LIMIT), 0.0)
        else:
            scale = scale_of(largest_of(x), _INT8_TOKENS_LIMIT)
        tl.store(scales_ptr + out_h * slots + slot, scale, mask=inside)
        # Around 1.5 * 2^23 (12582912) neighbouring floats differ by 1, so the sum is rounded to a whole number, ties to
        # even. Its lowest byte is that number in two's complement, since that of 12582912 (0xC00000 in the mantissa) is 0.
        rounded = (divided(x, scale) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        store_rows(values_ptr, rounded, out_h, slots, slot, inside, D, BLOCK_D)


_FP8_VALUES_LIMIT = tl.constexpr(FP8_LIMIT)


def fp8_values_triton(v: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as in `fp8_values`."""
    D = v.shape[-1]
    B, H, slots = v.shape[:3] if index is None else index.shape
    v = v if v.stride(-1) == 1 else v.contiguous()
    if index is not None and index.stride(-1) != 1:
        index = index.contiguous()
    values = torch.empty((B, H, slots, D), dtype=torch.uint8, device=v.device)
    scales = torch.empty((B, H, slots), dtype=torch.float32, device=v.device)
    rows = tokens_of(D)
    _fp8_values_kernel[(cdiv(slots, rows), H, B)](
        v, values, scales, index, v.stride()[:3], None if index is None else alike(*index.stride()[:2]),
        slots, H // v.shape[1],
        D=D, BLOCK_D=power_of_2(D), ROWS=rows, HARDWARE=converts_to_fp8(v),
    )  # fmt: skip
    return values.view(torch.float8_e4m3fn), scales


def tokens_of(head_dim: int) -> int:
    """Tokens per program."""
    return max(_TILE // power_of_2(head_dim), 16)


@triton.jit
def fp8_bits(x):
    """The byte of fp32 `x` in e4m3, by integer arithmetic, for GPUs that cannot convert; `|x|` is at most 448, or `x` a NaN.

    e4m3 has a sign, 4 bits of exponent (bias 7) and 3 of mantissa; fp32 has 8 bits of exponent (bias 127) and 23. Ties
    are rounded to even.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
    # From 2^-6 on: of the mantissa 3 bits stay, so 20 are rounded off; adding half a step less one, and the lowest bit that
    # stays, makes ties even. Biases differ by 120, which 960 is above 3 bits of mantissa.
    normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - 960
    # Below 2^-6 (0x3C800000) e4m3 has multiples of 2^-9. From 2^14 to 2^15 floats have the same step, so adding 2^14 (16384,
    # whose bits are 0x46800000) rounds to it, and the difference of the bits is the multiple.
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, subnormal, normal), 0x7F)  # 0x7F is NaN
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)


@remembered
@triton.jit(do_not_specialize=["slots"])
def _fp8_values_kernel(
    x_ptr, values_ptr, scales_ptr, index_ptr, x_strides, index_strides,
    slots, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = slot < slots
    x, there = read_tokens(
        x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, D, BLOCK_D
    )
    out_h = b.to(tl.int64) * tl.num_programs(1) + h
    scale = scale_of(largest_of(x), _FP8_VALUES_LIMIT)
    tl.store(scales_ptr + out_h * slots + slot, scale, mask=inside)
    quotient = divided(x, scale)
    if HARDWARE:
        code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = fp8_bits(quotient)
    store_rows(values_ptr, code, out_h, slots, slot, inside, D, BLOCK_D)
