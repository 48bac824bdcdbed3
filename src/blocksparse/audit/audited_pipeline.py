"""What attends in one layer, under an audit."""

from __future__ import annotations

from typing import final

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from blocksparse.audit.audit import Audit
from blocksparse.executors.dense_attention import dense_attention
from blocksparse.executors.logits import Logits
from blocksparse.head_groups import AnyTrace, HeadGroups, HeadGroupsTrace
from blocksparse.inputs import check_inputs
from blocksparse.opaque_call import OpaqueCall, attend
from blocksparse.schedule import LayerPipeline


@final
@frozen(eq=False)
class AuditedPipeline:
    """What attends in one layer, under an audit. It is called as a `Pipeline` is."""

    pipeline: LayerPipeline
    layer: int
    audit: Audit
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def in_window(self, window: int | None) -> AuditedPipeline:
        """The same for a layer with a sliding window; see `Pipeline.in_window`."""
        return evolve(self, pipeline=self.pipeline.in_window(window))

    def with_logits(self, logits: Logits) -> AuditedPipeline:
        """The same for a layer with a softcap or attention sinks; see `Pipeline.with_logits`."""
        return evolve(self, pipeline=self.pipeline.with_logits(logits))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`."""
        q, k, v, scale = check_inputs(q, k, v, causal=causal, scale=scale)
        return attend(self._call, q, k, v, causal=causal, scale=scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        dense, audited = self.audit.begins(self.layer, may_audit=not _is_captured(q))
        if dense:
            window, logits = self.pipeline.window, self.pipeline.logits
            return dense_attention(q, k, v, causal=causal, scale=scale, window=window, logits=logits)
        if not audited:
            return self.pipeline(q, k, v, causal=causal, scale=scale)
        trace = self.pipeline.trace(q, k, v, causal=causal, scale=scale)
        self.audit.compare(self.layer, trace)
        return trace.output.out

    def trace(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> AnyTrace | HeadGroupsTrace:
        """Make the same call with the same arguments, and return every value of it."""
        dense, audited = self.audit.begins(self.layer, may_audit=not _is_captured(q))
        if dense:
            window, logits = self.pipeline.window, self.pipeline.logits
            everywhere = HeadGroups({tuple(range(k.shape[1])): None}, window=window, logits=logits)
            return everywhere.trace(q, k, v, causal=causal, scale=scale)
        trace = self.pipeline.trace(q, k, v, causal=causal, scale=scale)
        if audited:
            self.audit.compare(self.layer, trace)
        return trace


def _is_captured(x: Tensor) -> bool:
    """Whether the call is recorded in a CUDA graph, which would replay one draw of queries for ever."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
