"""Role: q, k, v, Permutation, BlockMask -> AttentionOutput."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.permuters.permutation import Permutation
from blocksparse.selectors.block_mask import BlockMask

PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
MaskT_contra = TypeVar("MaskT_contra", bound=BlockMask, contravariant=True)


class Executor(ABC, Generic[PermutationT_contra, MaskT_contra]):
    """Computes softmax attention over exactly the pairs that a permutation and a mask mean together.

    Drop the pairs that causality forbids *by original position*; what remains of each kept block is attended
    to. Every executor is an optimisation of that sentence, which `ReferenceExecutor` is in plain torch.
    """

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        permutation: PermutationT_contra,
        mask: MaskT_contra,
        *,
        scale: float,
    ) -> AttentionOutput:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`, in original order."""

    @abstractmethod
    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT_contra) -> list[str]:
        """Every reason why this executor cannot run these inputs; empty when it can."""

    def dense_because(self, q: Tensor, k: Tensor) -> str | None:
        """Why a pipeline should attend densely before it looks at any block, from shapes alone; mostly None.

        An executor that is handed a mask obeys it. Only `AutoExecutor` ever gives a reason.
        """
        return None

    def refuse_unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT_contra, *, hint: str) -> None:
        """Raise a `ValueError` with all reasons and the way out, if there are reasons."""
        if reasons := self.unsupported(q, k, v, mask):
            inputs = ", ".join(
                f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
                for name, x in (("q", q), ("k", k), ("v", v))
            )
            listed = "; ".join(reasons)
            raise ValueError(f"{type(self).__name__} cannot run {inputs}: {listed}. {hint}")
