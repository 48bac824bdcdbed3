"""The order of keys by their products with mean queries, a segment of queries at a time.

`coarse_order`: The best keys before each segment of queries, best first by coarse scores (S2O, eq. 2, without its full
sort).

    score[g, j] = mean[g] . k[j]                                  over the keys j < until + g * S
    step[g, j]  = floor(256 * (high - score) / (high - low))      at least 0 and at most 255

`out[g]` has the keys by rising step, and those of equal steps by position. After the last one it has -1.

A kept key is the int32 `step << 24 | position`: its step in the upper 8 bits, its position in the lower 24. A step of 128 or
more sets the sign bit, so a step is read back as `kept >> 24 & 255`.

`high` and `low` are the greatest and the least finite score of every eighth key of a row, j = 7, 15, 23 and so on. That
takes an eighth of the work, and the first token, whose score often stands far out, has no part in the range.

Mean queries are rounded to the dtype of the keys, and products are summed in fp32 or better. A step is 1/256 of that range,
so that keys of one step have almost the same weight. The order inside a step, and which of its keys are the last to fit, do
not depend on their scores. Positions are below 2^24, which the caller checks (`check_keys`).

On GPUs five launches serve some segments at a time, without a sort. The first finds the range. The second computes all
scores and writes their steps, a byte each. The third searches for the step at which a row is full, and writes the keys that
are kept. Two more order these by a counting sort.

`mean_and_products`: The mean query of every segment, and the product of every query with one vector per KV head (S2O, eq. 1
and 2).

    mean[b, h, g]     = sum_i q[b, h, i] / (queries of segment g)     over the queries `i` of segment g
    products[b, h, i] = q[b, h, i] . guide[b, h // R]

Both are computed in fp32 or better, from one reading of every query.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import FLOATS, compiled, on_gpus
from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.score import cpu_scores
from blocksparse.kernels.score.block_mean import block_mean

STEPS = 256
SAMPLED = 8  # of every eight keys the last one has a part in the range of scores
MOST_KEYS = 1 << 24  # the positions that fit below a step


def check_keys(keys: int) -> None:
    """Raise a ValueError if there are more keys before a segment than positions have bits for."""
    if keys > MOST_KEYS:
        raise ValueError(
            f"a coarse order takes up to {MOST_KEYS} keys before a segment: {keys}. Use coarse=False."
        )


def score_steps(scores: Tensor, start: Tensor) -> Tensor:
    """Steps of `scores` `[B, H, G, N]`, int16, for the first `start` `[G, 1]` keys of each row; 256 for the others.

    NaN counts as the least score. If the range of a row's sampled scores is not finite and above 0, all keys have one step.
    """
    before, most = torch.arange(scores.shape[-1], device=scores.device) < start, torch.finfo(torch.float32).max
    sampled = scores[..., SAMPLED - 1 :: SAMPLED]
    counted = before[..., SAMPLED - 1 :: SAMPLED] & sampled.isfinite()
    high, minus_low = (
        pad(x.masked_fill(~counted, float("-inf")), (1, 0), value=float("-inf")).amax(-1, keepdim=True)
        for x in (sampled, -sampled)
    )
    width = high + minus_low
    spread = (width > 0) & (width <= most)
    factor = (STEPS / width).clamp_max(most).where(spread, 0.0)
    steps = (high.where(spread, 0.0) - scores.nan_to_num(nan=-most, posinf=most, neginf=-most)) * factor
    return steps.clamp(0, STEPS - 1).to(torch.int16).masked_fill(~before, STEPS)


_SCORES_AT_ONCE = 1 << 24


def coarse_order_on_cpu(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """`coarse_order` by compiled products and a counting sort, some segments at a time."""
    B, H, G, _ = out.shape
    mean = mean.to(k.dtype)
    step = max(1, _SCORES_AT_ONCE // (B * H * max(1, until + (G - 1) * S)))
    for g in range(0, G, step):
        some = slice(g, min(g + step, G))
        end = max(0, until + (some.stop - 1) * S)
        scores = cpu_scores.products_on_cpu(mean[:, :, some], k[:, :, :end])
        cpu_scores.order_on_cpu(scores, until + g * S, S, out[:, :, some])


@on_gpus(*FLOATS, of=lambda mean, k, *_: k)
@compiled(coarse_order_on_cpu, lambda mean, k, *_: cpu_scores.takes(k))
def coarse_order(mean: Tensor, k: Tensor, until: int, S: int, out: Tensor) -> None:
    """Fill `out` `[B, H, G, count]` int32, the last slots of a map.

    Args:
        mean: mean queries of consecutive segments, `[B, H, G, D]`.
        k: `[B, Hkv, N, D]`. `Hkv` divides `H`.
        until: the first of these segments orders the keys before this position. None if it is negative.
        S: tokens per segment. Each further segment orders so many keys more.
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


@on_gpus(*FLOATS)
@compiled(cpu_scores.mean_and_products_on_cpu, lambda x, *_, **__: cpu_scores.takes(x))
def mean_and_products(q: Tensor, guide: Tensor, S: int, lead: int = 0) -> tuple[Tensor, Tensor]:
    """`[B, Hq, G, D]` and `[B, Hq, M]` for `q` `[B, Hq, M, D]` and `guide` `[B, Hkv, D]` in fp32 or better.

    Args:
        S: queries per segment.
        lead: empty places before the first query in segment 0, fewer than `S`.
    """
    parts = [products(part.to(guide.dtype), guide.unsqueeze(2)).squeeze(-1) for part in q.split(4096, dim=2)]
    return block_mean.reference(q, S, lead, False, None), torch.cat(parts, dim=-1)
