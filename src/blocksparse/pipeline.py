"""`Pipeline` runs the four stages in order and does nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, final, overload

from attrs import Factory, evolve, field, frozen
from torch import Tensor

from blocksparse.class_line import Declared, check_gave, check_takes, declared
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.dense_attention import dense_attention
from blocksparse.executors.executor import Executor
from blocksparse.executors.logits import Logits
from blocksparse.geometry import Grid, hiding
from blocksparse.inputs import check_inputs
from blocksparse.opaque_call import OpaqueCall, attend, refuse_transforms
from blocksparse.permuters.permutation import GlobalPermutation, Permutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.precision import without_autocast
from blocksparse.runtime.repeated import Repeated
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.key_history import KeyHistory, one_for_each
from blocksparse.scorers.scorer import Scorer
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector
from blocksparse.sequences import Sequences
from blocksparse.trace import MaskT, PermutationT, ScoresT, Trace
from blocksparse.validators import a

_log = logging.getLogger(__name__)


@final
@frozen(eq=False)
class Pipeline(Generic[PermutationT, ScoresT, MaskT]):
    """Sparse prefill attention: order tokens, score blocks, select blocks, attend.

        Pipeline(SegmentKeySort(S=256), MeanPoolScorer(), TopCdf(0.9), TritonExecutor())(q, k, v)

    A pipeline is its own configuration: its repr is the Python expression that makes it. torch.compile sees a
    call as one node of the graph.

    Raises:
        TypeError: a stage needs a type that the stage before it does not give, by the type parameters that their
            classes declare. mypy reports the same.
    """

    permuter: Permuter[PermutationT] = field(validator=a(Permuter))
    scorer: Scorer[PermutationT, ScoresT] = field(validator=a(Scorer))
    selector: Selector[ScoresT, MaskT] = field(validator=a(Selector))
    executor: Executor[PermutationT, MaskT] = field(validator=a(Executor))
    _call: OpaqueCall = field(
        init=False,
        repr=False,
        default=Factory(lambda self: self._new_call(), takes_self=True),
    )
    _promised: _Promised = field(
        init=False,
        repr=False,
        default=Factory(
            lambda self: _promises(self.permuter, self.scorer, self.selector, self.executor), takes_self=True
        ),
    )

    def __attrs_post_init__(self) -> None:
        permutation, scores = declared(self.permuter, Permuter, 0), declared(self.scorer, Scorer, 1)
        check_takes(declared(self.scorer, Scorer, 0), permutation)
        check_takes(declared(self.executor, Executor, 0), permutation)
        check_takes(declared(self.selector, Selector, 0), scores)
        check_takes(declared(self.executor, Executor, 1), declared(self.selector, Selector, 1))

    @property
    def window(self) -> int | None:
        """How many tokens a query sees at most, its own included; None for all tokens up to its own."""
        return self.scorer.window

    @property
    def keeps_history(self) -> bool:
        """Whether a `KeyHistory` saves work: the scorer remembers keys, and the permuter leaves them in place."""
        return self.scorer.keeps_history and not self.permuter.moves_keys

    def in_window(self, window: int | None) -> Pipeline[PermutationT, ScoresT, MaskT]:
        """This pipeline for a layer with a sliding window, exactly: what lies outside of it is never attended to.

            pbs_attn(0.9).in_window(4096)(q, k, v)

        A query at position `p` sees the keys at `p - window < k <= p`, and of these those in selected blocks. It
        is Hugging Face's `sliding_window`. Blocks that lie outside get no score and are not selected, and
        `density()` is the share of dense attention within the window. Calls must be causal. None takes a window
        away.

        Raises:
            TypeError, ValueError: `window` is not a whole number, at least 1; or, as an `UnsupportedError`, the
                scorer knows no window. An executor that knows none refuses calls.
        """
        return evolve(self, scorer=self.scorer.in_window(window))

    @property
    def logits(self) -> Logits:
        """What the layer does to its logits and their softmax; the executor has it."""
        return self.executor.logits

    def with_logits(self, logits: Logits) -> Pipeline[PermutationT, ScoresT, MaskT]:
        """This pipeline for a layer with a softcap or attention sinks, exactly, in dense calls too.

            pbs_attn(0.9).with_logits(Logits(softcap=50.0))(q, k, v)

        Scorers know neither, so blocks are chosen by the plain logits. `Logits()` takes both away.

        Raises:
            TypeError, ValueError: `logits` is not a `Logits`; or, as an `UnsupportedError`, the executor has no
                field for them.
        """
        return self if logits is self.logits else evolve(self, executor=self.executor.with_logits(logits))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        sequences: Sequences | None = None,
        history: KeyHistory | Sequence[KeyHistory] | None = None,
    ) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

        Args:
            attn_mask: must be None, because the selector makes the mask.
            causal: whether query `i` sees only the keys up to position `N - M + i` (bottom-right aligned).
            scale: factor of the logits; `1 / sqrt(D)` if None.
            sequences: where several prompts lie in q, k and v; each runs by itself, and sees only its own keys.
                None for one prompt in each entry of the batch.
            history: what earlier chunks of this prompt, or of each of the `sequences`, left for later ones; the
                result is the same without. A call that attends densely leaves it as it is. torch.compile takes
                none.

        Raises:
            TypeError, ValueError: the pipeline or its executor cannot run these inputs.
            UnsupportedError: a history is given, and the scorer remembers nothing.
        """
        _refuse_mask(attn_mask)
        q, k, v, scale = check_inputs(q, k, v, causal=causal, scale=scale, sequences=sequences)
        if history is None:
            return attend(self._call, q, k, v, causal=causal, scale=scale, sequences=sequences)
        refuse_transforms("history")
        histories = one_for_each(history, sequences)
        if sequences is None:
            return OpaqueCall(partial(self._attend, history=histories[0]))(q, k, v, causal, scale)
        calls = [partial(self._attend_into, history=each) for each in histories]
        return self._call.each(q, k, v, sequences, causal, scale, calls)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> AttentionOutput:
        """Make the same call, and return the log of the softmax denominators beside the output.

        Outputs over disjoint sets of keys can be merged by their lse. The stages always run, even where the
        executor would have a plain call attend densely, since dense attention gives no lse here.

        Raises:
            TypeError, ValueError: the pipeline or its executor cannot run these inputs, or there is no lse.
        """
        refuse_transforms("with_lse")
        q, k, v, scale = check_inputs(q, k, v, causal=causal, scale=scale)
        with without_autocast(q):
            output = self._attend_sparsely(q, k, v, causal, scale)
        if output.lse is None:
            raise ValueError(
                f"{type(self.executor).__name__} gives no lse for tensors on {q.device.type}: call the pipeline "
                "itself, or choose another executor"
            )
        return output

    def _new_call(self) -> OpaqueCall:
        return OpaqueCall(Repeated(self._attend), Repeated(self._attend_into))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, history: KeyHistory | None = None
    ) -> Tensor:
        if reason := self.dense_because(q, k, v, causal=causal):
            return self._attend_densely(q, k, v, causal, scale, reason)
        return self._attend_sparsely(q, k, v, causal, scale, history).out

    def _attend_into(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        history: KeyHistory | None = None,
    ) -> None:
        """`_attend`, with the output written to `out`."""
        if reason := self.dense_because(q, k, v, causal=causal):
            out.copy_(self._attend_densely(q, k, v, causal, scale, reason))
            return
        permutation, mask = self._chosen(q, k, causal, scale, history)
        self.executor.attend_into(out, q, k, v, permutation, mask, scale=scale)

    def _attend_densely(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, reason: str) -> Tensor:
        _log.debug("dense attention runs: %s", reason)
        return dense_attention(q, k, v, causal=causal, scale=scale, window=self.window, logits=self.logits)

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str | None:
        """The reason why a call would attend densely, in the window if there is one; None if the stages run.

        Raises:
            ValueError: the call is not causal, and the pipeline has a window.
        """
        window = hiding(self.window, k.shape[2], causal=causal)
        return self.executor.dense_because_within(q, k, v, causal=causal, window=window)

    def _attend_sparsely(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, history: KeyHistory | None = None
    ) -> AttentionOutput:
        return self._execute(q, k, v, *self._chosen(q, k, causal, scale, history), scale)

    def _chosen(
        self, q: Tensor, k: Tensor, causal: bool, scale: float, history: KeyHistory | None
    ) -> tuple[PermutationT, MaskT]:
        """What the first three stages give. No scores are left, so that their memory is free while attending."""
        permutation = self._order(q, k, causal, scale)
        scores = self._score(q, k, permutation, causal, scale, history)
        return permutation, self._select(q, k, permutation, scores, causal)

    def _order(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> PermutationT:
        hiding(self.window, k.shape[2], causal=causal)
        permutation = self.permuter(q, k, causal=causal, scale=scale)
        check_gave(self._promised.permutation, permutation)
        permutation.check_fits(q, k, causal=causal)
        return permutation

    def _score(
        self,
        q: Tensor,
        k: Tensor,
        permutation: PermutationT,
        causal: bool,
        scale: float,
        history: KeyHistory | None = None,
    ) -> ScoresT:
        if history is None:
            scores = self.scorer(q, k, permutation, causal=causal, scale=scale)
        else:
            if permutation.k_index is not None:
                raise ValueError(
                    f"{type(self.permuter).__name__} moves keys, so that blocks change from chunk to chunk, and a "
                    "history is of blocks that stay: call without 'history'"
                )
            scores = self.scorer.with_history(q, k, permutation, history, causal=causal, scale=scale)
        check_gave(self._promised.scores, scores)
        scores.grid.check_fits(q, k, permutation, causal=causal, window=self.window)
        return scores

    def _select(self, q: Tensor, k: Tensor, permutation: PermutationT, scores: ScoresT, causal: bool) -> MaskT:
        mask = self.selector(scores)
        check_gave(self._promised.mask, mask)
        mask.grid.check_fits(q, k, permutation, causal=causal, window=self.window)
        return mask

    def _execute(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: PermutationT, mask: MaskT, scale: float
    ) -> AttentionOutput:
        output = self.executor(q, k, v, permutation, mask, scale=scale)
        check_gave((Declared(self.executor, AttentionOutput),), output)
        return output

    @overload
    def trace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        sequences: None = None,
        history: KeyHistory | None = None,
    ) -> Trace[PermutationT, ScoresT, MaskT]: ...

    @overload
    def trace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        sequences: Sequences,
        history: Sequence[KeyHistory] | None = None,
    ) -> list[Trace[PermutationT, ScoresT, MaskT] | None]: ...

    def trace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        sequences: Sequences | None = None,
        history: KeyHistory | Sequence[KeyHistory] | None = None,
    ) -> Trace[PermutationT, ScoresT, MaskT] | list[Trace[PermutationT, ScoresT, MaskT] | None]:
        """Make the same call with the same arguments, and return every value of it.

        Of `sequences` it returns a list with the trace of each one, and None for one without queries or keys.

        This takes more memory, because all values are kept. It may take more time, because blocks are chosen
        even where the executor then attends densely.
        """
        _refuse_mask(attn_mask)
        refuse_transforms("trace")
        q, k, v, scale = check_inputs(q, k, v, causal=causal, scale=scale, sequences=sequences)
        histories = one_for_each(history, sequences)
        with without_autocast(q):
            if sequences is None:
                return self._trace(q, k, v, causal, scale, histories[0])
            parts = sequences.parts(q, k, v, causal=causal)
            return [
                None if part is None else self._trace(*part, causal, scale, each)
                for part, each in zip(parts, histories, strict=True)
            ]

    def _trace(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, history: KeyHistory | None
    ) -> Trace[PermutationT, ScoresT, MaskT]:
        permutation = self._order(q, k, causal, scale)
        scores = self._score(q, k, permutation, causal, scale, history)
        mask = self._select(q, k, permutation, scores, causal)
        if (reason := self.dense_because(q, k, v, causal=causal)) is None:
            output = self._execute(q, k, v, permutation, mask, scale)
        else:
            out = self._attend_densely(q, k, v, causal, scale, reason)
            output = AttentionOutput(out, None, _everything(q, k, mask), self.logits)
        return Trace(q, k, v, scale, permutation, scores, mask, output, reason)


class _Promised(NamedTuple):
    """The types that each of the first three stages must give, and the stages that say so."""

    permutation: tuple[Declared, ...]
    scores: tuple[Declared, ...]
    mask: tuple[Declared, ...]


def _promises(permuter: object, scorer: object, selector: object, executor: object) -> _Promised:
    """What each stage must give: the type that its class declares or, without one, what later stages need."""

    def promise(stage: object, least: type, said: tuple[Declared, ...], *needs: Declared) -> tuple[Declared, ...]:
        return Declared(stage, least), *(said or (Declared(stage, need.value) for need in needs))

    orders = *declared(scorer, Scorer, 0), *declared(executor, Executor, 0)
    return _Promised(
        promise(permuter, Permutation, declared(permuter, Permuter, 0), *orders),
        promise(scorer, BlockScores, declared(scorer, Scorer, 1), *declared(selector, Selector, 0)),
        promise(selector, BlockMask, declared(selector, Selector, 1), *declared(executor, Executor, 1)),
    )


def _refuse_mask(attn_mask: None) -> None:
    if attn_mask is not None:
        raise TypeError(
            "a pipeline takes no attention mask, its selector makes one; sequences=Sequences.padded(mask [B, N]) "
            "leaves padding out, Sequences.packed(lengths) separates prompts, and pipeline.in_window(tokens) has "
            "a sliding window"
        )


def _everything(q: Tensor, k: Tensor, mask: BlockMask) -> BlockMask:
    """The mask of what dense attention visits: every block that is reachable in original order."""
    sizes = mask.grid
    grid = Grid.of(
        q, k, GlobalPermutation(), q_block=sizes.q_block, k_block=sizes.k_block, causal=sizes.causal,
        window=sizes.window,
    )  # fmt: skip
    return BlockMask(grid.reachable.expand(q.shape[0], q.shape[1], -1, -1), grid)
