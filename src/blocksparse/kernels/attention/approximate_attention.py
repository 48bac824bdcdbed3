"""What the portable kernel computes when it leaves out or rounds: the specification of `Approximation`, in plain torch.

`pv_skip` is a difference of logits. In full blocks, a query leaves out a tile of keys whose best logit is more than
`-pv_skip` below the best one that the query has met before. If all queries of a tile of queries leave it out, the product
of its weights and values is not computed. `lse` is that of what was not left out. Logits are those after a softcap, and a
sink is no logit that a query has met.

Each query decides for itself, so that no query's result depends on another query, or on a later key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.attention.arguments import Approximation, Lists, LogitChange
from blocksparse.kernels.attention.sparse_attention import UNCHANGED, capped, listed_pairs, visiting_rank
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.positions.token_positions import TokenPositions
from blocksparse.kernels.rounding.quantize import FP8_LIMIT


def approximate_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists,
    positions: TokenPositions,
    block_n: int,
    *,
    scale: float,
    approximation: Approximation,
    change: LogitChange = UNCHANGED,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """It rounds where the kernel rounds, and computes in the precision of the inputs or of their scales.

    `block_n` is how many keys are a tile of keys; the other arguments are those of `sparse_attention`.
    """
    pv_skip, v_scale = approximation.pv_skip, approximation.v_scale
    (_, Hq, M, _), N = q.shape, k.shape[2]
    out_dtype = out_dtype or v.dtype
    pairs = listed_pairs(lists, positions, q, k)
    logits = capped(_logits(q, k, v.shape[1], lists, positions, scale, approximation), change)
    logits = logits.masked_fill(~pairs, float("-inf"))
    v = v.repeat_interleave(Hq // v.shape[1], 1)

    # The tiles of keys in the order in which each query meets them, and the largest logit that it has met by each.
    rank, split = visiting_rank(lists), lists.k_block // block_n
    order = rank.argsort(-1).unsqueeze(-1) * split + torch.arange(split, device=q.device)
    order = _of_queries(order.flatten(-2), lists, positions, Hq, M).expand(
        *logits.shape[:3], -1
    )  # [B, Hq, M, tiles]

    def by_turn(x: Tensor) -> Tensor:
        """The largest entry of every tile of keys, in the order of visits."""
        x = pad(x, (0, order.shape[-1] * block_n - N), value=float("-inf"))
        largest: Tensor = x.unflatten(-1, (-1, block_n)).amax(-1)
        return largest.gather(-1, order)

    def by_key(x: Tensor) -> Tensor:
        """Undo the order of `by_turn`: an entry for each visit becomes one for each key of the tile visited."""
        return torch.zeros_like(x).scatter_(-1, order, x).repeat_interleave(block_n, -1)[..., :N]

    best = by_turn(logits)
    met = best.cummax(-1).values
    if pv_skip is not None:
        before = pad(met[..., :-1], (1, 0), value=float("-inf"))
        full = torch.arange(order.shape[-1], device=q.device) < split * lists.full_count.unsqueeze(-1)
        left_out = (best - before < pv_skip.view(-1, 1, 1)) & _of_queries(full, lists, positions, Hq, M)
        logits = logits.masked_fill(by_key(left_out), float("-inf"))
    origin = met[..., -1:].masked_fill(met[..., -1:] == float("-inf"), 0.0)
    weight = (logits - origin).exp()
    total = weight.sum(-1, keepdim=True)
    if v_scale is not None:
        # The kernel rounds a weight when it visits its tile, relative to the maximum and the largest scale met by then.
        factor = v_scale.repeat_interleave(Hq // v_scale.shape[1], 1).unsqueeze(-2).expand_as(logits)
        largest = by_turn(factor.masked_fill(logits == float("-inf"), 0.0)).clamp_min(0).cummax(-1).values
        unit = by_key(largest) / FP8_LIMIT
        turn = (logits - by_key(met)).nan_to_num(nan=float("-inf"), neginf=float("-inf")).exp()
        rounded = (turn * factor / unit.masked_fill(unit == 0, 1.0)).to(v.dtype).to(logits.dtype)
        weight = rounded * unit * (by_key(met) - origin).exp()
        v = v.to(logits.dtype)
    out = products(weight.to(v.dtype), v.mT, wide=False) / total.masked_fill(total == 0, 1.0)
    lse = total.log() + origin  # [B, Hq, M, 1]
    if change.sinks is not None:
        sinks = change.sinks.to(lse.dtype).view(1, -1, 1, 1)
        out, lse = out * torch.sigmoid(lse - sinks), torch.logaddexp(lse, sinks)
    return out.to(out_dtype), lse.squeeze(-1).float()


def _logits(
    q: Tensor,
    k: Tensor,
    Hk: int,
    lists: Lists,
    positions: TokenPositions,
    scale: float,
    approximation: Approximation,
) -> Tensor:
    """The logits of all pairs, `[B, Hq, M, N]`, of the keys that each row reads."""
    scales, k_copy = (approximation.q_scale, approximation.k_scale), approximation.k_copy
    q, k = (x if factor is None else x * factor.unsqueeze(-1) for x, factor in zip((q, k), scales, strict=True))
    Hq, M = q.shape[1:3]
    copies = [products(q, x, wide=False) * scale for x in k.split(Hk, 1)]
    if k_copy is None:
        return copies[0]
    copy = k_copy.repeat_interleave(lists.q_block, -1)[..., positions.q_lead : positions.q_lead + M, None]
    return torch.stack(copies).gather(0, copy.long().expand_as(copies[0]).unsqueeze(0))[0]


def _of_queries(x: Tensor, lists: Lists, positions: TokenPositions, Hq: int, M: int) -> Tensor:
    """`x` `[B|1, Hm, rows, ...]` repeated for each query head and query, `[B|1, Hq, M, ...]`."""
    x = x.repeat_interleave(Hq // x.shape[1], 1).repeat_interleave(lists.q_block, 2)
    return x[:, :, positions.q_lead : positions.q_lead + M]
