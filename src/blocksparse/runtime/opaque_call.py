"""A call of attention that torch.compile keeps as one node of its graph, whatever Python runs behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.batches.sequences import Sequences
from blocksparse.checks.inputs import check_inputs, checked
from blocksparse.checks.per_head import HeadValues
from blocksparse.runtime.precision import without_autocast
from blocksparse.runtime.torch_private import OpaqueBase, graph_node, opaque_object, under_a_transform

Run = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
"""A function of checked `(q, k, v, spec)` that gives the output `[B, Hq, M, Dv]`."""

Into = Callable[[Tensor, Tensor, Tensor, AttentionSpec, Tensor], object]
"""A function of `(q, k, v, spec, out)` that writes this output to `out`."""


@final
class OpaqueCall(OpaqueBase):
    """Attention that torch.compile calls without tracing it. To the graph it is an input, compared by identity.

    Args:
        run: makes a call.
        into: makes the same call for one of several sequences, whose outputs share one tensor. If None, what `run`
            gives is copied there.
    """

    def __init__(self, run: Run, into: Into | None = None) -> None:
        self.run = run
        self.into = into  # `_copied` would make a cycle, in which a history of the call is not freed at once

    def _copied(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        out.copy_(self.run(q, k, v, spec))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        with without_autocast(q):
            return laid_out_as(q, self.run(q, k, v, spec))

    def each(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        spec: AttentionSpec,
        calls: Sequence[Into] | None = None,
    ) -> Tensor:
        """Run each sequence by itself, on views of q, k and v. Other rows of the output are 0.

        The longest run first, so that a GPU is at work on them while the host prepares the short ones.

        Args:
            calls: what runs for each sequence, if not `into` for all.
        """
        parts = sequences.parts(q, k, v, causal=spec.causal)
        calls = calls or [self.into or self._copied] * len(parts)
        runs = [run for run in zip(sequences.spans, parts, calls, strict=True) if run[1] is not None]
        out = _new_output(q, v.shape[-1])
        if sum(span.queries for span, _, _ in runs) < q.shape[0] * q.shape[2]:
            out.zero_()
        with without_autocast(q):
            for span, part, into in sorted(runs, key=lambda run: -run[0].queries * run[0].keys):
                assert part is not None
                into(*part, spec, span.rows(out))
        return out


opaque_object(OpaqueCall)


def is_transformed() -> bool:
    """Whether tensors may be stand-ins now: those of a graph that is traced, or of a transform of `torch.func`.

    Kernels cannot read stand-ins. An op gets the tensors behind them.
    """
    return torch.compiler.is_compiling() or under_a_transform()


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
    sequences: Sequences | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> Tensor:
    """Check the arguments and run `call`, or, while a graph is traced, put a node into the graph that runs it.

    Raises:
        TypeError, ValueError: no pipeline can run these arguments.
    """
    if not is_transformed():
        q, k, v, spec = checked(
            q, k, v, sequences, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        return call(q, k, v, spec) if sequences is None else call.each(q, k, v, sequences, spec)
    q, k, v, scale = check_inputs(q, k, v, causal=causal, scale=scale, sequences=sequences)
    return node(call, q, k, v, sequences, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks)


def node(
    call: OpaqueCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> Tensor:
    """Put a node into the graph that is traced, which runs `call` of checked inputs."""
    asked, given = as_numbers(causal, scale, window, softcap), sinks_as_tensor(sinks)
    if sequences is None:
        out: Tensor = _attend(q, k, v, call, asked, given)
    else:
        out = _attend_each(q, k, v, call, sequences, asked, given)
    return out


# A graph has no attention specs: its nodes take their fields, as numbers and a tensor.


def as_numbers(causal: bool, scale: float, window: int | None, softcap: float | None) -> list[float]:
    """What a layer asks for but its sinks; a window or a softcap of 0 is none."""
    return [float(causal), scale, float(window or 0), softcap or 0.0]


def sinks_as_tensor(sinks: Any) -> Tensor | None:
    """Sinks as an argument of a node: `[Hq]`, or `[]` for one number."""
    if isinstance(sinks, HeadValues):
        return sinks.values
    return sinks if sinks is None or isinstance(sinks, Tensor) else torch.tensor(sinks, dtype=torch.float64)


def spec_of(asked: list[float], sinks: Tensor | None, heads: int) -> AttentionSpec:
    """The spec whose fields a node got."""
    causal, scale, window, softcap = asked
    spec = AttentionSpec.of(
        causal=bool(causal), scale=scale, window=int(window) or None, softcap=softcap or None, sinks=sinks
    )
    spec.check_heads(heads)
    return spec


@graph_node("blocksparse::attend")
def _attend(q: Tensor, k: Tensor, v: Tensor, call: OpaqueCall, asked: list[float], sinks: Tensor | None) -> Tensor:
    return call(q, k, v, spec_of(asked, sinks, q.shape[1]))


# PyTorch knows no op with an argument that is such an object or None, so this is an op of its own.
@graph_node("blocksparse::attend_each")
def _attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: OpaqueCall,
    sequences: Sequences,
    asked: list[float],
    sinks: Tensor | None,
) -> Tensor:
    return call.each(q, k, v, sequences, spec_of(asked, sinks, q.shape[1]))


@_attend.register_fake
@_attend_each.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> Tensor:
    return _new_output(q, v.shape[-1])


def _new_output(q: Tensor, width: int) -> Tensor:
    """Uninitialised `[B, H, M, width]`, laid out as `laid_out_as` has it."""
    B, H, M, _ = q.shape
    if q.transpose(1, 2).is_contiguous():
        return q.new_empty((B, M, H, width)).transpose(1, 2)
    return q.new_empty((B, H, M, width))


def laid_out_as(q: Tensor, out: Tensor) -> Tensor:
    """`out` with tokens before heads in memory if `q` lies in memory like that, and contiguous otherwise.

    A graph must know the strides before anything runs, so they cannot depend on the executor. Calls without a
    graph follow the same rule.
    """
    if q.transpose(1, 2).is_contiguous():
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()
