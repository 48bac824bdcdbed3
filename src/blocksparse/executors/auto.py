"""The fastest executor that can run the inputs, and why not the others."""

from __future__ import annotations

import logging
from typing import final

from attrs import field, frozen
from attrs.validators import ge, instance_of, optional
from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.executor import Executor
from blocksparse.executors.flex import FlexExecutor
from blocksparse.executors.int8 import Int8Executor
from blocksparse.executors.reference import ReferenceExecutor
from blocksparse.executors.triton import TritonExecutor
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask

_log = logging.getLogger(__name__)
_last_resort = ReferenceExecutor()


@final
@frozen(eq=False)
class Choice:
    """Which executor runs, and every reason why each one before it cannot."""

    executor: Executor[GlobalPermutation, BlockMask] | None  # None is dense attention, without any mask
    refused: dict[str, list[str]]
    dense_because: str | None = None

    def __str__(self) -> str:
        if self.dense_because is not None:
            return f"dense attention runs: {self.dense_because}"
        why = "".join(f"; {name} cannot: {', '.join(reasons)}" for name, reasons in self.refused.items())
        return f"{type(self.executor).__name__} runs{why}"


@final
@frozen(eq=False)
class AutoExecutor(Executor[GlobalPermutation, BlockMask]):
    """Takes `TritonExecutor` on a GPU, `FlexExecutor` on a CPU with a C++ compiler, else the reference.

    On a GPU, a pipeline with it attends densely where the keys are fewer than `dense_below`: selecting blocks
    would cost more time than it saves. `choose` says which and why, and so does the log: as a warning where it is
    the reference, which is slow.

    Args:
        dense_below: keys; 0 is never dense. The default lies where selecting begins to pay on an H200 when every
            kernel is launched from Python; in a CUDA graph it pays at 8192 keys already (docs/performance.md).
        int8_from: keys from which a GPU tries `Int8Executor` first: rounding takes time that short prompts do not
            give back. None, the default, never rounds.
    """

    dense_below: int = field(default=12288, kw_only=True, validator=[instance_of(int), ge(0)])
    int8_from: int | None = field(default=None, kw_only=True, validator=optional([instance_of(int), ge(0)]))

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        del q, k, v, mask
        return []

    def dense_because(self, q: Tensor, k: Tensor) -> str | None:
        if not q.is_cuda or k.shape[2] >= self.dense_below:
            return None
        return f"on a GPU, selecting among {k.shape[2]} keys saves no time (dense_below={self.dense_below})"

    def choose(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Choice:
        """What a pipeline would run for these inputs, and why nothing faster."""
        if reason := self.dense_because(q, k):
            return Choice(None, {}, reason)
        executor, refused = self._fastest(q, k, v, mask)
        return Choice(executor, refused)

    def _fastest(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask
    ) -> tuple[Executor[GlobalPermutation, BlockMask], dict[str, list[str]]]:
        """The fastest executor that can run these inputs, and why the faster ones cannot."""
        refused: dict[str, list[str]] = {}
        rounds = self.int8_from is not None and k.shape[2] >= self.int8_from
        on_gpu = (*((Int8Executor(),) if rounds else ()), TritonExecutor())
        for candidate in (*(on_gpu if q.is_cuda else ()), FlexExecutor()):
            if not (reasons := candidate.unsupported(q, k, v, mask)):
                return candidate, refused
            refused[type(candidate).__name__] = reasons
        return _last_resort, refused

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        permutation: GlobalPermutation,
        mask: BlockMask,
        *,
        scale: float,
    ) -> AttentionOutput:
        executor, refused = self._fastest(q, k, v, mask)
        level = logging.WARNING if executor is _last_resort else logging.DEBUG
        _log.log(level, "%s", Choice(executor, refused))
        return executor(q, k, v, permutation, mask, scale=scale)
