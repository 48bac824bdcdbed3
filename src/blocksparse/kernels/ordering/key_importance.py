"""How much the last queries look at each key (PBS-Attn, eq. 10).

    out[b, h, j] = mean over the last `probe` queries i, and over the query heads of h, of softmax_j(scale * q_i . k_j)

On GPUs there are two passes over the keys, neither of which stores a product: the first finds the largest logit of every
query and the sum of its weights, the second adds up the weights of each key. Sums are in a fixed order, which depends on
`N` alone. CPUs with a C++ compiler take the kernel in `cpu_scores.cpp`, which holds the products of a few queries; other
CPUs, and float64, the plain torch below, which holds all products of a KV head at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import FLOATS, compiled, on_gpus
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.scoring import cpu_scores


@on_gpus(*FLOATS)
@compiled(cpu_scores.key_importance_on_cpu, lambda q, k, *_, **__: cpu_scores.takes(q, k))
def key_importance(
    q: Tensor, k: Tensor, probe: int, seen: int, causal: bool, scale: float, per_query_head: bool
) -> Tensor:
    """Parts whose sums are the mean weight of every key of `k` `[B, Hkv, N, D]`, `[B, Hkv or Hq, P, N]`, fp32 or better.

    Who sorts by them adds them up on the way (`segment_sort`).

    Args:
        q: `[B, Hq, M, D]`; query `i` stands at position `N - M + i`.
        probe: how many of the last queries vote; all of them where there are fewer.
        seen: keys from this one on have no part in the softmax, and weigh nothing.
        causal: neither have keys after the query.
        per_query_head: take the mean over each query head's own queries, `[B, Hq, P, N]`.
    """
    # One KV head after another, so that fewer numbers are held at a time; it is one part.
    Hkv, N, P = k.shape[1], k.shape[2], min(probe, q.shape[2])
    later = torch.ones(P, P, dtype=torch.bool, device=k.device).triu(1)  # the last keys, behind their query
    weights = []
    for queries, keys in zip(q[:, :, -P:].chunk(Hkv, 1), k.unbind(1), strict=True):
        votes = products(queries, keys.unsqueeze(1)).mul_(scale)  # [B, Hq/Hkv, P, N]
        votes[..., seen:] = float("-inf")
        if causal:
            votes[..., N - P :].masked_fill_(later, float("-inf"))
        weights.append(votes.softmax(dim=-1).mean(dim=-2))
    weight = torch.stack(weights, dim=1)  # [B, Hkv, Hq/Hkv, N]
    return weight.flatten(1, 2).unsqueeze(2) if per_query_head else weight.mean(dim=2, keepdim=True)
