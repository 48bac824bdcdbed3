"""The fastest executor that can run the inputs, and why not the others."""

from __future__ import annotations

import logging
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import Rule, is_real, optional
from blocksparse.execute.cpu import CpuExecutor
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.execute.flex import FlexExecutor
from blocksparse.execute.reference import ReferenceExecutor
from blocksparse.execute.triton import TritonExecutor
from blocksparse.inputs import UnsupportedError
from blocksparse.kernels.common.sizes import cdiv
from blocksparse.launch.launch_graph import refuse_capture
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

_TILE = 128  # queries that dense attention gives a multiprocessor at a time

_log = logging.getLogger(__name__)

_TRITON = TritonExecutor()
# From the fastest on.
_ON_GPU: tuple[Executor[GlobalPermutation, BlockMask], ...] = (_TRITON, FlexExecutor())
_ELSEWHERE: tuple[Executor[GlobalPermutation, BlockMask], ...] = (CpuExecutor(),)
_REFERENCE = ReferenceExecutor()


@final
@frozen(eq=False)
class ExecutorChoice:
    """The executor that runs, and every reason why each one before it cannot."""

    executor: Executor[GlobalPermutation, BlockMask] | None  # None is dense attention, without any mask
    refused: dict[str, list[str]]
    dense_because: str | None = None
    kernel: str | None = None  # which of the executor's kernels runs, and with which tiles, where it has several

    def __str__(self) -> str:
        if self.dense_because is not None:
            return f"dense attention runs: {self.dense_because}"
        why = "".join(f"; {name} cannot: {', '.join(reasons)}" for name, reasons in self.refused.items())
        kernel = f" {self.kernel}" if self.kernel else ""
        return f"{type(self.executor).__name__} runs{kernel}{why}"


def dense_operations(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> int:
    """Floating-point operations of the two products of dense attention, a multiplication and an addition each.

    Dense attention within a sliding window is as much work as attention of all queries to as many keys.
    """
    (B, Hq, M, D), N = q.shape, k.shape[2]
    if spec.window is not None and spec.window < N:
        pairs = M * spec.window
    else:
        pairs = M * (2 * N - M + 1) // 2 if spec.causal else M * N
    return 2 * B * Hq * pairs * (D + v.shape[3])


def break_even(like: Tensor, *, in_engine: bool = False) -> float | None:
    """The floating-point operations of dense attention from which selecting blocks saves time; None on a CPU.

    In an engine the host runs ahead of the GPU, so that its own time counts less than in a bare call.
    Both are measured: 0.4 ms of an H100 (docs/evidence/auto.md), 0.25 ms of an H200 (docs/evidence/vllm.md).

    Args:
        like: has the dtype and the device of the call.
        in_engine: whether the dense attention is that of vLLM or SGLang.
    """
    if not like.is_cuda:
        return None
    if like.dtype.itemsize > 2:
        return 6e10  # estimated: fp32 takes ten to twenty times as long per operation
    return 1.5e11 if in_engine else 2e11


def idle_factor(q: Tensor) -> float:
    """Slowdown of dense attention of `q` `[B, Hq, M, D]` because some multiprocessors have no queries.

    From 1 to 2, and 1 without a GPU. cuDNN gives each the 128 queries of a tile. FlashAttention-2 shares out keys
    instead where tiles are few, but has half the rate, so the result is at most 2.
    """
    if not q.is_cuda:
        return 1.0
    B, Hq, M, _ = q.shape
    there = torch.cuda.get_device_properties(q.device).multi_processor_count
    return min(max(there / max(B * Hq * cdiv(M, _TILE), 1), 1.0), 2.0)


def _short(operations: float) -> str:
    """Two digits that count: 3.1e11."""
    return f"{operations:.1e}".replace("e+", "e")


_operations = Rule("a number of floating-point operations from 0 to 1e30", is_real, lambda x: 0 <= x <= 1e30)


@final
@frozen(cache_hash=True)
class AutoExecutor(Executor[GlobalPermutation, BlockMask]):
    """Takes `CpuExecutor` on a CPU, on a GPU `TritonExecutor` or else `FlexExecutor`, and elsewhere the reference.

    It never rounds to 8 bits: name `Int8Executor` for that. `choose` returns the executor that runs and the
    reason. The log has them too, for each call that does not repeat an earlier one. It has a warning if the
    executor is the reference, which is slow.

    A pipeline with it attends densely where dense attention is little work, since selecting blocks would cost more
    time than it saves. Work is the floating-point operations of the two products of dense attention, `2 B Hq pairs
    (D + Dv)`. There `pairs` is M N, and `M (2N - M + 1) / 2` when causal. They count up to twice where there are
    fewer tiles of 128 queries than multiprocessors. So the first chunks of a prompt may be dense and later ones
    sparse. A few heads of a model that is split over GPUs may be dense where all its heads on one GPU would be
    sparse. If the number of tokens alone shows that a mask keeps everything, the call is dense too, whatever the
    work and `dense_below`.

    Args:
        dense_below: floating-point operations below which a call is dense. With 0 none is. None, the default, is
            2e11 in fp16 and bf16, as measured on an H100 for calls that repeat an earlier one. That is 5K tokens
            with 32 heads of dim 128, or 14K tokens with 4 heads. In fp32 the default is 6e10, estimated from its
            lower rate. Other GPUs use the same numbers until they are measured: `python -m benchmarks.run
            crossover`. On a CPU None is never dense. The break-even length of a CPU depends on its cores and the
            dtype, and `blocksparse bench` measures it.

    Raises:
        TypeError, ValueError: `dense_below` is not a number of operations.
    """

    dense_below: float | None = field(default=None, kw_only=True, validator=optional(_operations))

    may_be_left_out = True

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        return []

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
        pays_from = break_even(q) if self.dense_below is None else self.dense_below
        if pays_from is None:
            return None
        work = dense_operations(q, k, v, spec)
        if work >= pays_from or work * idle_factor(q) >= pays_from:
            return None
        return f"little work: fewer than {_short(pays_from)} floating-point operations (dense_below)"

    def choose(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> ExecutorChoice:
        """The executor that a pipeline would run for these inputs, and why none faster."""
        if reason := self.dense_because(q, k, v, spec):
            idle = idle_factor(q)
            counted = f", counted {idle:.2g} times for idle multiprocessors" if idle > 1 else ""
            return ExecutorChoice(None, {}, f"{reason}; it has {_short(dense_operations(q, k, v, spec))}{counted}")
        executor, refused = self._fastest(q, k, v, mask, spec)
        kernel = None
        if isinstance(executor, TritonExecutor):
            kernel = executor.kernel(q, k, v, mask, spec)
        elif isinstance(executor, CpuExecutor):
            kernel = f"by {executor.runs_by(q, k, v)}"
        return ExecutorChoice(executor, refused, kernel=kernel)

    def _fastest(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec
    ) -> tuple[Executor[GlobalPermutation, BlockMask], dict[str, list[str]]]:
        """The fastest executor that can run these inputs, and why the faster ones cannot."""
        refused: dict[str, list[str]] = {}
        for candidate in _ON_GPU if q.is_cuda else _ELSEWHERE:
            reasons = candidate.unsupported(q, k, v, mask, spec)
            if not reasons:
                return candidate, refused
            refused[type(candidate).__name__] = reasons
        return _REFERENCE, refused

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        refused: dict[str, list[str]] = {}
        for executor in _ON_GPU if q.is_cuda else _ELSEWHERE:
            if not isinstance(executor, TritonExecutor):
                refuse_capture("the log shall say of every call that a slower executor runs")
            try:
                output = executor(q, k, v, mask, spec, out)  # which checks all that there is to check
            except UnsupportedError:
                if not (reasons := executor.unsupported(q, k, v, mask, spec)):
                    raise
                refused[type(executor).__name__] = reasons
            else:
                _log.debug("%s", ExecutorChoice(executor, refused))
                return output
        refuse_capture("the log shall say of every call that the reference runs")
        _log.warning("%s", ExecutorChoice(_REFERENCE, refused))
        return _REFERENCE(q, k, v, mask, spec, out)
