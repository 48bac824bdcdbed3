"""Type checks of four stages: when they are composed, and for their results in a call."""

from __future__ import annotations

from typing import NamedTuple

from blocksparse.checks.class_line import Declared, check_takes, declared
from blocksparse.checks.validators import a
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.executor import Executor
from blocksparse.permuters.permutation import Permutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.scorer import Scorer
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


class StageTypes(NamedTuple):
    """The types that each stage must give, and the stages that say so."""

    permutation: tuple[Declared, ...]
    scores: tuple[Declared, ...]
    mask: tuple[Declared, ...]
    output: tuple[Declared, ...]

    @classmethod
    def of(cls, permuter: object, scorer: object, selector: object, executor: object) -> StageTypes:
        """Types that the stages declare or, where one does not, that later stages need.

        Raises:
            TypeError: one is not such a stage, or needs a value that the previous stage does not return.
        """
        rule = "the order is permuter, scorer, selector, executor"
        a(Permuter).or_else(rule).check(permuter=permuter)
        a(Scorer).or_else(rule).check(scorer=scorer)
        a(Selector).or_else(rule).check(selector=selector)
        a(Executor).or_else(rule).check(executor=executor)
        order, scores, mask = (
            declared(permuter, Permuter, 0),
            declared(scorer, Scorer, 1),
            declared(selector, Selector, 1),
        )
        orders = *declared(scorer, Scorer, 0), *declared(executor, Executor, 0)
        check_takes(declared(scorer, Scorer, 0), order)
        check_takes(declared(executor, Executor, 0), order)
        check_takes(declared(selector, Selector, 0), scores)
        check_takes(declared(executor, Executor, 1), mask)
        return cls(
            _promised(permuter, Permutation, order, orders),
            _promised(scorer, BlockScores, scores, declared(selector, Selector, 0)),
            _promised(selector, BlockMask, mask, declared(executor, Executor, 1)),
            (Declared(type(executor), AttentionOutput),),
        )


def _promised(
    stage: object, least: type, said: tuple[Declared, ...], needed: tuple[Declared, ...]
) -> tuple[Declared, ...]:
    cls = type(stage)
    return Declared(cls, least), *(said or (Declared(cls, need.value) for need in needed))
