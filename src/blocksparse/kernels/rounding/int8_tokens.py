"""Queries and keys become int8 on their way into slots.

    x[b, h // (H / Hx), index[b, h, i]] - mean[b, h] ~ values[b, h, i] * scale[b, h, i]

Rounding is that of `quantize.py`, with a scale per token or one shared by the tokens of a block. An index of -1 is
an empty slot, which gets zeros and a scale of zero. On GPUs one launch reads every token once and writes 8 bits a number,
to the bit what the plain torch below writes. CPU tensors and float64 take the plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import FLOATS, on_gpus
from blocksparse.kernels.moving.gather_rows import gather_rows
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.rounding.quantize import int8_per_block, int8_per_token


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
    """int8 `[B, Hq, M, D]` of `q` `[B, Hq, M, D]` in slot order, scales `[B, Hq, M]` fp32, and what `mean` takes.

    Args:
        index: `[B, Hq, M]` int32, the query in each slot; None leaves queries in place.
        block: places per row of the mask.
        lead: empty places before the first slot in row 0, fewer than `block`.
        shared: the slots of a row of the mask share one scale.
        mean: `[B, Hkv, D]` fp32, subtracted from the keys; every logit of a query loses `scale * q . mean`, which
            is returned, `[B, Hq, M]` fp32.
        scale: what products are multiplied by to become logits.
        plain: `[B|1, Hq|1, rows]` int32, not 0 for rows that read keys which keep their mean: their queries lose 0.
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
    """int8 `[B, H, slots, D]` of `k` `[B, Hkv, N, D]` less its mean, and scales `[B, H, slots]` fp32.

    Args:
        index: `[B, H, slots]` int32, the key in each slot; `Hkv` divides `H`. None leaves keys in place.
        block: slots that share a scale if `shared`.
        shared: whether the slots of a block share one scale.
        mean: `[B, Hkv, D]` fp32, subtracted before rounding.
        plain_below: if not 0, `H` more heads follow, rounded without subtracting the mean: `[B, 2 * H, slots, D]`. In
            them a block without any key before this one may hold anything, for nobody reads it.
    """
    k, empty = in_slot_order(k, index), None if index is None else index < 0
    smooth = k if mean is None else k.float() - mean.repeat_interleave(k.shape[1] // mean.shape[1], 1).unsqueeze(2)
    if empty is not None:
        smooth = smooth.masked_fill(empty.unsqueeze(-1), 0.0)
    parts = [_rounded(x, empty, block, 0, shared) for x in ((smooth, k) if plain_below else (smooth,))]
    return torch.cat([x[0] for x in parts], 1), torch.cat([x[1] for x in parts], 1)


def in_slot_order(x: Tensor, index: Tensor | None) -> Tensor:
    """Tokens of `x` `[B, Hx, N, D]` by `index` `[B, H, slots]`, zeros in empty slots; `x` itself without an index."""
    if index is None:
        return x
    return gather_rows.plain(x, index.clamp_min(0)).masked_fill((index < 0).unsqueeze(-1), 0.0)


def _rounded(x: Tensor, empty: Tensor | None, block: int, lead: int, shared: bool) -> tuple[Tensor, Tensor]:
    values, scale = int8_per_block(x, block, lead) if shared else int8_per_token(x)
    return values.contiguous(), scale if empty is None else scale.masked_fill(empty, 0.0)
