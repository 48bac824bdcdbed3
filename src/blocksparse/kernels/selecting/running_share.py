"""How much of a total has been taken before and after each entry, heaviest first: what cumulative rules share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RunningShare(NamedTuple):
    """Entries along the last axis in the order they are taken; all of one shape."""

    order: Tensor  # int64, where each entry stands
    ticks: Tensor  # int64, what it weighs
    before: Tensor  # fp32, share of the total taken before it
    after: Tensor  # fp32, the same with it

    def put_back(self, taken: Tensor) -> Tensor:
        """Bool per entry in the order of taking, back in place."""
        return torch.empty_like(taken).scatter_(-1, self.order, taken)


def running_share(values: Tensor, first: Tensor | None = None) -> RunningShare:
    """Take non-negative `values` heaviest first, those of the mask `first` before all others; ties in place.

    Sums are of integers, so the shares do not depend on the order of summation: the same values give the same
    shares on every device. They are fp32, the precision of scores: rounding must not push a sum over a round
    target.
    """
    weight = _ticks(values)
    key = weight if first is None else weight.masked_fill(first, torch.iinfo(torch.int64).max)
    order = key.argsort(dim=-1, descending=True, stable=True)
    ranked = weight.gather(-1, order)
    reached = ranked.cumsum(-1)
    total = reached[..., -1:].double()
    return RunningShare(order, ranked, ((reached - ranked) / total).float(), (reached / total).float())


def _ticks(values: Tensor) -> Tensor:
    """Non-negative fp32 values as integers, 2^30 to the heaviest one; NaN counts for nothing.

    The scale is a power of two, so this is exact up to one rounding, and a sum of 2^23 entries stays below 2^53.
    """
    values = values.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).clamp_min(0.0)
    exponent = torch.frexp(values.amax(-1, keepdim=True)).exponent
    scale = (1053 - exponent.long() << 52).view(torch.float64)  # 2^(30 - exponent), which fp32 may not hold
    return (values.double() * scale).round().long()
