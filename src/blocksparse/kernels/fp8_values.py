"""Values become fp8 (e4m3) on their way into slots, one scale for each token.

    v[b, h // (H / Hv), index[b, h, i]] ~ values[b, h, i] * scale[b, h, i]

An index of -1 is an empty slot: zeros, and a scale of zero. On GPUs one launch reads every token once and writes 8
bits, the same numbers as the plain torch below (but -0.0 may be 0.0), which serves other devices and float64.

Transposed, values are `[B, H, D, slots]`, as Hopper's 8-bit products want their second operand. There the slots of
every 16 stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: a thread that holds weights as the product of
queries and keys left them in registers then holds them as the product with values takes them. Scales stay in the order
of slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.gather_rows import gather_rows_reference
from blocksparse.kernels.quantize import fp8_per_token
from blocksparse.kernels.sizes import cdiv

GROUP = 16  # slots that are reordered among themselves
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def fp8_values(v: Tensor, index: Tensor | None = None, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """fp8 `[B, H, slots, D]` of `v` `[B, Hkv, N, D]` in slot order, and scales `[B, H, slots]` fp32.

    Args:
        index: `[B, H, slots]` int32, the value in each slot; `Hkv` divides `H`. None leaves values in place.
        transposed: `[B, H, D, slots]` instead, reordered, with zeros up to a multiple of 16 slots.
    """
    if v.is_cuda and v.dtype in _DTYPES:
        from blocksparse.kernels.fp8_values_triton import fp8_values_triton

        return fp8_values_triton(v, index, transposed)
    return fp8_values_reference(v, index, transposed)


def fp8_values_reference(v: Tensor, index: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    if index is not None:
        v = gather_rows_reference(v, index.clamp_min(0)).masked_fill((index < 0).unsqueeze(-1), 0.0)
    values, scale = fp8_per_token(v)
    if not transposed:
        return values.contiguous(), scale
    slots, D = values.shape[2:]
    groups = cdiv(slots, GROUP)
    values = pad(values.view(torch.uint8), (0, 0, 0, groups * GROUP - slots)).unflatten(2, (groups, 2, 4, 2))
    values = values.permute(0, 1, 6, 2, 4, 3, 5).reshape(*scale.shape[:2], D, groups * GROUP)
    return values.view(torch.float8_e4m3fn), scale
