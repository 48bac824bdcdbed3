"""`Pipeline` runs the four stages in order and does nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Unpack, final, overload

from attrs import Factory, evolve, field, frozen
from torch import Tensor

from blocksparse.attention_spec import Asked, AttentionSpec
from blocksparse.batches.sequences import Sequences
from blocksparse.checks.class_line import check_gave
from blocksparse.checks.inputs import UnsupportedError, checked
from blocksparse.checks.validators import a, flag
from blocksparse.choice import Choice
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.dense_attention import dense_attention, everything
from blocksparse.executors.executor import Executor
from blocksparse.executors.stage_types import StageTypes
from blocksparse.permuters.permutation import Permutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.runtime.opaque_call import OpaqueCall, attend, refuse_transforms
from blocksparse.runtime.precision import without_autocast
from blocksparse.runtime.repeated import Repeated
from blocksparse.scorers.key_history import KeyHistory, one_for_each
from blocksparse.scorers.scorer import Scorer
from blocksparse.selectors.selector import Selector
from blocksparse.trace import MaskT, PermutationT, ScoresT, Trace

Done = Callable[[object], None]
"""A function that is told what a stage gives."""


@final
@frozen(cache_hash=True)
class Pipeline(Generic[PermutationT, ScoresT, MaskT]):
    """Sparse prefill attention: order tokens, score blocks, select blocks, attend.

        Pipeline(SegmentKeySort(S=256), MeanPoolScorer(), TopCdf(0.9), TritonExecutor())(q, k, v)

    A pipeline is its own configuration: its repr is the Python expression that makes it, and pipelines of equal
    stages are equal. torch.compile sees a call as one node of the graph.

    Args:
        repeats: whether a call on a GPU may repeat the launches of an earlier one with the same sizes, and run no
            stage; the result has the same bits. `evolve(pipeline, repeats=False)` is the same pipeline without.

    Raises:
        TypeError: a stage needs a type that the stage before it does not give, by the type parameters that their
            classes declare. mypy reports the same.
    """

    permuter: Permuter[PermutationT] = field(validator=a(Permuter))
    scorer: Scorer[PermutationT, ScoresT] = field(validator=a(Scorer))
    selector: Selector[ScoresT, MaskT] = field(validator=a(Selector))
    executor: Executor[PermutationT, MaskT] = field(validator=a(Executor))
    repeats: bool = field(default=True, validator=flag, kw_only=True)
    _call: OpaqueCall = field(
        init=False,
        repr=False,
        eq=False,
        default=Factory(lambda self: self._new_call(), takes_self=True),
    )
    _types: StageTypes = field(
        init=False,
        repr=False,
        eq=False,
        default=Factory(
            lambda self: StageTypes.of(self.permuter, self.scorer, self.selector, self.executor), takes_self=True
        ),
    )

    def __repr__(self) -> str:
        stages = (f"{name}={getattr(self, name)!r}" for name in ("permuter", "scorer", "selector", "executor"))
        return f"Pipeline({', '.join(stages)}{'' if self.repeats else ', repeats=False'})"

    @property
    def keeps_history(self) -> bool:
        """Whether a `KeyHistory` saves work: the scorer remembers keys, and the permuter leaves them in place."""
        return self.scorer.keeps_history and not self.permuter.moves_keys

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        sequences: Sequences | None = None,
        history: KeyHistory | Sequence[KeyHistory] | None = None,
    ) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

        Args:
            attn_mask: must be None, because the selector makes the mask.
            causal: whether query `i` sees only the keys up to position `N - M + i` (bottom-right aligned).
            scale: factor of the logits; `1 / sqrt(D)` if None.
            window: a layer's sliding window: a query at position `p` sees the keys at `p - window < k <= p`, as
                with Hugging Face's `sliding_window`. Blocks outside are not scored, and `density()` is the share
                of dense attention within it.
            softcap: a layer's softcap: a logit `x` becomes `softcap * tanh(x / softcap)`. Scorers do not know it.
            sinks: a layer's attention sinks: one more logit without a value, a number, or one per query head as a
                sequence or a tensor `[Hq]`. Scorers do not know them.
            sequences: where several prompts lie in q, k and v; each runs by itself, and sees only its own keys.
                None for one prompt in each entry of the batch.
            history: what earlier chunks of this prompt, or of each of the `sequences`, left for later ones; the
                result is the same without. A call that attends densely leaves it as it is. torch.compile takes
                none.

        Raises:
            TypeError, ValueError: the pipeline or its executor cannot run these inputs.
            UnsupportedError: these inputs are right, but the executor has no kernel for them; or a history is
                given, and the scorer remembers nothing.
        """
        _refuse_mask(attn_mask)
        if history is None:
            return attend(
                self._call, q, k, v, sequences, causal=causal, scale=scale, window=window, softcap=softcap,
                sinks=sinks,
            )  # fmt: skip
        refuse_transforms("history")
        histories = one_for_each(history, sequences)
        q, k, v, spec = checked(
            q, k, v, sequences, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        if sequences is None:
            return OpaqueCall(partial(self._attend, history=histories[0]))(q, k, v, spec)
        calls = [partial(self._attend_into, history=each) for each in histories]
        return self._call.each(q, k, v, sequences, spec, calls)

    def choose(
        self, q: Tensor, k: Tensor, *, history: KeyHistory | None = None, **asked: Unpack[Asked]
    ) -> Choice[MaskT]:
        """Run the first three stages: which blocks a call with these arguments attends to.

            choice = pipeline.choose(q, k)
            out = pipeline.attend(q, k, v, choice).out

        Args:
            asked: `causal`, `scale`, `window`, `softcap` and `sinks`, as of a call.

        Raises:
            TypeError, ValueError: as of a call.
        """
        refuse_transforms("choose")
        one_for_each(history, None)
        q, k, _, spec = checked(q, k, k, **asked)
        with without_autocast(q):
            mask = self._choose(q, k, spec, history)[2]
        given = asked.get("scale")
        return Choice(mask, spec if given is None else evolve(spec, scale=given), q.shape[3], q.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, choice: Choice[MaskT], out: Tensor | None = None
    ) -> AttentionOutput:
        """Run the fourth stage: attend to the blocks of a choice, which may be one for other q, k or v.

        Args:
            out: what the output is written to, `[B, Hq, M, Dv]`; a new tensor if None.

        Raises:
            TypeError, ValueError: as of a call, or the choice was made for tensors of other sizes, precision or
                device.
        """
        refuse_transforms("attend")
        a(Choice).check(choice=choice)
        q, k, v, spec = checked(q, k, v, **choice.spec.arguments())
        choice.check_fits(q, k)
        with without_autocast(q):
            return self._execute(q, k, v, choice.mask, spec, out)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> AttentionOutput:
        """Make the same call, and return the log of the softmax denominators beside the output.

        Outputs over disjoint sets of keys can be merged by their lse. The stages always run, even where the
        executor would have a plain call attend densely, since dense attention gives no lse here.

        Args:
            asked: `causal`, `scale`, `window`, `softcap` and `sinks`, as of a call.

        Raises:
            TypeError, ValueError: the pipeline or its executor cannot run these inputs, or there is no lse.
        """
        refuse_transforms("with_lse")
        output = self.attend(q, k, v, self.choose(q, k, **asked))
        if output.lse is None:
            raise ValueError(
                f"{type(self.executor).__name__} gives no lse for tensors on {q.device.type}: call the pipeline "
                "itself, or choose another executor"
            )
        return output

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
        """The reason why a call attends densely instead of running its stages, or None.

        It is the executor's; or that the selector keeps everything of so many tokens, by their number alone, where
        the executor may be left out then.
        """
        if (reason := self.executor.dense_because(q, k, v, spec)) is not None or not self.executor.may_be_left_out:
            return reason
        M, N = q.shape[2], k.shape[2]
        if not self.selector.keeps_everything(M, N, causal=spec.causal):
            return None
        return f"{self.selector!r} keeps every block of {M} queries and {N} keys"

    def _new_call(self) -> OpaqueCall:
        if not self.repeats:
            return OpaqueCall(self._attend, self._attend_into)
        return OpaqueCall(Repeated(self._attend), Repeated(self._attend_into))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        out: Tensor | None = None,
        history: KeyHistory | None = None,
    ) -> Tensor:
        """The output of a call, which is in `out` if there is one."""
        if (reason := self.dense_because(q, k, v, spec)) is None:
            # No scores are left, so that their memory is free while attending.
            return self._execute(q, k, v, self._choose(q, k, spec, history)[2], spec, out).out
        dense = dense_attention(q, k, v, spec, because=reason)
        return dense if out is None else out.copy_(dense)

    def _attend_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        out: Tensor,
        history: KeyHistory | None = None,
    ) -> None:
        self._attend(q, k, v, spec, out, history)

    def _choose(
        self,
        q: Tensor,
        k: Tensor,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
        done: Done = lambda _: None,
    ) -> tuple[PermutationT, ScoresT, MaskT]:
        """What the first three stages give; `done` is told each as soon as it is there."""
        permutation = self.permuter(q, k, spec)
        check_gave(self._types.permutation, permutation)
        permutation.check_fits(q, k, causal=spec.causal)
        done(permutation)
        if history is not None:
            self._check_history(permutation)
            if spec.causal:
                history.check_follows(q, k)
        scores = self.scorer(q, k, permutation, spec, history)
        check_gave(self._types.scores, scores)
        scores.grid.check_fits(q, k, permutation, spec)
        done(scores)
        mask = self.selector(scores)
        check_gave(self._types.mask, mask)
        mask.grid.check_fits(q, k, permutation, spec)
        done(mask)
        return permutation, scores, mask

    def _check_history(self, permutation: Permutation) -> None:
        if not self.scorer.keeps_history:
            because = f"{type(self.scorer).__name__} remembers nothing of keys"
            raise UnsupportedError(f"{because}: call without 'history', which would save nothing", because)
        if permutation.k_index is not None:
            raise ValueError(
                f"{type(self.permuter).__name__} moves keys, so that blocks change from chunk to chunk, and a "
                "history is of blocks that stay: call without 'history'"
            )

    def _execute(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        output = self.executor(q, k, v, mask, spec, out)
        check_gave(self._types.output, output)
        return output

    @overload
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, *, sequences: None = None,
        history: KeyHistory | None = None, done: Done = lambda _: None, **asked: Unpack[Asked],
    ) -> Trace[PermutationT, ScoresT, MaskT]: ...  # fmt: skip
    @overload
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, *, sequences: Sequences,
        history: Sequence[KeyHistory] | None = None, done: Done = lambda _: None, **asked: Unpack[Asked],
    ) -> list[Trace[PermutationT, ScoresT, MaskT] | None]: ...  # fmt: skip
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, *, sequences: Sequences | None = None,
        history: KeyHistory | Sequence[KeyHistory] | None = None, done: Done = lambda _: None,
        **asked: Unpack[Asked],
    ) -> Trace[PermutationT, ScoresT, MaskT] | list[Trace[PermutationT, ScoresT, MaskT] | None]:  # fmt: skip
        """Make the same call with the same arguments, and return every value of it.

        Of `sequences` it returns a list with the trace of each one, and None for one without queries or keys.

        This takes more memory, because all values are kept. It may take more time, because blocks are chosen
        even where the executor then attends densely.

        Args:
            done: is told each of the four values as soon as it is there, to take the time of stages, say.
        """
        _refuse_mask(attn_mask)
        refuse_transforms("trace")
        q, k, v, spec = checked(q, k, v, sequences, **asked)
        histories = one_for_each(history, sequences)
        with without_autocast(q):
            if sequences is None:
                return self._trace(q, k, v, spec, histories[0], done)
            parts = sequences.parts(q, k, v, causal=spec.causal)
            return [
                None if part is None else self._trace(*part, spec, each, done)
                for part, each in zip(parts, histories, strict=True)
            ]

    def _trace(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, history: KeyHistory | None, done: Done
    ) -> Trace[PermutationT, ScoresT, MaskT]:
        permutation, scores, mask = self._choose(q, k, spec, history, done)
        if (reason := self.dense_because(q, k, v, spec)) is None:
            output = self._execute(q, k, v, mask, spec)
        else:
            grid, out = mask.grid, dense_attention(q, k, v, spec, because=reason)
            seen = everything(q, k, spec, q.shape[1], q_block=grid.q_block, k_block=grid.k_block)
            output = AttentionOutput(out, None, seen)
        done(output)
        return Trace(q, k, v, spec, permutation, scores, mask, output, reason)


def _refuse_mask(attn_mask: None) -> None:
    if attn_mask is not None:
        raise TypeError(
            "a pipeline takes no attention mask, its selector makes one; sequences=Sequences.padded(mask [B, N]) "
            "leaves padding out, Sequences.packed(lengths) separates prompts, and window=tokens is a sliding "
            "window"
        )
