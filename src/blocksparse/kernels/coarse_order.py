"""The best keys before each segment of queries, best first by coarse scores (S2O, eq. 2, without its full sort).

    score[g, j] = mean[g] . k[j]                                  over the keys j < start = (first + g) * S
    step[g, j]  = floor(256 * (high - score) / (high - low))      at most 255; high and low of the row's finite scores
    out[g]      = the keys by rising step, equal steps by position; then -1

Mean queries are rounded to the dtype of the keys, products are summed in fp32 or better. A step is 1/256 of the range
of a row's scores, so that keys of one step weigh much the same, but neither the order inside a step nor which of its
keys are the last to fit says anything about their scores. Positions are below 2^24.

On GPUs five launches for some segments at a time, without a sort: scores are computed twice, first for their range and
then for their steps, which take a byte each; a search finds the step at which a row is full, and a counting sort
orders what is kept. Otherwise, and for float64, the plain torch below.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.cell_products import products

STEPS = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCORES_AT_ONCE = 1 << 24


def coarse_order(mean: Tensor, k: Tensor, first: int, S: int, out: Tensor) -> None:
    """Fill `out` `[B, H, G, count]` int32, the last slots of a map.

    Args:
        mean: mean query of segments `first` and on, `[B, H, G, D]`.
        k: `[B, Hkv, N, D]`; `Hkv` divides `H`.
        S: tokens per segment.
    """
    if k.is_cuda and k.dtype in _DTYPES:
        from blocksparse.kernels.coarse_order_triton import coarse_order_triton

        return coarse_order_triton(mean, k, first, S, out)
    return coarse_order_reference(mean, k, first, S, out)


def coarse_order_reference(mean: Tensor, k: Tensor, first: int, S: int, out: Tensor) -> None:
    """The same in plain torch."""
    B, H, G, count = out.shape
    mean = mean.to(k.dtype)
    step = max(1, _SCORES_AT_ONCE // (B * H * max(1, (first + G - 1) * S)))
    for g in range(0, G, step):
        rows = slice(g, min(g + step, G))
        end = (first + rows.stop - 1) * S
        start = S * torch.arange(first + g, first + rows.stop, device=k.device)[:, None]
        steps = score_steps(products(mean[:, :, rows], k[:, :, :end]), start)
        order = steps.argsort(dim=-1, stable=True)[..., :count].int()
        place = torch.arange(order.shape[-1], device=k.device)
        out[:, :, rows, : order.shape[-1]] = order.where(place < start, -1)
        out[:, :, rows, order.shape[-1] :] = -1


def score_steps(scores: Tensor, start: Tensor) -> Tensor:
    """Steps of `scores` `[B, H, G, N]` among the first `start` `[G, 1]` of each row; 256 for the others, int16.

    NaN counts as the least score. Where no range of scores is finite and above 0, all are of one step.
    """
    before = torch.arange(scores.shape[-1], device=scores.device) < start
    counted, most = before & scores.isfinite(), torch.finfo(torch.float32).max
    high, minus_low = (
        pad(x.masked_fill(~counted, float("-inf")), (1, 0), value=float("-inf")).amax(-1, keepdim=True)
        for x in (scores, -scores)
    )
    width = high + minus_low
    spread = (width > 0) & (width <= most)
    factor = (STEPS / width).clamp_max(most).where(spread, 0.0)
    steps = (high.where(spread, 0.0) - scores.nan_to_num(nan=-most, posinf=most, neginf=-most)) * factor
    return steps.clamp(0, STEPS - 1).to(torch.int16).masked_fill(~before, STEPS)
