"""The mean query of every segment, and the product of every query with one vector per KV head (S2O, eq. 1 and 2).

    mean[b, h, g]     = sum_i q[b, h, i] / (queries of segment g)     over the queries `i` of segment g
    products[b, h, i] = q[b, h, i] . guide[b, h // R]

Both are computed in fp32 or better. On GPUs one launch reads every query once, and CPUs with a C++ compiler do so in
`cpu_scores.cpp`; other CPUs, and float64, take the plain torch below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.scoring import cpu_choices, cpu_scores
from blocksparse.kernels.scoring.block_mean import block_mean_reference

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_QUERIES_AT_ONCE = 1 << 12


def mean_and_products(q: Tensor, guide: Tensor, S: int, *, lead: int = 0) -> tuple[Tensor, Tensor]:
    """`[B, Hq, G, D]` and `[B, Hq, M]` for `q` `[B, Hq, M, D]` and `guide` `[B, Hkv, D]` in fp32 or better.

    Args:
        S: queries per segment.
        lead: empty places before the first query in segment 0, fewer than `S`.
    """
    if q.is_cuda and q.dtype in _DTYPES:
        from blocksparse.kernels.ordering.mean_and_products_triton import mean_and_products_triton

        return mean_and_products_triton(q, guide, S, lead)
    compute = cpu_choices.mean_and_products_on_cpu if cpu_scores.takes(q) else mean_and_products_reference
    return compute(q, guide, S, lead)


def mean_and_products_reference(q: Tensor, guide: Tensor, S: int, lead: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch, which multiplies some queries at a time."""
    parts = [
        products(part.to(guide.dtype), guide.unsqueeze(2)).squeeze(-1) for part in q.split(_QUERIES_AT_ONCE, dim=2)
    ]
    return block_mean_reference(q, S, lead, False, None), torch.cat(parts, dim=-1)
