"""The Triton kernel of `fp8_values`: one launch, every token read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.hardware import converts_to_fp8, device_of
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.common.strides_triton import alike
from blocksparse.kernels.rounding.quantize import FP8_LIMIT
from blocksparse.kernels.rounding.quantize_triton import divided, largest_of, read_tokens, scale_of

_TILE = 8192  # entries per program
_LIMIT = tl.constexpr(FP8_LIMIT)


def fp8_values_triton(v: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as of `fp8_values`."""
    D = v.shape[-1]
    B, H, slots = v.shape[:3] if index is None else index.shape
    v = v if v.stride(-1) == 1 else v.contiguous()
    if index is not None and index.stride(-1) != 1:
        index = index.contiguous()
    values = torch.empty((B, H, slots, D), dtype=torch.uint8, device=v.device)
    scales = torch.empty((B, H, slots), dtype=torch.float32, device=v.device)
    rows = rows_of(D)
    with device_of(v):
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
    """The byte of `x` in e4m3, `|x|` at most 448 or a NaN, ties to even; by arithmetic, for those without hardware."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
    # 3 bits of mantissa stay; exponents start 120 later.
    normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - 960
    # At 2^14 floats are multiples of 2^-9, as fp8 is below 2^-6.
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, subnormal, normal), 0x7F)  # 0x7F is NaN
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)


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
