"""The heaviest lines (columns, bands or distances) of each head: as many as hold a share of the mass, or a number.

    fewest    the heaviest lines until they hold `mass`, but at least `least` and at most `most` of them; for two kinds at once
    heaviest  the `count` heaviest lines; the first `first` come before all others, and those that are spared are left out;
              `heaviest_of_both` does it for two kinds

The first and the last give running counts (`lines.py`), `heaviest` which lines are taken.

Ties go to the line that stands first. Shares are of ticks (`running_share.py`), so that they do not depend on the order of
summation. On GPUs one launch searches each head's lines for the lightest that is taken; rows of over `LONGEST` lines, CPU
tensors and float64 take the plain torch below, which sorts. Both choose the same lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.selecting.lines import running_count
from blocksparse.kernels.selecting.running_share import running_share

LONGEST = 32768


def _are_short(columns: Tensor, bands: Tensor, *_: object, **__: object) -> bool:
    return max(columns.shape[-1], bands.shape[-1]) <= LONGEST


@on_gpus(torch.float32, where=_are_short)
def fewest(columns: Tensor, bands: Tensor, mass: Tensor, least: int, most: int | None) -> tuple[Tensor, Tensor]:
    """The running counts, `[B, H, n + 1]` int32, of the lines taken of each kind: weights `[B, H, n]`, not negative.

    Args:
        mass: `[1, H|1, 1]`, in [0, 1]; it is rounded to fp32, as shares are.
    """
    taken = (fewest_of_one(lines, mass, least, most) for lines in (columns, bands))
    first, second = map(running_count, taken)
    return first, second


def fewest_of_one(lines: Tensor, mass: Tensor, least: int, most: int | None) -> Tensor:
    """Which lines of one kind are taken, `[B, H, n]` bool, in plain torch."""
    share = running_share(lines)
    rank = torch.arange(lines.shape[-1], device=lines.device)
    taken = (share.before < mass.float()) | (rank < least)
    if most is not None:
        taken = taken & (rank < most)
    return share.put_back(taken)


@on_gpus(torch.float32, where=lambda weight, *_, **__: weight.shape[-1] <= LONGEST)
def heaviest(weight: Tensor, count: Tensor, first: int, spared: tuple[Tensor, int] | None = None) -> Tensor:
    """Which of the lines of `weight` `[B, H, n]` are taken, `[B, H, n]` bool; NaN counts as 0.

    Args:
        count: `[1, H|1, 1]` float64.
        spared: `(last, most)`: the last `last` lines `[1, H|1, 1]` float64 are not taken, nor counted, but at most `most`
            of them, and none of the first `first`.
    """
    first, spared = min(first, FAR), None if spared is None else (spared[0], min(spared[1], FAR))
    each = torch.arange(weight.shape[-1], device=weight.device)
    weight = weight.nan_to_num(nan=0.0)
    left_out = torch.zeros_like(each, dtype=torch.bool)
    if spared is not None:
        left_out = (each >= len(each) - spared[0].clamp_max(spared[1])) & (each >= first)
        weight = weight.masked_fill(left_out, -1.0)
    weight = weight.masked_fill(each < first, float("inf"))
    order = weight.argsort(dim=-1, descending=True, stable=True)
    taken = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, (each < count).expand(order.shape))
    return taken & ~left_out


@on_gpus(torch.float32, where=_are_short)
def heaviest_of_both(
    columns: Tensor,
    bands: Tensor,
    counts: tuple[Tensor, Tensor],
    firsts: tuple[int, int],
    spared: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The running counts, `[B, H, n + 1]` int32, of what `heaviest` takes of each kind; `spared` is of the columns."""
    return (
        running_count(heaviest(columns, counts[0], first=firsts[0], spared=spared)),
        running_count(heaviest(bands, counts[1], first=firsts[1])),
    )
