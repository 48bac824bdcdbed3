"""How far pooled weights of blocks are from true ones: the square root of the Jensen-Shannon divergence (FlexPrefill).

    p = softmax(scale logits),  m = (p + q) / 2,  out = sqrt((sum p ln(p / m) + sum q ln(q / m)) / 2)

Weights of 0 add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus

LONGEST = 32768


@on_gpus(torch.float32, where=lambda logits, true, *_: true.dtype == torch.float32 and logits.shape[-1] <= LONGEST)
def block_divergence(logits: Tensor, true: Tensor, scale: float = 1.0) -> Tensor:
    """`[B, H]`, from 0 to sqrt(ln 2), for `logits` and weights `true` `[B, H, cols]`."""
    pooled = (logits * scale).softmax(-1)
    mean = (pooled + true) / 2
    parts = (torch.xlogy(x, x) - torch.xlogy(x, mean) for x in (pooled, true))
    return (sum(parts, torch.zeros_like(pooled)).sum(-1) / 2).clamp_min(0.0).sqrt()
