"""Sums over runs of entries that stand side by side."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.twins import on_gpus


@on_gpus(torch.float32)
def run_sums(x: Tensor, run: int) -> Tensor:
    """The sums of `x` `[B, H, n]` over runs of `run` entries, `[B, H, ceil(n / run)]`; the last run may be shorter."""
    short = -x.shape[-1] % run
    sums: Tensor = (pad(x, (0, short)) if short else x).unflatten(-1, (-1, run)).sum(-1)
    return sums
