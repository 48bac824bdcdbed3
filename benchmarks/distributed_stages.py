"""Stages by which a call on many ranks is taken apart: one that notes times, and some that do nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import AnyPipeline

PermutationT = TypeVar("PermutationT", bound=bs.Permutation)
MaskT = TypeVar("MaskT", bound=bs.BlockMask)


@final
class Spans:
    """Stretches of time on a device, of which the sum is read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        """A moment on the device's queue, or of the clock."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start: Any) -> None:
        """Note the stretch from `start` until now."""
        self._spans.append((start, self.now()))

    def taken(self) -> float:
        """Milliseconds in all since the last call of this; waits for the device."""
        spans, self._spans = self._spans, []
        if self._device.type != "cuda":
            return float(sum(end - start for start, end in spans) * 1e3)
        torch.cuda.synchronize(self._device)
        return float(sum(start.elapsed_time(end) for start, end in spans))


@final
@frozen(eq=False)
class Timed(bs.Executor[PermutationT, MaskT]):
    """Attends as `inner` does and notes how long that takes."""

    inner: bs.Executor[PermutationT, MaskT]
    spans: Spans = field(repr=False)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: bs.AttentionSpec) -> list[str]:
        return self.inner.unsupported(q, k, v, mask, spec)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: bs.AttentionSpec, out: Tensor | None = None
    ) -> bs.AttentionOutput:
        start = self.spans.now()
        output = self.inner(q, k, v, mask, spec, out)
        self.spans.add(start)
        return output


@final
@frozen(eq=False)
class ByFunction(bs.Executor[bs.Permutation, bs.BlockMask]):
    """Runs `function(q, k, v, spec, out)` in every call, whatever its mask."""

    function: Callable[[Tensor, Tensor, Tensor, bs.AttentionSpec, Tensor | None], bs.AttentionOutput] = field(
        repr=False
    )

    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, spec: bs.AttentionSpec
    ) -> list[str]:
        return []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: bs.BlockMask,
        spec: bs.AttentionSpec,
        out: Tensor | None = None,
    ) -> bs.AttentionOutput:
        return self.function(q, k, v, spec, out)


@final
@frozen(eq=False)
class Uniform(bs.Executor[PermutationT, MaskT]):
    """Attends by `inner`, with equal weights on all kept keys, so that the output tells which they are."""

    inner: bs.Executor[PermutationT, MaskT]

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: bs.AttentionSpec) -> list[str]:
        return self.inner.unsupported(q, k, v, mask, spec)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: bs.AttentionSpec, out: Tensor | None = None
    ) -> bs.AttentionOutput:
        return self.inner(torch.zeros_like(q), k, v, mask, spec, out)


def nothing(
    q: Tensor, k: Tensor, v: Tensor, spec: bs.AttentionSpec, out: Tensor | None = None
) -> bs.AttentionOutput:
    """Compute nothing: the output is whatever the memory holds."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return bs.AttentionOutput(q.new_empty((*q.shape[:3], v.shape[3])), lse)


def all_keys(
    q: Tensor, k: Tensor, v: Tensor, spec: bs.AttentionSpec, out: Tensor | None = None
) -> bs.AttentionOutput:
    """Attend to all keys by PyTorch's fastest kernel; tensors of 2^31 numbers by KV head, in a batch of one."""
    if q.numel() < 1 << 31:
        return bs.AttentionOutput(dense_attention(q, k, v, spec), None).written_to(out)
    result = q.new_empty((*q.shape[:3], v.shape[3])) if out is None else out
    heads = zip(*(x.tensor_split(k.shape[1], 1) for x in (q, k, v, result)), strict=True)
    for some_q, some_k, some_v, some in heads:
        some.copy_(dense_attention(some_q[0][None], some_k[0][None], some_v[0][None], spec))
    return bs.AttentionOutput(result, None)


def dense(block: int) -> AnyPipeline:
    """Dense attention as a pipeline, so that schemes take it; it chooses hardly anything, in such blocks."""
    return bs.Pipeline(bs.Identity(), bs.NoScorer(block), bs.Sink(1), ByFunction(all_keys))


def uniform(pipeline: AnyPipeline) -> AnyPipeline:
    """The pipeline, with an output that tells which blocks it keeps."""
    return evolve(pipeline, executor=Uniform(pipeline.executor))


def only_communication(block: int) -> AnyPipeline:
    """A pipeline that chooses hardly anything, in blocks of this size, and computes nothing."""
    return evolve(dense(block), executor=ByFunction(nothing))


def only_masks(pipeline: AnyPipeline) -> AnyPipeline:
    """The pipeline without attending."""
    return evolve(pipeline, executor=ByFunction(nothing))


def timed(pipeline: AnyPipeline, spans: Spans) -> AnyPipeline:
    """The pipeline, with the time noted in which it attends."""
    return evolve(pipeline, executor=Timed(pipeline.executor, spans))
