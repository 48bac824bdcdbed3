"""What attends in one layer, under an audit."""

from __future__ import annotations

from typing import Any, Unpack, final

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.audit.audit import Audit
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import AnyTrace, HeadGroups, HeadGroupsTrace
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.spec import Asked, AttentionSpec


@final
@frozen(eq=False)
class AuditedPipeline:
    """What attends in one layer, under an audit. It is called as a `Pipeline` is."""

    pipeline: LayerPipeline | Any  # or what is called like one, and has a trace
    layer: int
    audit: Audit
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`."""
        return attend(self._call, q, k, v, asked)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        dense, audited = self.audit.begins(self.layer, may_audit=not _is_captured(q))
        if dense:
            return dense_attention(q, k, v, spec)
        if not audited:
            out: Tensor = self.pipeline(q, k, v, **spec.arguments())
            return out
        trace: AnyTrace | HeadGroupsTrace = self.pipeline.trace(q, k, v, **spec.arguments())
        self.audit.compare(self.layer, trace)
        return trace.output.out

    def trace(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> AnyTrace | HeadGroupsTrace:
        """Make the same call with the same arguments, and return every value of it."""
        dense, audited = self.audit.begins(self.layer, may_audit=not _is_captured(q))
        if dense:
            return HeadGroups({tuple(range(k.shape[1])): None}).trace(q, k, v, **asked)
        trace: AnyTrace | HeadGroupsTrace = self.pipeline.trace(q, k, v, **asked)
        if audited:
            self.audit.compare(self.layer, trace)
        return trace


def _is_captured(x: Tensor) -> bool:
    """Whether the call is recorded in a CUDA graph, which would replay one draw of queries for ever."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
