"""The role of an executor, q, k, v, BlockMask -> AttentionOutput, and the value that executors give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast, final

from torch import Tensor
from torch.autograd.graph import increment_version

from blocksparse.check.stage import check_got
from blocksparse.inputs import UnsupportedError, check_out, refuse_gradients
from blocksparse.launch.torch_modes import DTYPES
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec


# A dataclass, unlike the other values: torch.compile can trace how one is made, but not how an attrs object is.
@final
@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """Attention over the kept pairs.

    A query without a kept key has `out` 0 and `lse` -inf.
    """

    out: Tensor  # [B, Hq, M, Dv], the dtype of v
    lse: Tensor | None  # [B, Hq, M] fp32, log of the softmax denominator (natural); None if the backend gives none
    visit: BlockMask | Callable[[], BlockMask] | None = None  # what `visited` gives, or a function that makes it
    exact_lse: Tensor | None = None  # what `lse` would be of visited pairs alone, where it holds more than these

    @property
    def visited(self) -> BlockMask | None:
        """The blocks that were computed; None if they are those of the mask.

        An early stop computes fewer, and dense attention others. An executor may return a function in place of the
        mask, so that calls spend no time on a mask that is not read.
        """
        return self.visit() if callable(self.visit) else self.visit

    @property
    def visited_lse(self) -> Tensor | None:
        """The lse of visited pairs alone, `[B, Hq, M]`. It gives their share of dense attention's mass."""
        return self.lse if self.exact_lse is None else self.exact_lse

    def written_to(self, out: Tensor | None) -> AttentionOutput:
        """The output in `out`, copied there unless it is there already; unchanged if `out` is None."""
        if out is None:
            return self
        if out is self.out:
            increment_version(out)  # for autograd, since kernels do not
            return self
        out.copy_(self.out)
        return AttentionOutput(out, self.lse, self.visit, self.exact_lse)


PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
MaskT_contra = TypeVar("MaskT_contra", bound=BlockMask, contravariant=True)


class Executor(ABC, Generic[PermutationT_contra, MaskT_contra]):
    """Role: computes softmax attention over exactly the pairs that a mask and its permutation define.

    These are the pairs of all kept blocks, except those that causality or a sliding window forbids *by original
    position*. `ReferenceExecutor` computes this definition in plain torch; all other executors compute it faster.
    """

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT_contra, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`, in original order.

        A call begins with `self.check`, and may end with `written_to(out)`.

        Args:
            out: tensor or view `[B, Hq, M, Dv]` that receives the output. A new tensor if None.

        Raises:
            TypeError, ValueError: as in `check`.
        """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT_contra, spec: AttentionSpec) -> list[str]:
        """Every reason why this executor cannot run these inputs; empty if it can.

        By default, an executor supports only plain softmax attention.
        """
        return knows_no_window(mask) + knows_no_logit_change(spec)

    @property
    def may_be_left_out(self) -> bool:
        """Whether a pipeline may use dense attention in place of this executor if every block is kept."""
        return False

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
        """The reason why a pipeline should attend densely instead of running its stages, or None.

        The answer may depend on shapes, dtype and device, but not on contents. It concerns only the pipeline: an
        executor that gets a mask always obeys it. Of the executors in this library only `AutoExecutor` ever gives
        a reason. A reason names no length of the call, because a `DensityRecorder` counts calls by reason.
        """
        return None

    def check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskT_contra,
        spec: AttentionSpec,
        out: Tensor | None = None,
        *,
        hint: str = "",
    ) -> None:
        """Reject inputs that this executor cannot run. Call it first in each `__call__`.

        Args:
            hint: a sentence that ends the error message if `unsupported` gives reasons.

        Raises:
            TypeError: the permutation or the mask is not of the type that the executor's class declares. Or q, k
                and v have different dtypes, or one that pipelines do not take.
            ValueError: the mask was not made for these tensors and this spec, q, k and v do not fit each other, or
                `out` cannot hold the output. Or one of them requires a gradient or has a tangent, or `unsupported`
                gives reasons.
        """
        check_got(self, Executor, 1, mask)
        check_got(self, Executor, 0, mask.grid.permutation)
        mask.grid.check_fits(q, k, mask.grid.permutation, spec)
        spec.check_heads(q.shape[1])
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k and v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}")
        if q.dtype not in DTYPES:
            raise TypeError(
                f"q, k and v must be floating-point tensors: {q.dtype}. "
                "Convert them to float16, bfloat16, float32 or float64."
            )
        refuse_gradients(q, k, v)
        (*heads_and_tokens, D), its = k.shape, v.shape
        if [*its[:3]] != heads_and_tokens or q.shape[3] != D or not q.device == k.device == v.device:
            raise ValueError(
                f"'v' must have the heads, tokens and device of 'k', 'q' its head dim: q {tuple(q.shape)} on "
                f"{q.device}, k {tuple(k.shape)} on {k.device}, v {tuple(v.shape)} on {v.device}. "
                "Their layout is [B, H, N, D]."
            )
        if out is not None:
            check_out(out, q, k, v)
        if reasons := self.unsupported(q, k, v, mask, spec):
            inputs = ", ".join(
                f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
                for name, x in (("q", q), ("k", k), ("v", v))
            )
            listed = "; ".join(reasons)
            name = type(self).__name__
            raise UnsupportedError(f"{name} cannot run {inputs}: {listed}. {hint}", f"{name}: {listed}")


def knows_no_window(mask: BlockMask) -> list[str]:
    """The reason of an executor that does not support sliding windows, if the call has one."""
    window = mask.grid.window
    return [] if window is None else [f"it knows no sliding window, and this call has one of {window} tokens"]


def knows_no_logit_change(spec: AttentionSpec) -> list[str]:
    """The reason of an executor that supports a plain softmax alone, if the call needs another one."""
    return [] if spec.is_plain else ["it knows no softcap and no attention sinks"]


def refuse_several_orders(mask: BlockMask, kernel: str) -> None:
    """Reject a mask whose rows have different key orders, for a kernel that supports one key order."""
    if not isinstance(mask.grid.permutation, GlobalPermutation):
        raise ValueError(
            f"{kernel} takes keys in one order, and rows of this mask have several, as from "
            "GlobalIndexMap. Run it with an executor of this package."
        )


def one_order(mask: BlockMask) -> GlobalPermutation:
    """The permutation of a mask, for an executor that takes one order of keys, which `check` makes sure of."""
    return cast(GlobalPermutation, mask.grid.permutation)
