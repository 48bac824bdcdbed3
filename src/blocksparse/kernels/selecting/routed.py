"""Of two masks the one or the other for each head: the first where a number of the head is below a bound.

What makes the first mask may be told which heads need it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.twins import on_gpus


@on_gpus(torch.float32, of=lambda heads, *_: heads.number)
def routed(heads: Below, below: Tensor, otherwise: Tensor) -> Tensor:
    """`[B, H, rows, cols]` bool: `below` in those heads, in others `otherwise`; both `[B, H, rows, cols]` bool."""
    return torch.where(heads.these(), below, otherwise)
