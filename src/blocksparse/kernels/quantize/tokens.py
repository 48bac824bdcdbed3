"""Tokens in 8 bits: int8 queries and keys, fp8 values.

    x[..., i, :] ~ values[..., i, :] * scale[..., i]

int8 is for queries and keys (SageAttention), whose products int32 adds exactly; fp8 (e4m3) is for values. A
scale per token depends on nothing but that token, so no row learns of a later token. Scales are fp32. A token
whose entries are all smaller than 1e-30 counts as zero; the scale of one with an infinity or a NaN is NaN.

`int8_queries` and `int8_keys` round on the way into slots:

    x[b, h // (H / Hx), index[b, h, i]] - mean[b, h] ~ values[b, h, i] * scale[b, h, i]

A scale is that of a token, or shared by the tokens of a block. An index of -1 is an empty slot, which gets zeros and a scale
of zero. On GPUs one launch reads every token once and writes 8 bits a number, to the bit what the plain torch below writes.

`fp8_values` does so with one scale for each token:

    v[b, h // (H / Hv), index[b, h, i]] ~ values[b, h, i] * scale[b, h, i]

Its kernel's numbers are those of the plain torch below, but -0.0 may be 0.0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import FLOATS, on_gpus
from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.layout.gather import gather_rows

INT8_LIMIT = 127.0
FP8_LIMIT = 448.0
LEAST_LOG2 = -100.0  # log2 of the least scale in `fp8_value_tiles`: finite even if all values are zero
GROUP = 16  # slots that `fp8_value_tiles` reorders among themselves
SMOOTHED_BY = 128  # tokens of a causal mean; a row that cannot see them all takes keys that are not smoothed
_SMALLEST = 1e-30  # tokens without a larger entry count as zero


def int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[..., N, D]` in int8, and scales `[..., N]`. The largest entry becomes 127, and ties go to even."""
    x = x.float()
    return _int8(x, _scale(x.abs().amax(-1), INT8_LIMIT))


def int8_per_block(x: Tensor, block: int, lead: int = 0) -> tuple[Tensor, Tensor]:
    """As `int8_per_token`, but `block` tokens share a scale, and so depend on each other.

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
    """`x` `[..., N, D]` in fp8, and scales `[..., N]`. The largest entry becomes 448."""
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
    """The divisor of entries. Infinity where the scale is 0: they become 0."""
    return scale.masked_fill(scale == 0, torch.inf).unsqueeze(-1)


def _int8(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (x / _divisor(scale)).round().clamp(-INT8_LIMIT, INT8_LIMIT).to(torch.int8), scale


@on_gpus(*FLOATS)
def int8_queries(
    q: Tensor,
    index: Tensor | None,
    block: int,
    lead: int,
    shared: bool,
    mean: Tensor | None = None,
    scale: float = 1.0,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`q` `[B, Hq, M, D]` in int8 in slot order, scales `[B, Hq, M]` fp32, and what `mean` takes.

    Args:
        index: `[B, Hq, M]` int32, the query in each slot. None leaves queries in place.
        block: places per row of the mask.
        lead: empty places before the first slot in row 0. Fewer than `block`.
        shared: the slots of a row of the mask share one scale.
        mean: `[B, Hkv, D]` fp32. It is subtracted from the keys. Every logit of a query drops by `scale * q .
            mean`. This is returned, `[B, Hq, M]` fp32.
        scale: factor from products to logits.
        plain: `[B|1, Hq|1, rows]` int32. Not 0 for rows that read keys which keep their mean: their queries drop
            by 0.
    """
    q, empty, taken = in_slot_order(q, index), None if index is None else index < 0, None
    if mean is not None:
        taken = scale * products(q.float(), mean.unsqueeze(2)).squeeze(-1)
        if plain is not None:
            by_place = plain.repeat_interleave(block, -1)[..., lead : lead + q.shape[2]]
            taken = taken.masked_fill(by_place != 0, 0.0)
    return *_rounded(q, empty, block, lead, shared), taken


@on_gpus(*FLOATS)
def int8_keys(
    k: Tensor, index: Tensor | None, block: int, shared: bool, mean: Tensor | None = None, plain_below: int = 0
) -> tuple[Tensor, Tensor]:
    """`k` `[B, Hkv, N, D]` less its mean in int8 `[B, H, slots, D]`, and scales `[B, H, slots]` fp32.

    Args:
        index: `[B, H, slots]` int32, the key in each slot. `Hkv` divides `H`. None leaves keys in place.
        block: slots that share a scale if `shared`.
        shared: whether the slots of a block share one scale.
        mean: `[B, Hkv, D]` fp32. Subtracted before rounding.
        plain_below: if not 0, `H` more heads follow, `[B, 2 * H, slots, D]`. They keep the mean. In them a block
            without any key before this one may hold anything: no kernel reads it.
    """
    k, empty = in_slot_order(k, index), None if index is None else index < 0
    smooth = k if mean is None else k.float() - mean.repeat_interleave(k.shape[1] // mean.shape[1], 1).unsqueeze(2)
    if empty is not None:
        smooth = smooth.masked_fill(empty.unsqueeze(-1), 0.0)
    parts = [_rounded(x, empty, block, 0, shared) for x in ((smooth, k) if plain_below else (smooth,))]
    return torch.cat([x[0] for x in parts], 1), torch.cat([x[1] for x in parts], 1)


def in_slot_order(x: Tensor, index: Tensor | None) -> Tensor:
    """Tokens of `x` `[B, Hx, N, D]` by `index` `[B, H, slots]`, zeros in empty slots. Without an index, `x` itself."""
    if index is None:
        return x
    return gather_rows.reference(x, index.clamp_min(0)).masked_fill((index < 0).unsqueeze(-1), 0.0)


def _rounded(x: Tensor, empty: Tensor | None, block: int, lead: int, shared: bool) -> tuple[Tensor, Tensor]:
    values, scale = int8_per_block(x, block, lead) if shared else int8_per_token(x)
    return values.contiguous(), scale if empty is None else scale.masked_fill(empty, 0.0)


@on_gpus(*FLOATS)
def fp8_values(v: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`v` `[B, Hkv, N, D]` in fp8 in slot order `[B, H, slots, D]`, and scales `[B, H, slots]` fp32.

    Args:
        index: `[B, H, slots]` int32, the value in each slot. `Hkv` divides `H`. None leaves values in place.
    """
    values, scale = fp8_per_token(in_slot_order(v, index))
    return values.contiguous(), scale
