"""The best keys before each segment of queries, best first by coarse scores (S2O, eq. 2, without its full sort).

    score[g, j] = mean[g] . k[j]                                  over the keys j < until + g * S
    step[g, j]  = floor(256 * (high - score) / (high - low))      at least 0 and at most 255
    out[g]      = the keys by rising step, equal steps by position; then -1

`high` and `low` are the greatest and the least finite score of every eighth key of a row, j = 7, 15, 23 and so on. That
takes an eighth of the work, and the first token, whose score often stands far out, has no part in the range.

Mean queries are rounded to the dtype of the keys, and products are summed in fp32 or better. A step is 1/256 of that range,
so that keys of one step weigh much the same; but neither the order inside a step nor which of its keys are the last to
fit says anything about their scores. Positions are below 2^24, which is checked.

On GPUs five launches serve some segments at a time, without a sort. The first finds the range; the second computes all
scores and writes their steps, which take a byte each; the third searches for the step at which a row is full, and writes
the keys that are kept; and two more order these by a counting sort. CPUs with a C++ compiler do the same in
`cpu_scores.cpp`; other CPUs, and float64, take the plain torch below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.ordering.score_steps import MOST_KEYS, score_steps
from blocksparse.kernels.scoring import cpu_choices, cpu_scores

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCORES_AT_ONCE = 1 << 24


def coarse_order(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """Fill `out` `[B, H, G, count]` int32, the last slots of a map.

    Args:
        mean: mean queries of consecutive segments, `[B, H, G, D]`.
        k: `[B, Hkv, N, D]`; `Hkv` divides `H`.
        until: the first of these segments orders the keys before this position; none if it is negative.
        S: tokens per segment; each further segment orders so many keys more.

    Raises:
        ValueError: there are more keys than positions have bits for.
    """
    if (keys := until + (out.shape[2] - 1) * S) > MOST_KEYS:
        raise ValueError(f"a coarse order takes up to {MOST_KEYS} keys before a segment: {keys}; use coarse=False")
    if k.is_cuda and k.dtype in _DTYPES:
        from blocksparse.kernels.ordering.coarse_order_triton import coarse_order_triton

        return coarse_order_triton(mean, k, until, S, out)
    compute = coarse_order_on_cpu if cpu_scores.takes(k) else coarse_order_reference
    return compute(mean, k, until, S, out)


def coarse_order_on_cpu(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """The same by compiled products and a counting sort, some segments at a time."""
    B, H, G, _ = out.shape
    mean = mean.to(k.dtype)
    step = max(1, _SCORES_AT_ONCE // (B * H * max(1, until + (G - 1) * S)))
    for g in range(0, G, step):
        some = slice(g, min(g + step, G))
        end = max(0, until + (some.stop - 1) * S)
        scores = cpu_choices.products_on_cpu(mean[:, :, some], k[:, :, :end])
        cpu_choices.order_on_cpu(scores, until + g * S, S, out[:, :, some])


def coarse_order_reference(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """The same in plain torch."""
    B, H, G, count = out.shape
    mean = mean.to(k.dtype)
    step = max(1, _SCORES_AT_ONCE // (B * H * max(1, until + (G - 1) * S)))
    for g in range(0, G, step):
        rows = slice(g, min(g + step, G))
        end = max(0, until + (rows.stop - 1) * S)
        start = until + S * torch.arange(g, rows.stop, device=k.device)[:, None]
        steps = score_steps(products(mean[:, :, rows], k[:, :, :end]), start)
        order = steps.argsort(dim=-1, stable=True)[..., :count].int()
        place = torch.arange(order.shape[-1], device=k.device)
        out[:, :, rows, : order.shape[-1]] = order.where(place < start, -1)
        out[:, :, rows, order.shape[-1] :] = -1
