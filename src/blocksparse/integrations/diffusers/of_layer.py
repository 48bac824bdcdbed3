"""What attends in one layer: a pipeline that records its calls, or one that attends to what was chosen before."""

from __future__ import annotations

from typing import Any, Unpack, final

from attrs import Factory, define, field, frozen
from torch import Tensor

from blocksparse.audit.audit import Audit
from blocksparse.audit.audited_pipeline import AuditedPipeline
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.inputs import checked
from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.layers.kept_choices import KeptChoices
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.pipeline import Pipeline
from blocksparse.spec import Asked, AttentionSpec


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


@final
@define(eq=False)
class Keeping:
    """A pipeline whose choices last. It tells a recorder, if there is one, the density and the age of each.

    An audit compares what it attends to with dense attention, now and then. If a bound is crossed, what `chooser`
    chose is forgotten.
    """

    pipeline: Pipeline[Any, Any, Any]
    layer: int
    chooser: int
    choices: KeptChoices
    recorder: DensityRecorder | None
    audit: Audit | None
    _crossed: int = field(default=0, init=False)  # calls of the layer that were known to cross a bound

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> Tensor:
        dense, audited = (False, False) if self.audit is None else self.audit.begins(self.layer, may_audit=True)
        if dense:
            self._saw_dense("it fell back, as an audit crossed a bound")
            return dense_attention(*checked(q, k, v, asked))
        if self.audit is not None and (crossed := self.audit.crossed(self.layer)) > self._crossed:
            self._crossed = crossed
            self.choices.forget(self.layer, chooser=self.chooser)
        kept = self.choices.attend(self.layer, self.pipeline, q, k, v, chooser=self.chooser, **asked)
        if kept.trace is None:
            self._saw_dense(kept.dense_because)
            return kept.out
        if audited and self.audit is not None:
            self.audit.compare(self.layer, kept.trace)
        if self.recorder is not None:
            sizes = {"q_len": q.shape[2], "k_len": k.shape[2]}
            self.recorder.saw_sparse(self.layer, kept.trace.density(), **sizes, causal=asked.get("causal", True))
            self.recorder.saw_age(self.layer, kept.age)
        return kept.out

    def _saw_dense(self, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.saw_dense(self.layer, reason)
