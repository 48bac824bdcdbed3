"""Of two masks the one or the other for each head: the first where a number of the head is below a bound.

On a GPU it is one launch; other devices take plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def routed(number: Tensor, bound: Tensor, below: Tensor, otherwise: Tensor) -> Tensor:
    """`[B, H, rows, cols]` bool: `below` in heads where `number < bound`, else `otherwise`; a NaN is not below.

    Args:
        number: `[B, H]`.
        bound: `[1, H|1, 1, 1]` float64.
        below, otherwise: `[B, H, rows, cols]` bool.
    """
    if number.is_cuda and number.dtype == torch.float32:
        from blocksparse.kernels.selecting.routed_triton import routed_triton

        return routed_triton(number, bound, below, otherwise)
    return torch.where(number[..., None, None] < bound, below, otherwise)
