"""The order in which kept blocks are visited (S2O, section 3.3)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen

from blocksparse.checks.alignment import of_parts
from blocksparse.checks.validators import a, optional
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.selectors.block_mask import BlockMask, RankedBlockMask
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.selectors.selector import ScoresT_contra, Selector


@final
@frozen(cache_hash=True)
class Ranked(Selector[ScoresT_contra, RankedBlockMask]):
    """Keep what `inner` keeps, ranked by score, best first, for executors that stop early.

    Forced blocks, the diagonal and what `first` keeps get negative ranks, so they are visited first and in any
    case. Ties go to the lower column, so without scores (`NoScorer`) blocks are visited in the order of the
    permutation.

    Args:
        inner: chooses what is kept.
        first: a rule of position whose blocks are kept too. With `Band(128)` every query attends to the 128 keys
            before it, however early its row stops. A key that no map holds is in no block: `GlobalIndexMap` with a
            `prefix` needs a `near` of as many tokens as the band.

    Raises:
        ValueError: in a call, if `inner` changes the grid or shares masks between heads.
    """

    inner: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    first: PositionSelector | None = field(default=None, validator=optional(a(PositionSelector)), kw_only=True)

    def __call__(self, scores: ScoresT_contra) -> RankedBlockMask:
        mask, grid = self.inner(scores), scores.grid
        if mask.keep.shape != scores.values.shape:
            raise ValueError(
                f"'Ranked' needs a mask of the shape of the scores, {tuple(scores.values.shape)}, and 'inner' "
                f"gives {tuple(mask.keep.shape)}; leave 'Refined' and 'SharedByGroup' out of 'inner'"
            )
        forced = scores.forced
        if self.first is not None:
            opened = self.first.on(grid)
            mask, forced = mask | opened, opened.keep if forced is None else opened.keep | forced
        opening = within_reach(forced, grid, diagonal=True)
        place = torch.arange(grid.cols, dtype=torch.int32, device=mask.keep.device).expand(mask.keep.shape)
        if any(scores.values.stride()):
            order = scores.values.nan_to_num(nan=float("-inf")).argsort(dim=-1, descending=True, stable=True)
            rank = torch.empty_like(place, memory_format=torch.contiguous_format).scatter_(-1, order, place)
        else:  # all blocks have one score, that of `NoScorer`, so none comes before another
            rank = place
        rank = rank.add(opening, alpha=-grid.cols)
        return RankedBlockMask(mask.keep, mask.grid, rank)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        rules = (self.inner,) if self.first is None else (self.inner, self.first)
        return any(rule.keeps_everything(M, N, causal=causal) for rule in rules)

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, *(rule for rule in (self.inner, self.first) if rule is not None))
