"""What attends in one layer: its pipeline, or dense attention for short prompts and short windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from attrs import Factory, evolve, field, frozen
from torch import Tensor

from blocksparse.audit.audited_pipeline import AuditedPipeline
from blocksparse.executors.dense_attention import dense_attention
from blocksparse.executors.logits import PLAIN, Logits
from blocksparse.inputs import UnsupportedError, check_inputs
from blocksparse.integrations.transformers.layer_logits import LayerLogits
from blocksparse.integrations.transformers.outcomes import Outcomes
from blocksparse.opaque_call import OpaqueCall, attend
from blocksparse.schedule import LayerPipeline
from blocksparse.sequences import Sequences


@final
@frozen(eq=False)
class LayerAttention:
    """Attends each prompt of a call sparsely if it is long enough and the pipeline can run it, or else densely."""

    pipeline: LayerPipeline | AuditedPipeline | None
    layer: int
    min_tokens: int
    min_queries: int
    min_window: int | None  # a sliding window of fewer tokens is dense; None for all windows
    outcomes: Outcomes
    window: int | None = None  # how many keys a query sees at most; the pipeline then has it too
    logits: Logits = PLAIN  # what the layer does to its logits; the pipeline then has them too
    none_because: str = "no pipeline for this layer"
    _read: LayerLogits = field(factory=LayerLogits, init=False, repr=False)
    _others: dict[int | None, LayerAttention] = field(factory=dict, init=False, repr=False)  # by their window
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def called(self, window: int | None, kwargs: Mapping[str, Any]) -> LayerAttention:
        """The same layer with a sliding window, and with the softcap and the sinks among the model's arguments.

        Each window gives one object, which compiled graphs may hold, for as long as the sinks do not change.
        """
        logits = self._read.of(kwargs)
        if window == self.window and logits is self.logits:
            return self
        other = self._others.get(window)
        if other is None or other.logits is not logits:
            pipeline, because = self.pipeline, self.none_because
            try:
                pipeline = None if pipeline is None else pipeline.in_window(window).with_logits(logits)
            except UnsupportedError as error:
                pipeline, because = None, error.because
            other = evolve(self, pipeline=pipeline, window=window, logits=logits, none_because=because)
            self._others[window] = other
        return other

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, sequences: Sequences | None
    ) -> Tensor:
        q, k, v, scale = check_inputs(q, k, v, causal=True, scale=scale, sequences=sequences)
        return attend(self._call, q, k, v, causal=True, scale=scale, sequences=sequences)

    def dense_because(self, queries: int, keys: int) -> str | None:
        """The reason why a prompt of this size is dense in this layer, or None."""
        if queries == 1:
            return "decode"
        if self.pipeline is None:
            return self.none_because
        if keys < self.min_tokens:
            return "fewer than min_tokens"
        if self.window is not None and self.window < keys:
            if self.min_window is None:
                return "sliding window"
            if self.window < self.min_window:
                return "a sliding window of fewer than min_window"
        return "fewer than min_queries" if queries < self.min_queries else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        reason = self.dense_because(q.shape[2], k.shape[2])
        if reason is None:
            assert self.pipeline is not None  # or there would be a reason
            try:
                if self.outcomes.recorder is None:
                    out = self.pipeline(q, k, v, causal=causal, scale=scale)
                    self.outcomes.saw_sparse()
                    return out
                trace = self.pipeline.trace(q, k, v, causal=causal, scale=scale)
            except UnsupportedError as error:
                reason = error.because
            else:
                self.outcomes.saw(self.layer, trace, q_len=q.shape[2], k_len=k.shape[2], window=self.window)
                return trace.output.out
        self.outcomes.saw_dense(self.layer, reason)
        return dense_attention(q, k, v, causal=causal, scale=scale, window=self.window, logits=self.logits)
