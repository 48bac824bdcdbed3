"""`PipelineCore` runs a permuter, a scorer, a selector and an executor, in this order, and checks their types."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, NamedTuple, final

from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.check.per_head import check_heads
from blocksparse.check.stage import Declared, check_gave, check_takes, declared
from blocksparse.check.validators import a
from blocksparse.execute.dense_attention import dense_attention, everything
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.inputs import UnsupportedError
from blocksparse.launch.replay import ByValue, is_ours, owner_of_value, replayed
from blocksparse.order.permutation import Permutation, Permuter
from blocksparse.score.key_history import History, KeyHistory
from blocksparse.score.scorer import BlockScores, Scorer, scored
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.selector import Selector
from blocksparse.select.vertical_slash import reads_beyond
from blocksparse.spec import AttentionSpec
from blocksparse.values import MaskT, PermutationT, ScoresT, Trace


class StageTypes(NamedTuple):
    """The types that each stage must give, and the stages that say so."""

    permutation: tuple[Declared, ...]
    scores: tuple[Declared, ...]
    mask: tuple[Declared, ...]
    output: tuple[Declared, ...]

    @classmethod
    def of(cls, permuter: object, scorer: object, selector: object, executor: object) -> StageTypes:
        """Types that the stages declare or, where one does not, that later stages need."""
        rule = "The order is permuter, scorer, selector, executor."
        a(Permuter).or_else(rule).check(permuter=permuter)
        a(Scorer).or_else(rule).check(scorer=scorer)
        a(Selector).or_else(rule).check(selector=selector)
        a(Executor).or_else(rule).check(executor=executor)
        order, scores = declared(permuter, Permuter, 0), declared(scorer, Scorer, 1)
        mask = declared(selector, Selector, 1)
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


Done = Callable[[object], None]
"""A function that is told what a stage gives."""

EVERYTHING = "every block is kept"  # a reason for dense attention


def tell_nobody(given: object) -> None:
    """A `Done` that does nothing, for callers that do not time stages."""


@final
@frozen(cache_hash=True)
class PipelineCore(Generic[PermutationT, ScoresT, MaskT]):
    """The stages of a pipeline. Its methods take checked inputs, outside of autocast.

    Args:
        replay: whether `run` may replay what an earlier call launched, as in `Pipeline`.

    Raises:
        TypeError: a stage needs a type that the stage before it does not give.
        ValueError: the scorer leaves out heads whose values the selector needs.
    """

    permuter: Permuter[PermutationT]
    scorer: Scorer[PermutationT, ScoresT]
    selector: Selector[ScoresT, MaskT]
    executor: Executor[PermutationT, MaskT]
    replay: bool = True
    _types: StageTypes = field(
        init=False,
        eq=False,
        default=Factory(
            lambda self: StageTypes.of(self.permuter, self.scorer, self.selector, self.executor), takes_self=True
        ),
    )

    tail: int | None = field(  # `tail_of` these stages
        init=False,
        eq=False,
        default=Factory(
            lambda self: tail_of(self.permuter, self.scorer, self.selector, self.executor), takes_self=True
        ),
    )

    def __attrs_post_init__(self) -> None:
        tau = self.scorer.traits.values_below
        if tau is not None and reads_beyond(self.selector, tau):
            raise ValueError(
                f"{self.scorer!r} gives values in heads whose divergence is below 'tau' alone, and "
                f"{self.selector!r} looks at others. Give a scorer without 'tau', or a RoutedByDivergence of the "
                "same 'tau'."
            )

    @cached_property
    def owner(self) -> object:
        """Whose the launch graphs are, for `replayed`: with stages of users it takes 0.1 ms to find."""
        return owner_of_value(self)

    @staticmethod
    def of(
        permuter: Permuter[PermutationT],
        scorer: Scorer[PermutationT, ScoresT],
        selector: Selector[ScoresT, MaskT],
        executor: Executor[PermutationT, MaskT],
        replay: bool,
    ) -> PipelineCore[PermutationT, ScoresT, MaskT]:
        """These stages: one object for all that are equal, so that new ones need not be looked at again.

        Stages from elsewhere may hold what is not part of their value, so each keeps its own.
        """
        key = permuter, scorer, selector, executor, replay
        return _KNOWN.find(key, lambda: PipelineCore(*key)) or PipelineCore(*key)

    def choose(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        spec: AttentionSpec,
        history: History = None,
        done: Done = tell_nobody,
    ) -> tuple[PermutationT, ScoresT, MaskT]:
        """Run the first three stages; `done` gets each result as soon as it is there.

        Only a `ValueScorer` looks at `v`.
        """
        if not len(q):
            raise ValueError(
                f"'q' has an empty batch, {tuple(q.shape)}, of which no stage chooses anything. Call the pipeline "
                "itself, which returns an empty output."
            )
        permutation = self.permuter(q, k, spec)
        check_gave(self._types.permutation, permutation)
        permutation.check_fits(q, k, causal=spec.causal)
        done(permutation)
        if history is not None:
            self._check_history(permutation, history, spec)
            if spec.causal:
                history.check_follows(q, k)
        scores = scored(self.scorer, q, k, v, permutation, spec, history)
        check_gave(self._types.scores, scores)
        scores.grid.check_fits(q, k, permutation, spec)
        done(scores)
        mask = self.selector(scores)
        check_gave(self._types.mask, mask)
        if mask.grid is not scores.grid:
            mask.grid.check_fits(q, k, permutation, spec)
        done(mask)
        return permutation, scores, mask

    def execute(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        """Run the executor, the fourth stage."""
        output = self.executor(q, k, v, mask, spec, out)
        check_gave(self._types.output, output)
        return output

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
        """The reason why a call attends densely instead, or None."""
        if (reason := self.executor.dense_because(q, k, v, spec)) is not None or not self.executor.may_be_left_out:
            return reason
        M, N = q.shape[2], k.shape[2]
        if not keeps_everything(
            self.selector, M, N, causal=spec.causal, remaining=seen(spec, self.tail).remaining
        ):
            return None
        return EVERYTHING

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        out: Tensor | None = None,
        history: History = None,
    ) -> Tensor:
        """The output of a call `[B, Hq, M, Dv]`, which is in `out` if there is one."""
        if (reason := self.dense_because(q, k, v, spec)) is None:
            if self.replay and history is None:  # which changes from call to call
                return replayed(self._sparse, q, k, v, seen(spec, self.tail), out)
            return self._sparse(q, k, v, spec, out, history)
        check_heads(self, q.shape[1])  # as the stages would
        dense = dense_attention(q, k, v, spec, because=reason)
        return dense if out is None else out.copy_(dense)

    def _sparse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        out: Tensor | None = None,
        history: History = None,
    ) -> Tensor:
        # No scores are left, so that their memory is free while attending.
        return self.execute(q, k, v, self.choose(q, k, v, spec, history)[2], spec, out).out

    def trace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        history: History = None,
        done: Done = tell_nobody,
    ) -> Trace[PermutationT, ScoresT, MaskT]:
        """Every value of a call; blocks are chosen even where it is dense."""
        permutation, scores, mask = self.choose(q, k, v, spec, history, done)
        if (reason := self.dense_because(q, k, v, spec)) is None:
            output = self.execute(q, k, v, mask, spec)
        else:
            grid, out = mask.grid, dense_attention(q, k, v, spec, because=reason)
            seen = everything(q, k, spec, q.shape[1], q_block=grid.q_block, k_block=grid.k_block)
            output = AttentionOutput(out, None, seen)
        done(output)
        return Trace(q, k, v, spec, permutation, scores, mask, output, reason)

    def _check_history(self, permutation: Permutation, history: KeyHistory, spec: AttentionSpec) -> None:
        if not self.scorer.traits.history:
            because = f"{type(self.scorer).__name__} remembers nothing of keys"
            raise UnsupportedError(f"{because}. Call without 'history', which would save nothing.", because)
        if permutation.k_index is not None:
            raise ValueError(
                f"{type(self.permuter).__name__} moves keys, so that blocks change from chunk to chunk, and a "
                "history is of blocks that stay. Call without 'history'."
            )


def keeps_everything(selector: Selector[Any, Any], M: int, N: int, *, causal: bool, remaining: int) -> bool:
    """Whether sizes alone say that `selector` keeps every block of a call, which its prompt goes on after."""
    if not selector.keeps_everything(M, N, causal=causal):
        return False
    return not remaining or selector.keeps_everything(M + remaining, N + remaining, causal=causal)


def tail_of(*stages: object) -> int | None:
    """How many tokens at the end of a prompt these stages treat apart; None if every number may count."""
    tails = [stage.prompt_tail for stage in stages if isinstance(stage, Selector)]
    if not is_ours(stages) or None in tails:  # a stage from elsewhere may look at `remaining` itself
        return None
    return max([tail for tail in tails if tail is not None], default=0)


def seen(spec: AttentionSpec, tail: int | None) -> AttentionSpec:
    """`spec` as stages of this `tail` see it, the same wherever they do not see the end of the prompt.

    Launch graphs are kept by it, and so not for each number of `remaining`.
    """
    return spec if tail is None else spec.with_remaining(min(spec.remaining, tail))


_KNOWN: ByValue[PipelineCore[Any, Any, Any]] = ByValue(256)
