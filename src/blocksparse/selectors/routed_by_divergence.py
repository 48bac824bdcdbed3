"""One of two rules for each head (FlexPrefill, arXiv 2502.20766)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.class_line import Declared, check_takes, declared
from blocksparse.checks.per_head import PerHead, at_least_0, over_blocks, per_head, written
from blocksparse.checks.validators import a
from blocksparse.kernels.common.below import Below
from blocksparse.kernels.selecting.routed import routed
from blocksparse.scorers.vertical_slash import VerticalSlashScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(cache_hash=True)
class RoutedByDivergence(Selector[VerticalSlashScores, BlockMask]):
    """Choose by `similar` in heads whose pooled block weights are near the true ones, else by `otherwise`.

    FlexPrefill calls heads of the first kind query-aware and heads of the second kind vertical-slash. The weights
    are near if their divergence is below `tau`; a NaN is not.

    Args:
        tau: bound of the divergence, which is at most sqrt(ln 2) = 0.833; a number, or one per query head. With 0
            every head chooses by `otherwise`.

    Raises:
        ValueError: in a call, if a rule changes the grid or shares masks between heads. Put `Refined` and
            `SharedByGroup` around this selector instead; or if the scorer left heads out by another `tau`.
    """

    tau: PerHead = field(converter=per_head, validator=at_least_0, repr=written)
    similar: Selector[VerticalSlashScores, BlockMask] = field(validator=a(Selector))
    otherwise: Selector[VerticalSlashScores, BlockMask] = field(validator=a(Selector))

    def __attrs_post_init__(self) -> None:
        for rule in (self.similar, self.otherwise):
            check_takes(declared(rule, Selector, 0), (Declared(type(self), VerticalSlashScores),))

    def __call__(self, scores: VerticalSlashScores) -> BlockMask:
        if scores.tau not in (None, self.tau):
            raise ValueError(
                f"the scorer's 'tau' is {scores.tau!r}, so that it left out heads which this rule, whose 'tau' is "
                f"{self.tau!r}, may ask for; give both the same"
            )
        heads = Below(scores.divergence, over_blocks(self.tau, scores.values))
        similar = self.similar.in_heads(scores, heads).keep
        otherwise = self.otherwise.in_heads(scores, heads.rest()).keep
        for keep in (similar, otherwise):
            if keep.shape != scores.values.shape:
                raise ValueError(
                    "both rules of 'RoutedByDivergence' must give masks of the shape of the scores, "
                    f"{tuple(scores.values.shape)}: {tuple(keep.shape)}; put 'Refined' and 'SharedByGroup' "
                    "around it"
                )
        return BlockMask(routed(heads, similar, otherwise), scores.grid)

    def reads_beyond(self, tau: PerHead) -> bool:
        return tau != self.tau or self.otherwise.reads_beyond(tau)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return all(rule.keeps_everything(M, N, causal=causal) for rule in (self.similar, self.otherwise))

    def alignment(self, causal: bool) -> int:
        raise ValueError(
            "'RoutedByDivergence' decides by the last queries of a call, which only its last part has"
        )
