"""`Pipeline`, the public interface of four stages. `PipelineCore` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Unpack, final, overload

from attrs import Factory, evolve, field, frozen
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.check.validators import a, flag
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.inputs import checked, refuse_mask
from blocksparse.launch.torch_modes import refuse_transforms, without_autocast
from blocksparse.order.permutation import Permuter
from blocksparse.pipeline_core import Done, PipelineCore, tell_nobody
from blocksparse.score.key_history import KeyHistory, a_history, one_for_each
from blocksparse.score.scorer import Scorer
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.selector import Selector
from blocksparse.spec import AttentionOptions, AttentionSpec
from blocksparse.values import Choice, MaskT, PermutationT, ScoresT, Trace

_chosen = a(Choice).or_else("Get one from pipeline.choose(q, k).")


@final
@frozen(cache_hash=True)
class Pipeline(Generic[PermutationT, ScoresT, MaskT]):
    """Sparse prefill attention: order tokens, score blocks, select blocks, attend.

        Pipeline(SegmentKeySort(S=256), MeanPoolScorer(), TopCdf(0.9), TritonExecutor())(q, k, v)

    A pipeline is its own configuration: its repr is the Python expression that makes it, and pipelines of equal
    stages are equal. To `torch.compile` a call is one node of the graph.

    Args:
        replay: whether a call on a GPU may replay the launches of an earlier one with the same sizes, without
            running the stages. The result has the same bits. Calls with PyTorch operations between our kernels
            always run their stages, and so do calls with stages from elsewhere that are not `replayable`.
            `evolve(pipeline, replay=False)` turns replay off.

    Raises:
        TypeError: a stage needs a type that the stage before it does not give, by the type parameters that their
            classes declare. Type checkers report the same.
    """

    permuter: Permuter[PermutationT]
    scorer: Scorer[PermutationT, ScoresT]
    selector: Selector[ScoresT, MaskT]
    executor: Executor[PermutationT, MaskT]
    replay: bool = field(default=True, validator=flag, kw_only=True)
    _core: PipelineCore[PermutationT, ScoresT, MaskT] = field(
        init=False,
        repr=False,
        eq=False,
        default=Factory(
            lambda self: PipelineCore.of(self.permuter, self.scorer, self.selector, self.executor, self.replay),
            takes_self=True,
        ),
    )
    _call: OpaqueCall = field(
        init=False,
        repr=False,
        eq=False,
        default=Factory(lambda self: OpaqueCall(self._core.run, writes=True), takes_self=True),
    )

    def __repr__(self) -> str:
        stages = (f"{name}={getattr(self, name)!r}" for name in ("permuter", "scorer", "selector", "executor"))
        return f"Pipeline({', '.join(stages)}{'' if self.replay else ', replay=False'})"

    def __or__(
        self: Pipeline[PermutationT, ScoresT, BlockMask], other: Selector[ScoresT, BlockMask]
    ) -> Pipeline[PermutationT, ScoresT, BlockMask]:
        """Make the same pipeline, that also keeps what `other` keeps: `mean_pooling(0.97) | Band(128)`."""
        return evolve(self, selector=self.selector | other) if isinstance(other, Selector) else NotImplemented

    @property
    def keeps_history(self) -> bool:
        """Whether a `KeyHistory` saves work: the scorer remembers keys, and the permuter leaves them in place."""
        return self.scorer.traits.history and not self.permuter.moves_keys

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
        remaining: int = 0,
        sequences: Sequences | None = None,
        history: KeyHistory | Sequence[KeyHistory] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

        Of an empty batch the result is empty, as in PyTorch; `choose`, `trace` and `with_lse` refuse it.

        Args:
            attn_mask: must be None. The selector makes the mask.
            causal: query `i` sees only the keys up to position `N - M + i` (bottom-right aligned).
            scale: factor of the logits. `1 / sqrt(D)` if None.
            window: a layer's sliding window in tokens. A query at position `p` sees the keys at `p - window < k <=
                p`, as with Hugging Face's `sliding_window`. Blocks outside are not scored, and `density()` is the
                share of dense attention within it.
            softcap: a layer's softcap: a logit `x` becomes `softcap * tanh(x / softcap)`. Scorers do not know it.
            sinks: a layer's attention sinks: one more logit without a value, a number, or one per query head as a
                sequence or a tensor `[Hq]`. Scorers do not know them.
            remaining: tokens of the prompt after the last query, in a call for one chunk of a prompt. 0 if the
                call ends the prompt. `LastQueries` needs it, and so does `auto`. `Sequences` have their own.
            sequences: where several prompts lie in q, k and v. Each runs by itself, and sees only its own keys.
                None for one prompt in each entry of the batch.
            history: what earlier chunks of this prompt, or of each of the `sequences`, left for later ones. The
                result is the same without. A call that attends densely leaves it as it is. torch.compile takes
                none.
            out: `[B, Hq, M, Dv]`. The output of one prompt is written to it, and it is returned. It may be a part
                of a larger tensor. A new tensor if None. Under torch.compile it must be None.

        Raises:
            TypeError, ValueError: the pipeline or its executor cannot run these inputs.
            UnsupportedError: these inputs are right, but the executor has no kernel for them; or a history is
                given, and the scorer remembers nothing.
        """
        refuse_mask(attn_mask)
        options: AttentionOptions = {
            "causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks,
            "remaining": remaining,
        }  # fmt: skip
        histories = None if history is None else one_for_each(history, sequences)
        return attend(self._call, q, k, v, options, sequences, histories, out)

    def choose(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        history: KeyHistory | None = None,
        **options: Unpack[AttentionOptions],
    ) -> Choice[MaskT]:
        """Return the blocks that a call with these arguments attends to, without attending.

            choice = pipeline.choose(q, k)
            out = pipeline.attend(q, k, v, choice).out

        Args:
            v: the values, which only a `ValueScorer` needs.
            options: `causal`, `scale`, `window`, `softcap`, `sinks` and `remaining`, as in a call.

        Raises:
            TypeError, ValueError: as in a call; or the scorer needs `v`.
        """
        refuse_transforms("choose")
        a_history.check(history=history)
        q, k, values, spec = checked(q, k, k if v is None else v, options)
        with without_autocast(q):
            mask = self._core.choose(q, k, None if v is None else values, spec, history)[2]
        given = options.get("scale")
        return Choice(mask, spec if given is None else evolve(spec, scale=given), q.shape[3], q.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, choice: Choice[MaskT], out: Tensor | None = None
    ) -> AttentionOutput:
        """Attend to the blocks of a choice, which may have been made with other q, k or v.

        Args:
            out: the tensor `[B, Hq, M, Dv]` for the output. A new one if None.

        Raises:
            TypeError, ValueError: as in a call, or the choice was made for tensors of other sizes, precision or
                device.
        """
        refuse_transforms("attend")
        _chosen.check(choice=choice)
        q, k, v, spec = checked(q, k, v, choice.spec.arguments())
        choice.check_fits(q, k)
        with without_autocast(q):
            return self._core.execute(q, k, v, choice.mask, spec, out)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> AttentionOutput:
        """Return the output and the log-sum-exp of each query row.

        Outputs over disjoint sets of keys can be merged by their lse. The stages always run, even where the
        executor would have a plain call attend densely, since dense attention gives no lse here.

        Args:
            options: `causal`, `scale`, `window`, `softcap`, `sinks` and `remaining`, as in a call.

        Raises:
            TypeError, ValueError: the pipeline or its executor cannot run these inputs, or gives no lse.
        """
        refuse_transforms("with_lse")
        output = self.attend(q, k, v, self.choose(q, k, v, **options))
        if output.lse is None:
            raise ValueError(
                f"{type(self.executor).__name__} gives no lse for tensors on {q.device.type}. Call the pipeline "
                "itself, or choose another executor."
            )
        return output

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
        """The reason why a call attends densely instead of running its stages, or None.

        It is the executor's reason. Or the number of tokens alone shows that the selector keeps everything, and
        the executor allows dense attention then.
        """
        return self._core.dense_because(q, k, v, spec)

    @overload
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, *, sequences: None = None,
        history: KeyHistory | None = None, done: Done = tell_nobody, **options: Unpack[AttentionOptions],
    ) -> Trace[PermutationT, ScoresT, MaskT]: ...  # fmt: skip
    @overload
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, *, sequences: Sequences,
        history: Sequence[KeyHistory] | None = None, done: Done = tell_nobody, **options: Unpack[AttentionOptions],
    ) -> list[Trace[PermutationT, ScoresT, MaskT] | None]: ...  # fmt: skip
    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, *, sequences: Sequences | None = None,
        history: KeyHistory | Sequence[KeyHistory] | None = None, done: Done = tell_nobody,
        **options: Unpack[AttentionOptions],
    ) -> Trace[PermutationT, ScoresT, MaskT] | list[Trace[PermutationT, ScoresT, MaskT] | None]:  # fmt: skip
        """Make the same call with the same arguments, and return every value of it.

        Of `sequences` it returns a list with the trace of each one, and None for one without queries or keys.

        This takes more memory, because all values are kept. It may take more time, because blocks are selected
        even where the executor then attends densely.

        Args:
            done: called with each of the four values as soon as it exists, for example to time the stages.
        """
        refuse_mask(attn_mask)
        refuse_transforms("trace")
        q, k, v, spec = checked(q, k, v, options, sequences)
        histories = one_for_each(history, sequences)
        with without_autocast(q):
            if sequences is None:
                return self._core.trace(q, k, v, spec, histories[0], done)
            return [
                None if part is None else self._core.trace(*part, its, done)
                for part, its in zip(sequences.parts(q, k, v, spec), histories, strict=True)
            ]
