"""A pipeline of one layer that records its calls."""

from __future__ import annotations

from typing import Unpack, final

from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.attention_spec import Asked, AttentionSpec
from blocksparse.audit.audited_pipeline import AuditedPipeline
from blocksparse.calls.opaque_call import OpaqueCall, attend
from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.layers.schedule import LayerPipeline


@final
@frozen(eq=False)
class Recorded:
    """A pipeline that is called as it is by itself, and tells a recorder the density of every call,
    or why it was dense."""

    pipeline: LayerPipeline | AuditedPipeline
    layer: int
    recorder: DensityRecorder
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> Tensor:
        return attend(self._call, q, k, v, asked)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        trace = self.pipeline.trace(q, k, v, **spec.arguments())
        if trace.dense_because is not None:
            self.recorder.saw_dense(self.layer, trace.dense_because)
            return trace.output.out
        sizes = {"q_len": q.shape[2], "k_len": k.shape[2]}
        self.recorder.saw_sparse(self.layer, trace.density(), **sizes, causal=spec.causal)
        return trace.output.out
