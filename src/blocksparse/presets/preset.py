"""What presets have in common: the types of their arguments and of what they give, and who attends by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from blocksparse.checks.validators import a
from blocksparse.executors.auto import AutoExecutor
from blocksparse.executors.executor import Executor
from blocksparse.permuters.identity import Identity
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.pipeline import Pipeline
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.scorer import Scorer
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector

_permuter = a(Permuter)
ScoresT = TypeVar("ScoresT", bound=BlockScores)

Numbers = float | Sequence[float] | Tensor
"""One number for all query heads, or one for each."""

BlockExecutor = Executor[GlobalPermutation, BlockMask]
"""An executor that can end a preset."""

Preset = Pipeline[GlobalPermutation, ScoresT, BlockMask]
"""A pipeline with one order of keys, whose mask says no more than which blocks are kept."""


def preset(
    order: Permuter[GlobalPermutation] | None,
    scorer: Scorer[GlobalPermutation, ScoresT],
    selector: Selector[ScoresT, BlockMask],
    executor: BlockExecutor | None,
) -> Preset[ScoresT]:
    """The pipeline of these stages: without an order tokens stay in place, and `AutoExecutor()` is the default."""
    if order is None:
        order = Identity()
    else:
        _permuter.check(order=order)
    return Pipeline(order, scorer, selector, AutoExecutor() if executor is None else executor)
