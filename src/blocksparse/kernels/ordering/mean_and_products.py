"""The mean query of every segment, and the product of every query with one vector per KV head (S2O, eq. 1 and 2).

    mean[b, h, g]     = sum_i q[b, h, i] / (queries of segment g)     over the queries `i` of segment g
    products[b, h, i] = q[b, h, i] . guide[b, h // R]

Both are computed in fp32 or better. On GPUs one launch reads every query once, and CPUs with a C++ compiler do so in
`cpu_scores.cpp`; other CPUs, and float64, take the plain torch below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import FLOATS, compiled, on_gpus
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.scoring import cpu_choices, cpu_scores
from blocksparse.kernels.scoring.block_mean import block_mean

_QUERIES_AT_ONCE = 1 << 12


@on_gpus(*FLOATS)
@compiled(cpu_choices.mean_and_products_on_cpu, lambda x, *_, **__: cpu_scores.takes(x))
def mean_and_products(q: Tensor, guide: Tensor, S: int, lead: int = 0) -> tuple[Tensor, Tensor]:
    """`[B, Hq, G, D]` and `[B, Hq, M]` for `q` `[B, Hq, M, D]` and `guide` `[B, Hkv, D]` in fp32 or better.

    Args:
        S: queries per segment.
        lead: empty places before the first query in segment 0, fewer than `S`.
    """
    parts = [
        products(part.to(guide.dtype), guide.unsqueeze(2)).squeeze(-1) for part in q.split(_QUERIES_AT_ONCE, dim=2)
    ]
    return block_mean.plain(q, S, lead, False, None), torch.cat(parts, dim=-1)
