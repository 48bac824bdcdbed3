"""Values become fp8 (e4m3) on their way into slots, one scale for each token.

    v[b, h // (H / Hv), index[b, h, i]] ~ values[b, h, i] * scale[b, h, i]

An index of -1 is an empty slot, which gets zeros and a scale of zero. The kernel reads every token once and writes 8 bits
a number; its numbers are those of the plain torch below, but -0.0 may be 0.0.
"""

from __future__ import annotations

from torch import Tensor

from blocksparse.kernels.common.twins import FLOATS, on_gpus
from blocksparse.kernels.moving.gather_rows import gather_rows
from blocksparse.kernels.rounding.quantize import fp8_per_token


@on_gpus(*FLOATS)
def fp8_values(v: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp8 `[B, H, slots, D]` of `v` `[B, Hkv, N, D]` in slot order, and scales `[B, H, slots]` fp32.

    Args:
        index: `[B, H, slots]` int32, the value in each slot; `Hkv` divides `H`. None leaves values in place.
    """
    if index is not None:
        v = gather_rows.plain(v, index.clamp_min(0)).masked_fill((index < 0).unsqueeze(-1), 0.0)
    values, scale = fp8_per_token(v)
    return values.contiguous(), scale
