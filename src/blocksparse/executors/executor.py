"""Role: q, k, v, Permutation, BlockMask -> AttentionOutput."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.class_line import check_got
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.inputs import DTYPES, refuse_tangents
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

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str | None:
        """Why a pipeline should attend densely before it looks at any block; mostly None.

        Decided by shapes, dtype and device, never by contents. An executor that is handed a mask obeys it. Only
        `AutoExecutor` ever gives a reason.
        """
        return None

    def check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        permutation: PermutationT_contra,
        mask: MaskT_contra,
        *,
        hint: str = "",
    ) -> None:
        """Refuse what this executor cannot attend to; the first thing that a call does.

        Args:
            hint: the way out where there are reasons in `unsupported`.

        Raises:
            TypeError: the permutation or the mask is not of the kind that the class line names, or q, k and v
                have different dtypes or none of a pipeline's.
            ValueError: the mask is not one of these tensors in this permutation, v does not go with k, one of them
                has a forward-mode tangent, or there are reasons in `unsupported`.
        """
        check_got(self, Executor, 0, permutation)
        check_got(self, Executor, 1, mask)
        mask.grid.check_fits(q, k, permutation)
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k and v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}")
        if q.dtype not in DTYPES:
            raise TypeError(
                f"q, k and v must be floating-point tensors: {q.dtype}; "
                "convert them to float16, bfloat16, float32 or float64"
            )
        refuse_tangents(q, k, v)
        (*heads_and_tokens, D), its = k.shape, v.shape
        if [*its[:3]] != heads_and_tokens or q.shape[3] != D or not q.device == k.device == v.device:
            raise ValueError(
                f"'v' must have the heads, tokens and device of 'k', and 'q' its head dim: q {tuple(q.shape)} on "
                f"{q.device}, k {tuple(k.shape)} on {k.device}, v {tuple(v.shape)} on {v.device}"
            )
        if reasons := self.unsupported(q, k, v, mask):
            inputs = ", ".join(
                f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
                for name, x in (("q", q), ("k", k), ("v", v))
            )
            listed = "; ".join(reasons)
            raise ValueError(f"{type(self).__name__} cannot run {inputs}: {listed}. {hint}")
