"""The best keys before each segment of queries, best first by coarse scores (S2O, eq. 2, without its full sort).

    score[g, j] = mean[g] . k[j]                                  over the keys j < until + g * S
    step[g, j]  = floor(256 * (high - score) / (high - low))      at least 0 and at most 255
    out[g]      = the keys by rising step, equal steps by position; then -1

`high` and `low` are the greatest and the least finite score of every eighth key of a row, j = 7, 15, 23 and so on. That
takes an eighth of the work, and the first token, whose score often stands far out, has no part in the range.

Mean queries are rounded to the dtype of the keys, and products are summed in fp32 or better. A step is 1/256 of that range,
so that keys of one step weigh much the same; but neither the order inside a step nor which of its keys are the last to
fit says anything about their scores. Positions are below 2^24, which the caller checks (`check_keys`).

On GPUs five launches serve some segments at a time, without a sort. The first finds the range; the second computes all
scores and writes their steps, which take a byte each; the third searches for the step at which a row is full, and writes
the keys that are kept; and two more order these by a counting sort. CPUs with a C++ compiler do the same in
`cpu_scores.cpp`; other CPUs, and float64, take the plain torch below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import FLOATS, compiled, on_gpus
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.ordering.score_steps import score_steps
from blocksparse.kernels.scoring import cpu_choices, cpu_scores

_SCORES_AT_ONCE = 1 << 24


def coarse_order_on_cpu(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """`coarse_order` by compiled products and a counting sort, some segments at a time."""
    B, H, G, _ = out.shape
    mean = mean.to(k.dtype)
    step = max(1, _SCORES_AT_ONCE // (B * H * max(1, until + (G - 1) * S)))
    for g in range(0, G, step):
        some = slice(g, min(g + step, G))
        end = max(0, until + (some.stop - 1) * S)
        scores = cpu_choices.products_on_cpu(mean[:, :, some], k[:, :, :end])
        cpu_choices.order_on_cpu(scores, until + g * S, S, out[:, :, some])


@on_gpus(*FLOATS, of=lambda mean, k, *_: k)
@compiled(coarse_order_on_cpu, lambda mean, k, *_: cpu_scores.takes(k))
def coarse_order(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """Fill `out` `[B, H, G, count]` int32, the last slots of a map.

    Args:
        mean: mean queries of consecutive segments, `[B, H, G, D]`.
        k: `[B, Hkv, N, D]`; `Hkv` divides `H`.
        until: the first of these segments orders the keys before this position; none if it is negative.
        S: tokens per segment; each further segment orders so many keys more.
    """
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
