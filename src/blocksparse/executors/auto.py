"""The fastest executor that can run the inputs, and why not the others."""

from __future__ import annotations

import logging
from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.executor import Executor
from blocksparse.executors.flex import FlexExecutor
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

    executor: Executor[GlobalPermutation, BlockMask]
    refused: dict[str, list[str]]

    def __str__(self) -> str:
        why = "".join(f"; {name} cannot: {', '.join(reasons)}" for name, reasons in self.refused.items())
        return f"{type(self.executor).__name__} runs{why}"


@final
@frozen(eq=False)
class AutoExecutor(Executor[GlobalPermutation, BlockMask]):
    """Takes `TritonExecutor` on a GPU, `FlexExecutor` on a CPU with a C++ compiler, else the reference.

    `choose` says which and why. Falling back to the reference, which is slow, is logged as a warning.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        del q, k, v, mask
        return []

    def choose(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Choice:
        """Which executor would run these inputs, and why the faster ones cannot."""
        candidates = (TritonExecutor(),) if q.is_cuda else ()
        refused: dict[str, list[str]] = {}
        for candidate in (*candidates, FlexExecutor()):
            if not (reasons := candidate.unsupported(q, k, v, mask)):
                return Choice(candidate, refused)
            refused[type(candidate).__name__] = reasons
        return Choice(_last_resort, refused)

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
        choice = self.choose(q, k, v, mask)
        _log.log(logging.WARNING if choice.executor is _last_resort else logging.DEBUG, "%s", choice)
        return choice.executor(q, k, v, permutation, mask, scale=scale)
