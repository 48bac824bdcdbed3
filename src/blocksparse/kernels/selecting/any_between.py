"""Whether any chosen line crosses a block: lines are numbered, and a block is crossed by a range of numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def any_between(chosen: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Whether `chosen` `[B, Hq, n]` bool has an entry from `low` to `high`, both included: `[B, Hq, rows, cols]`.

    It is a difference of running counts. On a GPU that takes one sum and one launch; other devices take the plain torch
    below.

    Args:
        low, high: `[B|1, Hq|1, rows, cols]` int32, of any value.
    """
    count = pad(chosen.cumsum(-1, dtype=torch.int32), (1, 0))  # [B, Hq, n + 1], chosen entries before each
    if chosen.is_cuda:
        from blocksparse.kernels.selecting.any_between_triton import any_between_triton

        return any_between_triton(count, low, high)
    return any_between_reference(count, low, high)


def any_between_reference(count: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The same in plain torch; `count` `[B, Hq, n + 1]` is how many chosen entries come before each, and in all."""
    n = count.shape[-1] - 1
    shape = (*count.shape[:2], *low.shape[2:])
    before, up_to = (count.gather(-1, x.clamp(0, n).long().expand(shape).flatten(2)) for x in (low, high + 1))
    return (before < up_to).view(shape)
