"""The importance of keys, and their order inside segments.

`key_importance` is how much the last queries look at each key (PBS-Attn, eq. 10):

    out[b, h, j] = mean over the last `last_q` queries i, and over the query heads of h, of softmax_j(scale * q_i . k_j)

On GPUs there are two passes over the keys, neither of which stores a product. The first finds the largest logit of every
query and the sum of its weights. The second adds up the weights of each key. Sums are in a fixed order, which depends on `N`
alone. The kernel for CPUs holds the products of a few queries, the plain torch below all those of a KV head.

`segment_sort` orders tokens by falling value inside each whole segment of `S` tokens:

    index[b, h, g * S + i] = g * S + (place of the i-th greatest value of segment g)

Equal values keep their order and NaN comes first, as a stable descending `torch.sort` has it; the tail of `N mod S` tokens
stays in place. A coarse sort compares only the upper bits of fp32 values, as many as fit into an int32 with an index in the
segment. With S = 1024 these are sign, exponent and 13 bits of the fraction.

On GPUs, for fp32 values and `S` a power of two up to 4096, one launch sorts segments on chip, as int64, or as int32 if the
sort is coarse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import FLOATS, compiled, on_gpus
from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.score import cpu_scores


@on_gpus(*FLOATS)
@compiled(cpu_scores.key_importance_on_cpu, lambda q, k, *_, **__: cpu_scores.takes(q, k))
def key_importance(
    q: Tensor, k: Tensor, last_q: int, seen: int, causal: bool, scale: float, per_query_head: bool
) -> Tensor:
    """Parts whose sums are the mean weight of every key of `k` `[B, Hkv, N, D]`, `[B, Hkv or Hq, P, N]`, fp32 or better.

    Who sorts by them adds them up on the way (`segment_sort`).

    Args:
        q: `[B, Hq, M, D]`. Query `i` stands at position `N - M + i`.
        last_q: how many of the last queries vote. All of them where there are fewer.
        seen: keys from this one on weigh nothing.
        causal: nor do keys after the query.
        per_query_head: average each query head. `[B, Hq, P, N]`.
    """
    # One KV head after another, so that fewer numbers are held at a time; it is one part.
    Hkv, N, P = k.shape[1], k.shape[2], min(last_q, q.shape[2])
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


_LONGEST = 4096


@on_gpus(torch.float32, where=lambda values, S, *_, **__: 1 < S <= _LONGEST and S & (S - 1) == 0)
def segment_sort(values: Tensor, S: int, coarse: bool = False) -> Tensor:
    """The token in every slot, `[B, H, N]` int32, for `values` `[B, H, N]`; the same on every device.

    Args:
        values: or `[B, H, P, N]`, parts that are added up first.
        coarse: ignore the lowest `log2(S)` bits of `whole_numbers`.
    """
    values = values.sum(2) if values.ndim == 4 else values
    values = whole_numbers(values) >> (S - 1).bit_length() if coarse else values
    N, segments = values.shape[-1], values.shape[-1] // S
    order = values[..., : segments * S].unflatten(-1, (segments, S)).argsort(dim=-1, descending=True, stable=True)
    order = order + S * torch.arange(segments, device=values.device)[:, None]
    tail = torch.arange(segments * S, N, device=values.device).expand(*order.shape[:2], -1)
    return torch.cat((order.flatten(-2), tail), dim=-1).int()


def whole_numbers(values: Tensor) -> Tensor:
    """Values of fp32 as int32, in the same order. Both zeros become 0, and NaN becomes the greatest.

    The bits of floats from 0 up rise with them, but those of negative floats fall: all but the sign bit are flipped.
    """
    bits = (values.float() + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(values.isnan(), 0x7FFFFFFF)
