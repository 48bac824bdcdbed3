"""A call of attention that torch.compile keeps as one node of its graph, whatever Python runs behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # no public name up to torch 2.13
from torch._library.opaque_object import register_opaque_type  # no public name up to torch 2.13
from torch._opaque_base import OpaqueBase

from blocksparse.precision import without_autocast
from blocksparse.sequences import Sequences

Run = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]
"""A function of checked `(q, k, v, causal, scale)` that gives the output `[B, Hq, M, Dv]`."""


@final
class OpaqueCall(OpaqueBase):
    """Attention that torch.compile calls without tracing it. To the graph it is an input, compared by identity."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        with without_autocast(q):
            return laid_out_as(q, self.run(q, k, v, causal, scale))

    def each(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        causal: bool,
        scale: float,
        calls: Sequence[Run] | None = None,
    ) -> Tensor:
        """Run each sequence by itself, on views of q, k and v. Other rows of the output are 0.

        Args:
            calls: what runs for each sequence, if not `run` for all.
        """
        parts, calls = sequences.parts(q, k, v, causal=causal), calls or [self.run] * len(sequences.spans)
        out = laid_out_as(q, q.new_zeros((*q.shape[:3], v.shape[-1])))
        with without_autocast(q):
            for span, part, run in zip(sequences.spans, parts, calls, strict=True):
                if part is not None:
                    span.rows(out).copy_(run(*part, causal, scale))
        return out


# With `hoist` the object is an input of the graph, not a constant, and so no part of the key of cached graphs.
register_opaque_type(OpaqueCall, typ="reference", hoist=True)


def is_transformed() -> bool:
    """Whether tensors may be stand-ins now: those of a graph that is traced, or of a transform of `torch.func`.

    Kernels cannot read stand-ins. An op gets the tensors behind them.
    """
    return torch.compiler.is_compiling() or peek_interpreter_stack() is not None


def refuse_transforms(method: str) -> None:
    """Refuse a call of a method of pipelines for which there is no node that a graph could have.

    Raises:
        ValueError: tensors may be stand-ins now.
    """
    if is_transformed():
        raise ValueError(
            f"torch.compile and torch.func take calls of a pipeline, but not {method!r}: leave it out of them"
        )


def attend(
    call: OpaqueCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    sequences: Sequences | None = None,
) -> Tensor:
    """Run `call`, or, while a graph is traced, put a node into the graph that runs it."""
    if is_transformed():
        out: Tensor = (
            _attend(q, k, v, call, causal, scale)
            if sequences is None
            else _attend_each(q, k, v, call, sequences, causal, scale)
        )
        return out
    if sequences is None:
        return call(q, k, v, causal, scale)
    return call.each(q, k, v, sequences, causal, scale)


@torch.library.custom_op("blocksparse::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, call: OpaqueCall, causal: bool, scale: float) -> Tensor:
    return call(q, k, v, causal, scale)


# PyTorch knows no op with an argument that is such an object or None, so this is an op of its own.
@torch.library.custom_op("blocksparse::attend_each", mutates_args=())
def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, call: OpaqueCall, sequences: Sequences, causal: bool, scale: float
) -> Tensor:
    return call.each(q, k, v, sequences, causal, scale)


@_attend.register_fake
@_attend_each.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> Tensor:
    return laid_out_as(q, q.new_empty((*q.shape[:3], v.shape[-1])))


def laid_out_as(q: Tensor, out: Tensor) -> Tensor:
    """`out` with tokens before heads in memory if `q` lies in memory like that, and contiguous otherwise.

    A graph must know the strides before anything runs, so they cannot depend on the executor. Calls without a
    graph follow the same rule.
    """
    if q.transpose(1, 2).is_contiguous():
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()
