"""What attends in one layer: its pipeline, or dense attention for short prompts and short windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack, final

from attrs import Factory, evolve, field, frozen
from torch import Tensor

from blocksparse.audit.audited_pipeline import AuditedPipeline
from blocksparse.batch.sequences import Sequences
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.inputs import UnsupportedError
from blocksparse.integrations.transformers.outcomes import Outcomes
from blocksparse.integrations.transformers.prompt_mask import padded_behind
from blocksparse.layers.same_choice import SameChoice
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.spec import Asked, AttentionSpec


@final
@frozen(eq=False)
class LayerAttention:
    """Attends each prompt of a call sparsely if it is long enough and the pipeline can run it, or else densely."""

    pipeline: LayerPipeline | SameChoice | AuditedPipeline | None
    layer: int
    min_tokens: int
    min_queries: int
    min_window: int | None  # a sliding window of fewer tokens is dense; None for all windows
    outcomes: Outcomes
    begins: Callable[[], None] | None = None  # is told that a call of the layer begins
    _call: OpaqueCall = field(
        init=False,
        repr=False,
        default=Factory(
            lambda self: OpaqueCall(self._attend, begins=self.begins, ends=_attend_last), takes_self=True
        ),
    )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences | None = None,
        *,
        dropped: int = 0,
        **asked: Unpack[Asked],
    ) -> Tensor:
        """Attend as `asked`, where a cache has dropped so many tokens before the first key."""
        histories = None
        if dropped:
            firsts = [0] if sequences is None else [span.first_key for span in sequences.spans]
            histories = [0 if first else dropped for first in firsts]  # dropped padding counts too
        return attend(self._call, q, k, v, asked, sequences, histories)

    def dense_because(self, queries: int, keys: int, window: int | None, history: int = 0) -> str | None:
        """The reason why a prompt of this size is dense in this layer, or None.

        Its cache holds `keys` tokens, and has dropped `history` tokens before these.
        """
        if queries == 1:
            return "decode"
        if self.pipeline is None:
            return "no pipeline for this layer"
        if window is not None and window < keys:
            if self.min_window is None:
                return "sliding window"
            if window < self.min_window:
                return "a sliding window of fewer than min_window"
        if history + keys < self.min_tokens:
            return "fewer than min_tokens"
        return "fewer than min_queries" if queries < self.min_queries else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, history: int = 0) -> Tensor:
        reason = self.dense_because(q.shape[2], k.shape[2], spec.window, history)
        if reason is None:
            assert self.pipeline is not None  # or there would be a reason
            try:
                if self.outcomes.recorder is None:
                    out = self.pipeline(q, k, v, **spec.arguments())
                    self.outcomes.saw_sparse()
                    return out
                trace = self.pipeline.trace(q, k, v, **spec.arguments())
            except UnsupportedError as error:
                reason = error.because
            else:
                self.outcomes.saw(self.layer, trace, q_len=q.shape[2], k_len=k.shape[2], window=spec.window)
                return trace.output.out
        self.outcomes.saw_dense(self.layer, reason)
        return dense_attention(q, k, v, spec)


def _attend_last(out: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences) -> None:
    """Attend with the last query of entries in which it is padding: `generate` goes on from there all the same.

    It sees the prompt before it, as in a model without a pipeline.
    """
    N, window, plain = k.shape[2], spec.window, evolve(spec, window=None)
    for span in padded_behind(sequences):
        end = span.first_key + span.keys
        begin = span.first_key if window is None else max(span.first_key, N - window)
        if begin < end:
            one, seen = slice(span.entry, span.entry + 1), slice(begin, end)
            out[one, :, -1:] = dense_attention(q[one, :, -1:], k[one, :, seen], v[one, :, seen], plain)
