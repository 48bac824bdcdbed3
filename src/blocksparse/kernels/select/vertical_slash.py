"""Vertical-slash: the heaviest columns and diagonals of a head (its lines), and the blocks that they cross.

`vertical_slash_blocks`: lines are chosen in runs of equal length, and a running count marks the chosen ones. A block holds
the keys, or the distances, from one number to another, so it is crossed if the count grows between them.

The heaviest lines (columns, bands or distances) of each head are as many as hold a share of the mass, or a number:

    * `fewest`: the heaviest lines until they hold `mass`, but at least `least` and at most `most` of them. It does this for
      two kinds at once.
    * `heaviest`: the `count` heaviest lines. The first `first` come before all others, and those that are spared are left
      out. `heaviest_of_both` does it for two kinds.

`fewest` and `heaviest_of_both` give running counts, `heaviest` which lines are taken.

Ties go to the line that stands first. Shares are of ticks (`top_cdf.py`), so that they do not depend on the order of
summation. On GPUs one launch searches each head's lines, `LONGEST` at most, for the lightest that is taken. The plain torch
below sorts, and chooses the same lines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import FAR, Heads
from blocksparse.kernels.masks.grid import AlwaysKept, BlockGrid
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.select.top_cdf import running_share


class ChosenRuns(NamedTuple):
    """Chosen keys, by slot, or chosen distances."""

    counts: Tensor  # [B, Hq, runs + 1] int32, how many runs are chosen before each, and in all
    run: int  # keys or distances in a run


def running_count(chosen: Tensor) -> Tensor:
    """How many entries of `chosen` `[B, Hq, n]` bool are chosen before each, and in all: `[B, Hq, n + 1]` int32."""
    return pad(chosen.cumsum(-1, dtype=torch.int32), (1, 0))


@on_gpus(of=lambda columns, *_, **__: columns.counts)
def vertical_slash_blocks(
    columns: ChosenRuns,
    bands: ChosenRuns,
    grid: BlockGrid,
    *,
    whole: Tensor | None = None,
    first: int | None = None,
    also: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """The blocks that chosen lines cross, and the diagonal, as far as queries can see: `[B, Hq, rows, cols]` bool.

    Args:
        columns: chosen keys.
        bands: chosen distances.
        whole: `[1, Hq|1, 1]`. Heads where it is 1 in fp32 keep what they can see.
        first: a number of tokens. Blocks that hold one of the first so many are kept.
        also: `[B|1, Hq|1, rows, cols]` bool, kept too.
        heads: those whose mask is asked for. In the others entries have no meaning.
    """
    cols = torch.arange(grid.k_first.shape[-1] + 1, device=columns.counts.device)
    reached = columns.counts[..., (cols * columns.run).clamp(max=columns.counts.shape[-1] - 1)]
    keep = (reached[..., :-1] < reached[..., 1:]).unsqueeze(2) | crossed(bands, grid)
    if whole is not None:
        keep = keep | (whole.float() >= 1).unsqueeze(-1)
    if also is not None:
        keep = keep | also
    return keep_visible(keep, grid, always=AlwaysKept(first=first), diagonal=True)


def crossed(bands: ChosenRuns, grid: BlockGrid) -> Tensor:
    """The blocks that may hold a pair at a chosen distance, `[B, Hq, rows, cols]` bool.

    The distances in a block lie between its first query minus its last key and its last query minus its first key. So every
    chosen pair is in one of these blocks. A run of distances as long as a block crosses two diagonals of blocks.
    """
    low, high = grid.q_first - grid.k_last, grid.q_last - grid.k_first
    if not grid.causal:
        low, high = torch.maximum(low, -high), torch.maximum(high, -low)
    runs = bands.counts.shape[-1] - 1
    shape = (*bands.counts.shape[:2], *low.shape[2:])
    ends = (x.div(bands.run, rounding_mode="floor") for x in (low, high + bands.run))
    before, up_to = (bands.counts.gather(-1, x.clamp(0, runs).long().expand(shape).flatten(2)) for x in ends)
    return (before < up_to).view(shape)


LONGEST = 32768


def _are_short(columns: Tensor, bands: Tensor, *_: object, **__: object) -> bool:
    return max(columns.shape[-1], bands.shape[-1]) <= LONGEST


@on_gpus(torch.float32, where=_are_short)
def fewest(columns: Tensor, bands: Tensor, mass: Tensor, least: int, most: int | None) -> tuple[Tensor, Tensor]:
    """The running counts, `[B, H, n + 1]` int32, of the lines taken of each kind: weights `[B, H, n]`, not negative.

    Args:
        mass: `[1, H|1, 1]`, in [0, 1]. It is rounded to fp32, as shares are.
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
        spared: `(last, most)`: the last `last` lines `[1, H|1, 1]` float64 are neither taken nor counted. At most
            `most` of them, and none of the first `first`.
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
