"""What attends in one layer, and what came of its calls."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Unpack, final

from attrs import Factory, define, evolve, field, frozen
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.hosts.transformers.prompt_mask import padded_behind
from blocksparse.inputs import UnsupportedError
from blocksparse.layers.attention import Attention, LayerTrace
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.spec import AttentionOptions, AttentionSpec

_log = logging.getLogger(__name__)
_COUNTING = Lock()  # several threads may run one model
_WAY_OUT = {
    "gradients": " (call the model under torch.no_grad())",
    "training": " (call model.eval() for inference)",
    "fewer than min_tokens": " (longer prompts are sparse; attach takes min_tokens)",
    "fewer than min_queries": " (larger chunks are sparse; attach takes min_queries)",
    "mask": " (masks that are no padding, packing or window stay dense)",
}


@final
@define(eq=False)
class Outcomes:
    """Counts why calls were dense until one is sparse, and hands everything to the recorder, if there is one."""

    model: str
    recorder: DensityRecorder | None
    _reasons: Counter[str] = field(factory=Counter, init=False)
    _settled: bool = field(default=False, init=False)  # a call was sparse, or the line is in the log

    def saw(self, layer: int, trace: LayerTrace, *, q_len: int, k_len: int, window: int | None) -> None:
        """A call of the pipeline, whose executor may have attended densely."""
        assert self.recorder is not None  # or nothing would be traced
        if trace.dense_because is not None:
            self.saw_dense(layer, trace.dense_because)
            return
        self.saw_sparse()
        self.recorder.saw_sparse(layer, trace.density(), q_len=q_len, k_len=k_len, window=window)

    def saw_sparse(self) -> None:
        self._settled = True

    def saw_dense(self, layer: int, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.saw_dense(layer, reason)
        if self._settled:
            return
        if reason == "decode":
            self.tell()  # whatever prompt was read, all of it was dense
        else:
            with _COUNTING:
                self._reasons[reason] += 1

    def traced_dense(self, reason: str) -> None:
        """Calls of a compiled graph are dense; how many there will be is not known when it is traced."""
        if not self._settled and reason != "decode":
            with _COUNTING:
                self._reasons[f"{reason}, compiled"] += 1

    def tell(self) -> None:
        """Log one line if calls were dense and none was sparse. A later call does nothing."""
        with _COUNTING:
            if self._settled or not self._reasons:
                return
            self._settled = True
        reasons = ", ".join(
            f"{times} x {why}{_WAY_OUT.get(why, '')}" for why, times in self._reasons.most_common()
        )
        _log.warning("no attention call of %s was sparse so far; dense calls: %s", self.model, reasons)


@final
@frozen(eq=False)
class LayerAttention:
    """Attends each prompt of a call sparsely if it is long enough and the pipeline can run it, or else densely."""

    attention: Attention | None
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
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Attend with these options, where a cache has dropped so many tokens before the first key."""
        histories = None
        if dropped:
            firsts = [0] if sequences is None else [span.first_key for span in sequences.spans]
            histories = [0 if first else dropped for first in firsts]  # dropped padding counts too
        return attend(self._call, q, k, v, options, sequences, histories)

    def dense_because(self, queries: int, keys: int, window: int | None, history: int = 0) -> str | None:
        """The reason why a prompt of this size is dense in this layer, or None.

        Its cache holds `keys` tokens, and has dropped `history` tokens before these.
        """
        if queries == 1:
            return "decode"
        if self.attention is None:
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
            assert self.attention is not None  # or there would be a reason
            try:
                if self.outcomes.recorder is None:
                    out = self.attention(q, k, v, **spec.arguments())
                    self.outcomes.saw_sparse()
                    return out
                trace = self.attention.trace(q, k, v, **spec.arguments())
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
