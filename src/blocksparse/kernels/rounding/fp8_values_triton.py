"""The Triton kernel of `fp8_values`: one launch, every token read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.hardware import converts_to_fp8
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.common.strides_triton import alike
from blocksparse.kernels.rounding.quantize import FP8_LIMIT
from blocksparse.kernels.rounding.quantize_triton import divided, largest_of, read_tokens, scale_of
from blocksparse.launch.launches import remembered

_TILE = 8192  # entries of values per program
_LIMIT = tl.constexpr(FP8_LIMIT)


def fp8_values_triton(v: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as of `fp8_values`."""
    D = v.shape[-1]
    B, H, slots = v.shape[:3] if index is None else index.shape
    v = v if v.stride(-1) == 1 else v.contiguous()
    if index is not None and index.stride(-1) != 1:
        index = index.contiguous()
    values = torch.empty((B, H, slots, D), dtype=torch.uint8, device=v.device)
    scales = torch.empty((B, H, slots), dtype=torch.float32, device=v.device)
    rows = rows_of(D)
    _kernel[(cdiv(slots, rows), H, B)](
        v, values, scales, index, v.stride()[:3], None if index is None else alike(*index.stride()[:2]),
        slots, H // v.shape[1],
        D=D, BLOCK_D=power_of_2(D), ROWS=rows, HARDWARE=converts_to_fp8(v),
    )  # fmt: skip
    return values.view(torch.float8_e4m3fn), scales


def rows_of(head_dim: int) -> int:
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
def _kernel(
    x_ptr, values_ptr, scales_ptr, index_ptr, x_strides, index_strides,
    slots, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = slot < slots
    x, there = read_tokens(
        x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, dims, D, BLOCK_D
    )
    out_h = b.to(tl.int64) * tl.num_programs(1) + h
    scale = scale_of(largest_of(x), _LIMIT)
    tl.store(scales_ptr + out_h * slots + slot, scale, mask=inside)
    quotient = divided(x, scale)
    if HARDWARE:
        code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = fp8_bits(quotient)
    values_at = values_ptr + (out_h * slots + slot)[:, None] * D + dims
    if BLOCK_D == D:
        tl.store(values_at, code, mask=inside[:, None])
    else:
        tl.store(values_at, code, mask=inside[:, None] & (dims < D))
