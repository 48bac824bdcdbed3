"""Selectors that are made of other selectors."""

from __future__ import annotations

from typing import Generic, TypeVar, final

import torch
from attrs import field, frozen

from blocksparse.check.stage import check_got
from blocksparse.check.validators import a, optional, size, whole
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.score.combined import ScoresPair
from blocksparse.score.scorer import BlockScores
from blocksparse.select.block_mask import BlockMask, RankedBlockMask
from blocksparse.select.selector import (
    Combination,
    MaskT_co,
    PositionSelector,
    ScoresT_contra,
    Selector,
    SelectorTraits,
)


@final
@frozen(cache_hash=True)
class SelectorByCausality(Selector[ScoresT_contra, MaskT_co]):
    """Choose by `causal` in a causal call, as for text, and by `otherwise` in another, as for images and video."""

    causal: Selector[ScoresT_contra, MaskT_co] = field(validator=a(Selector))
    otherwise: Selector[ScoresT_contra, MaskT_co] = field(validator=a(Selector))

    traits = SelectorTraits(reads_values=False)

    def __call__(self, scores: ScoresT_contra) -> MaskT_co:
        return (self.causal if scores.grid.causal else self.otherwise)(scores)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return (self.causal if causal else self.otherwise).keeps_everything(M, N, causal=causal)

    def alignment(self, causal: bool) -> int:
        return (self.causal if causal else self.otherwise).alignment(causal)


FirstT_contra = TypeVar("FirstT_contra", bound=BlockScores)
SecondT_contra = TypeVar("SecondT_contra", bound=BlockScores)


@final
@frozen(cache_hash=True)
class SelectorPair(
    Combination[ScoresPair[FirstT_contra, SecondT_contra], BlockMask], Generic[FirstT_contra, SecondT_contra]
):
    """Keep what `first` keeps by the first scores of a `ScorerPair`, and what `second` keeps by the second.

    `a | b` joins two selectors of the same scores; this joins two with a score each. Source: Prism, arXiv
    2602.08426.

    Raises:
        TypeError: in a call, if a selector needs other scores than there are for it.
    """

    first: Selector[FirstT_contra, BlockMask] = field(validator=a(Selector))
    second: Selector[SecondT_contra, BlockMask] = field(validator=a(Selector))

    def __call__(self, scores: ScoresPair[FirstT_contra, SecondT_contra]) -> BlockMask:
        check_got(self.first, Selector, 0, scores.first)
        check_got(self.second, Selector, 0, scores.second)
        return self.first(scores.first) | self.second(scores.second)


@final
@frozen(cache_hash=True)
class SharedByGroup(Combination[ScoresT_contra, BlockMask]):
    """Keep for a whole group of query heads what `inner` keeps for any of them (BFLA, eq. 14)."""

    inner: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.inner(scores).share_heads()


@final
@frozen(cache_hash=True)
class Refined(Combination[ScoresT_contra, BlockMask]):
    """Keep what `inner` keeps, cut into blocks `n` times smaller on both sides, without invisible ones.

    `Refined(a, n) | OnTiles(rule, n)` also keeps the smaller blocks that `rule` keeps by their positions. Source:
    BFLA, section 3.3.
    """

    inner: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    n: int = field(converter=whole, validator=size)

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.inner(scores).refine(self.n)


@final
@frozen(cache_hash=True)
class OnTiles(Combination[BlockScores, BlockMask]):
    """Keep what `rule` keeps on blocks `n` times smaller on both sides (BFLA, section 3.3).

    It goes with a refined rule on scores, as in `Refined(a, n) | OnTiles(Band(256), n)`.
    """

    rule: PositionSelector = field(validator=a(PositionSelector))
    n: int = field(converter=whole, validator=size)

    traits = SelectorTraits(mask=True, reads_values=False)

    def __call__(self, scores: BlockScores, *, mask: BlockMask | None = None) -> BlockMask:
        grid = scores.grid.refined(self.n)
        return self.rule.on(grid) if mask is None else self.rule.joined(mask, grid)


@final
@frozen(cache_hash=True)
class Ranked(Combination[ScoresT_contra, RankedBlockMask]):
    """Keep what `inner` keeps, ranked by score, best first, for executors that stop early (S2O, section 3.3).

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

    traits = SelectorTraits()

    def __call__(self, scores: ScoresT_contra) -> RankedBlockMask:
        mask, grid = self.inner(scores), scores.grid
        if mask.keep.shape != scores.values.shape:
            raise ValueError(
                f"'Ranked' needs a mask of the shape of the scores, {tuple(scores.values.shape)}, and 'inner' "
                f"gives {tuple(mask.keep.shape)}. Leave 'Refined' and 'SharedByGroup' out of 'inner'."
            )
        forced = scores.forced
        if self.first is not None:
            opened = self.first.on(grid)
            mask, forced = mask | opened, opened.keep if forced is None else opened.keep | forced
        opening = keep_visible(forced, grid, diagonal=True)
        column = torch.arange(grid.cols, dtype=torch.int32, device=mask.keep.device).expand(mask.keep.shape)
        if any(scores.values.stride()):
            order = scores.values.nan_to_num(nan=float("-inf")).argsort(dim=-1, descending=True, stable=True)
            rank = torch.empty_like(column, memory_format=torch.contiguous_format).scatter_(-1, order, column)
        else:  # all blocks have one score, that of `NoScorer`, so none comes before another
            rank = column
        rank = rank.add(opening, alpha=-grid.cols)
        return RankedBlockMask(mask.keep, mask.grid, rank)
