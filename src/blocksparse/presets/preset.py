"""Shared parts of presets: types of arguments and results, and the default executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from blocksparse.check.validators import a, flag, optional
from blocksparse.execute.auto import AutoExecutor
from blocksparse.execute.executor import Executor
from blocksparse.execute.mean_correction import MeanCorrectionExecutor
from blocksparse.order.permutation import GlobalPermutation, Identity, Permuter
from blocksparse.pipeline import Pipeline
from blocksparse.score.scorer import BlockScores, Scorer
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.selector import Selector

_permuter, _executor = a(Permuter), optional(a(Executor))
_PLAIN = frozenset({int, float, bool, str, type(None), AutoExecutor})
ScoresT = TypeVar("ScoresT", bound=BlockScores)
Made = TypeVar("Made")
Arguments = ParamSpec("Arguments")

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
    *,
    mean_correction: bool = False,
) -> Preset[ScoresT]:
    """The pipeline of these stages: without an order tokens stay in place, and `AutoExecutor()` is the default.

    Args:
        mean_correction: let dropped blocks contribute their means, as in `MeanCorrectionExecutor`.
    """
    flag.check(mean_correction=mean_correction)
    if mean_correction:
        _executor.check(executor=executor)
    if order is None:
        order = Identity()
    else:
        _permuter.check(order=order)
    attend = AutoExecutor() if executor is None else executor
    return Pipeline(order, scorer, selector, MeanCorrectionExecutor(attend) if mean_correction else attend)


def kept(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """A preset that returns the same object for equal plain arguments, so that repeated calls are cheap."""
    found = cast("Callable[Arguments, Made]", lru_cache(maxsize=256, typed=True)(make))

    @wraps(make)
    def preset(*args: Arguments.args, **named: Arguments.kwargs) -> Made:
        plain = _PLAIN.issuperset(map(type, (*args, *named.values())))
        return found(*args, **named) if plain and not torch.compiler.is_compiling() else make(*args, **named)

    return preset
