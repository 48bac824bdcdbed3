"""Order tokens by falling value inside each whole segment of `S` tokens.

    index[b, h, g * S + i] = g * S + (place of the i-th greatest value of segment g)

Equal values keep their order and NaN comes first, as a stable descending `torch.sort` has it; the tail of `N mod S`
tokens stays in place. A coarse sort compares only the upper bits of fp32 values, as many as fit into an int32 beside a
place in the segment: with S = 1024 these are sign, exponent and 13 bits of the fraction.

On GPUs, for fp32 values and `S` a power of two up to 4096, one launch sorts segments on chip, as int64, or as int32 if the
sort is coarse. Everything else takes the plain torch below, on whatever device the values are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus

_LONGEST = 4096


@on_gpus(torch.float32, where=lambda values, S, *_, **__: 1 < S <= _LONGEST and S & (S - 1) == 0)
def segment_sort(values: Tensor, S: int, coarse: bool = False) -> Tensor:
    """The token in every slot, `[B, H, N]` int32, for `values` `[B, H, N]`; the same on every device.

    Args:
        values: or `[B, H, P, N]`, parts of values, which are added up first.
        coarse: values count as equal if their `whole_numbers` are equal but for the lowest `log2(S)` bits.
    """
    values = values.sum(2) if values.ndim == 4 else values
    values = whole_numbers(values) >> (S - 1).bit_length() if coarse else values
    N, segments = values.shape[-1], values.shape[-1] // S
    order = values[..., : segments * S].unflatten(-1, (segments, S)).argsort(dim=-1, descending=True, stable=True)
    order = order + S * torch.arange(segments, device=values.device)[:, None]
    tail = torch.arange(segments * S, N, device=values.device).expand(*order.shape[:2], -1)
    return torch.cat((order.flatten(-2), tail), dim=-1).int()


def whole_numbers(values: Tensor) -> Tensor:
    """fp32 values as int32 that stand in the same order; both zeros become 0, and NaN becomes the greatest.

    The bits of floats from 0 up rise with them, but those of negative floats fall: all but the sign bit are flipped.
    """
    bits = (values.float() + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(values.isnan(), 0x7FFFFFFF)
