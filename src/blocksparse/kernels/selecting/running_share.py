"""What cumulative rules share: entries are taken heaviest first, and each has the share of the total taken by then."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RunningShare(NamedTuple):
    """Entries along the last axis, in the order in which they are taken; all tensors have one shape."""

    order: Tensor  # int64, the place of each entry in the tensor that it came from
    ticks: Tensor  # int64, the weight of each entry
    before: Tensor  # fp32, the share of the total that is taken before the entry
    after: Tensor  # fp32, the share that is taken with it

    def put_back(self, taken: Tensor) -> Tensor:
        """`taken`, a bool for each entry in the order of taking, put back into the order of places."""
        return torch.empty_like(taken).scatter_(-1, self.order, taken)


def running_share(values: Tensor, first: Tensor | None = None) -> RunningShare:
    """Take non-negative `values` heaviest first, those of the mask `first` before all others, ties by place.

    Sums are of integers, so the shares do not depend on the order of summation: the same values give the same
    shares on every device. They are fp32, the precision of scores, so that rounding does not push a sum over a
    round target.
    """
    weight = _ticks(values)
    key = weight if first is None else weight.masked_fill(first, torch.iinfo(torch.int64).max)
    order = key.argsort(dim=-1, descending=True, stable=True)
    ranked = weight.gather(-1, order)
    reached = ranked.cumsum(-1)
    total = reached[..., -1:].double()
    return RunningShare(order, ranked, ((reached - ranked) / total).float(), (reached / total).float())


def _ticks(values: Tensor) -> Tensor:
    """Non-negative fp32 values as integers, from 2^29 to just below 2^30 for the heaviest one of a row; NaN counts as 0.

    The scale is a power of two, so only the rounding to integers loses anything; a sum of 2^23 entries stays below 2^53.
    """
    values = values.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).clamp_min(0.0)
    exponent = torch.frexp(values.amax(-1, keepdim=True)).exponent
    scale = (1053 - exponent.long() << 52).view(torch.float64)  # 2^(30 - exponent) in fp64; fp32 may not hold it
    return (values.double() * scale).round().long()
