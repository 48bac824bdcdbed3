"""Rounding to 8 bits in plain torch, as `int8_tokens.py`, `fp8_values.py` and `tile_operands.py` use it.

    x[..., i, :] ~ values[..., i, :] * scale[..., i]

int8 is for queries and keys (SageAttention), whose products int32 adds exactly; fp8 (e4m3) is for values. A
scale per token depends on nothing but that token, so no row learns of a later token. Scales are fp32. A token
whose entries are all smaller than 1e-30 counts as zero; the scale of one with an infinity or a NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

INT8_LIMIT = 127.0
FP8_LIMIT = 448.0
LEAST_LOG2 = -100.0  # log2 of the least scale in `fp8_value_tiles`: finite even if all values are zero
GROUP = 16  # slots that `fp8_value_tiles` reorders among themselves
SMOOTHED_BY = 128  # tokens of a causal mean; a row that cannot see them all takes keys that are not smoothed
_SMALLEST = 1e-30  # tokens without a larger entry count as zero


def int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 `[..., N, D]` and scales `[..., N]` of `x` `[..., N, D]`: the largest entry becomes 127, ties go to even."""
    x = x.float()
    return _int8(x, _scale(x.abs().amax(-1), INT8_LIMIT))


def int8_per_block(x: Tensor, block: int, lead: int = 0) -> tuple[Tensor, Tensor]:
    """As `int8_per_token`, but `block` tokens share a scale, and so learn of each other.

    Args:
        x: `[..., N, D]`.
        block: tokens per scale.
        lead: empty places before the first token in its block.
    """
    x = x.float()
    N = x.shape[-2]
    largest = pad(x.abs().amax(-1), (lead, -(lead + N) % block)).unflatten(-1, (-1, block)).amax(-1)
    scale = _scale(largest, INT8_LIMIT).repeat_interleave(block, -1)[..., lead : lead + N]
    return _int8(x, scale.contiguous())


def fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 `[..., N, D]` and scales `[..., N]` of `x` `[..., N, D]`: the largest entry becomes 448."""
    x = x.float()
    scale = _scale(x.abs().amax(-1), FP8_LIMIT)
    return (x / _divisor(scale)).clamp(-FP8_LIMIT, FP8_LIMIT).to(torch.float8_e4m3fn), scale


def smoothing_mean(k: Tensor, causal: bool, first: int = SMOOTHED_BY) -> Tensor:
    """The mean key `[B, Hkv, 1, D]` fp32, of `k` `[B, Hkv, N, D]` in original order.

    What all keys have in common shifts all logits of a row alike, and takes up most of int8's range. When causal,
    the mean is that of the `first` keys, since rows must not learn of later ones. A channel in which some key is NaN
    or infinite is not smoothed (its mean is 0), so that such a key stays with the queries that attend to it.
    """
    mean = (k[:, :, :first] if causal else k).mean(2, keepdim=True, dtype=torch.float32)
    return mean.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _scale(largest: Tensor, limit: float) -> Tensor:
    # The divisor is a tensor because on a GPU torch would turn division by a number into a product with its inverse.
    scale = (largest / largest.new_full((), limit)).masked_fill(largest == torch.inf, torch.nan)
    return scale.masked_fill(largest < _SMALLEST, 0.0)


def _divisor(scale: Tensor) -> Tensor:
    """What entries are divided by: infinity where the scale is 0, so that they become 0."""
    return scale.masked_fill(scale == 0, torch.inf).unsqueeze(-1)


def _int8(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (x / _divisor(scale)).round().clamp(-INT8_LIMIT, INT8_LIMIT).to(torch.int8), scale
