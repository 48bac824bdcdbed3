"""The role of an executor: q, k, v, BlockMask -> AttentionOutput."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.calls.inputs import UnsupportedError, check_out, refuse_gradients
from blocksparse.checks.class_line import check_got
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.permuters.permutation import Permutation
from blocksparse.runtime.precision import DTYPES
from blocksparse.selectors.block_mask import BlockMask

PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
MaskT_contra = TypeVar("MaskT_contra", bound=BlockMask, contravariant=True)


class Executor(ABC, Generic[PermutationT_contra, MaskT_contra]):
    """Computes softmax attention over exactly the pairs that a mask and its permutation define.

    These are the pairs of all kept blocks, except those that causality or a sliding window forbids *by original
    position*. `ReferenceExecutor` computes this definition in plain torch; all other executors are faster ways to
    it.
    """

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskT_contra,
        spec: AttentionSpec,
        out: Tensor | None = None,
    ) -> AttentionOutput:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`, in original order.

        A call begins with `self.check`, and may end with `written_to(out)`.

        Args:
            out: tensor or view `[B, Hq, M, Dv]` that receives the output; a new tensor if None.

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
            TypeError: the permutation or the mask is not of the type that the executor's class declares, or q, k
                and v do not have one of the dtypes that pipelines take, the same for all three.
            ValueError: the mask was not made for these tensors and this spec, q, k and v do not fit each other,
                `out` cannot hold the output, one of them requires a gradient or has a tangent, or `unsupported`
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
                f"q, k and v must be floating-point tensors: {q.dtype}; "
                "convert them to float16, bfloat16, float32 or float64"
            )
        refuse_gradients(q, k, v)
        (*heads_and_tokens, D), its = k.shape, v.shape
        if [*its[:3]] != heads_and_tokens or q.shape[3] != D or not q.device == k.device == v.device:
            raise ValueError(
                f"'v' must have the heads, tokens and device of 'k', and 'q' its head dim: q {tuple(q.shape)} on "
                f"{q.device}, k {tuple(k.shape)} on {k.device}, v {tuple(v.shape)} on {v.device}"
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
    """The reason of an executor that does not leave out pairs outside of a sliding window, if there is one."""
    window = mask.grid.window
    return [] if window is None else [f"it knows no sliding window, and this call has one of {window} tokens"]


def knows_no_logit_change(spec: AttentionSpec) -> list[str]:
    """The reason of an executor that computes a plain softmax alone, if another is asked for."""
    return [] if spec.is_plain else ["it knows no softcap and no attention sinks"]
