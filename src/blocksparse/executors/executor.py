"""The role of an executor: q, k, v, Permutation, BlockMask -> AttentionOutput."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Self, TypeVar

from torch import Tensor

from blocksparse.class_line import Declared, check_gave, check_got
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.logits import PLAIN, Logits
from blocksparse.inputs import DTYPES, UnsupportedError, refuse_gradients
from blocksparse.permuters.permutation import Permutation
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.validators import a

PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
MaskT_contra = TypeVar("MaskT_contra", bound=BlockMask, contravariant=True)


class Executor(ABC, Generic[PermutationT_contra, MaskT_contra]):
    """Computes softmax attention over exactly the pairs that a permutation and a mask mean together.

    These are the pairs of all kept blocks, except those that causality or a sliding window forbids *by original
    position*. `ReferenceExecutor` computes this definition in plain torch; all other executors are faster ways to
    it.
    """

    takes_windows: ClassVar[bool] = False
    """Whether it leaves out pairs outside of `mask.grid.window`. If not, `check` refuses masks with a window."""

    @property
    def logits(self) -> Logits:
        """What the layer does to its logits and their softmax."""
        return PLAIN

    def with_logits(self, logits: Logits) -> Self:
        """This executor for a layer with a softcap or attention sinks, exactly; `Logits()` is one with neither.

        Raises:
            TypeError: `logits` is not a `Logits`.
            UnsupportedError: the executor has no field for them.
        """
        a(Logits).check(logits=logits)
        if logits.is_plain and self.logits.is_plain:
            return self
        because = f"{type(self).__name__} knows no softcap and no attention sinks"
        raise UnsupportedError(
            f"{because}: take TritonExecutor(), CpuExecutor() or AutoExecutor(), or give it a field 'logits' and "
            "a method 'with_logits'",
            because,
        )

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

    def attend_into(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        permutation: PermutationT_contra,
        mask: MaskT_contra,
        *,
        scale: float,
    ) -> None:
        """Make the same call, and write its output to `out` `[B, Hq, M, Dv]`, whose last axis is innermost.

        A pipeline calls it for each of several sequences, whose outputs are parts of one tensor. Here it copies;
        an executor whose kernel can write there saves that, and begins with `check_out`.

        Raises:
            TypeError, ValueError: `out` is not such a tensor, or as of a call.
        """
        self.check_out(out, q, v)
        output = self(q, k, v, permutation, mask, scale=scale)
        check_gave((Declared(self, AttentionOutput),), output)
        out.copy_(output.out)

    def check_out(self, out: Tensor, q: Tensor, v: Tensor) -> None:
        """Refuse a tensor that cannot hold the output `[B, Hq, M, Dv]` of a call with these inputs.

        Args:
            q: `[B, Hq, M, D]`.
            v: `[B, Hkv, N, Dv]`.

        Raises:
            TypeError: its dtype is not that of q.
            ValueError: its shape or device is another, its last axis is not innermost, or entries share memory.
        """
        shape = (*q.shape[:3], v.shape[3])
        if out.dtype != q.dtype:
            raise TypeError(f"'out' must have the dtype of q ({q.dtype}): {out.dtype}; make it by q.new_empty()")
        if out.shape != shape or out.device != q.device:
            raise ValueError(
                f"'out' must have the shape {shape}, on {q.device}: {tuple(out.shape)} on {out.device}; give the "
                "part of a tensor that is for these queries"
            )
        if out.stride(3) != 1 or any(n > 1 and step == 0 for n, step in zip(shape, out.stride(), strict=True)):
            raise ValueError(
                "'out' must have its last axis innermost in memory, and no entries that share memory: "
                f"strides {out.stride()}; make it by q.new_empty()"
            )

    @abstractmethod
    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT_contra) -> list[str]:
        """Every reason why this executor cannot run these inputs; empty if it can."""

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str | None:
        """The reason why a pipeline should attend densely instead of running its stages, or None.

        The answer may depend on shapes, dtype and device, but not on contents. It concerns only the pipeline: an
        executor that gets a mask always obeys it. Of the executors in this library only `AutoExecutor` ever gives
        a reason.
        """
        return None

    def dense_because_within(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None
    ) -> str | None:
        """The same for a call with a sliding window of `window` tokens, or with None.

        Dense attention within a window is as much work as attention of all queries to `window` keys.
        """
        if window is None:
            return self.dense_because(q, k, v, causal=causal)
        return self.dense_because(q, k[:, :, :window], v[:, :, :window], causal=False)

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
        """Refuse inputs that this executor cannot run. Each `__call__` should begin with it.

        Args:
            hint: a sentence that ends the error message if `unsupported` gives reasons.

        Raises:
            TypeError: the permutation or the mask is not of the type that the executor's class declares, or q, k
                and v do not have one of the dtypes that pipelines take, the same for all three.
            ValueError: the mask was not made for these tensors and this permutation, q, k and v do not fit each
                other, one of them requires a gradient or has a tangent, or `unsupported` gives reasons.
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
        refuse_gradients(q, k, v)
        (*heads_and_tokens, D), its = k.shape, v.shape
        if [*its[:3]] != heads_and_tokens or q.shape[3] != D or not q.device == k.device == v.device:
            raise ValueError(
                f"'v' must have the heads, tokens and device of 'k', and 'q' its head dim: q {tuple(q.shape)} on "
                f"{q.device}, k {tuple(k.shape)} on {k.device}, v {tuple(v.shape)} on {v.device}"
            )
        reasons = self.unsupported(q, k, v, mask)
        if mask.grid.window is not None and not self.takes_windows:
            reasons = [*reasons, f"it knows no sliding window, and this call has one of {mask.grid.window} tokens"]
        if reasons:
            inputs = ", ".join(
                f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
                for name, x in (("q", q), ("k", k), ("v", v))
            )
            listed = "; ".join(reasons)
            name = type(self).__name__
            raise UnsupportedError(f"{name} cannot run {inputs}: {listed}. {hint}", f"{name}: {listed}")
