"""A call of attention that torch.compile keeps as one node of its graph, whatever Python runs behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blocksparse.batch.sequences import Sequences
from blocksparse.check.per_head import HeadValues
from blocksparse.inputs import check_inputs, check_out, checked
from blocksparse.launch.torch_modes import is_transformed, refuse_transforms, without_autocast
from blocksparse.launch.torch_private import OpaqueBase, custom_op, opaque_object
from blocksparse.spec import AttentionOptions, AttentionSpec, check_options

Histories = Sequence[object] | None
"""One for each sequence of a call."""


@final
class OpaqueCall(OpaqueBase):
    """Attention that torch.compile calls without tracing it. To the graph it is an input, compared by identity.

    Args:
        run: a function of checked `(q, k, v, spec)` that gives the output `[B, Hq, M, Dv]`. It gets
            `history=` where a call has one.
        begins: is called when a call begins.
        writes: whether it also takes `out`, a part of a tensor that is there already. It then writes the output to
            this part. Otherwise what it gives is copied there.
        ends: is given the output, q, k, v, the spec and the sequences of a call of several, when all are attended.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        *,
        writes: bool = False,
        begins: Callable[[], None] | None = None,
        ends: Callable[[Tensor, Tensor, Tensor, Tensor, AttentionSpec, Sequences], None] | None = None,
    ) -> None:
        self.run = run
        self.begins = begins
        self.ends = ends
        self.writes = writes

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        sequences: Sequences | None = None,
        histories: Histories = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of checked inputs, in one dtype whatever autocast says; in `out` if there is one."""
        if self.begins is not None:
            self.begins()
        with without_autocast(q):
            if sequences is not None:
                return self._each(q, k, v, spec, sequences, histories)
            if not len(q):  # kernels have no launch of no programs
                return _new_output(q, v.shape[-1]) if out is None else out
            more: dict[str, Any] = {} if histories is None else {"history": histories[0]}
            if out is not None:
                self._into(out, q, k, v, spec, **more)
                increment_version(out)  # which kernels do not, and a repeated call does nothing else
                return out
            return laid_out_as(q, self.run(q, k, v, spec, **more))

    def _each(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences, histories: Histories
    ) -> Tensor:
        """Run each sequence by itself, the longest first, on views of q, k, v. Other rows of the output are 0."""
        parts = sequences.parts(q, k, v, spec)
        more: list[dict[str, Any]] = [{} if histories is None else {"history": its} for its in histories or parts]
        each = zip(sequences.spans, parts, more, strict=True)
        runs = [(span, part, its) for span, part, its in each if part is not None]
        out = _new_output(q, v.shape[-1])
        if sum(span.queries for span, *_ in runs) < q.shape[0] * q.shape[2]:
            out.zero_()
        for span, part, its in sorted(runs, key=lambda run: -run[0].queries * run[0].keys):
            self._into(span.rows(out), *part, **its)
        if self.ends is not None:
            self.ends(out, q, k, v, spec, sequences)
        return out

    def _into(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **more: Any) -> None:
        if self.writes:
            self.run(q, k, v, spec, out, **more)
        else:
            out.copy_(self.run(q, k, v, spec, **more))


opaque_object(OpaqueCall)


def attend(
    call: OpaqueCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    sequences: Sequences | None = None,
    histories: Histories = None,
    out: Tensor | None = None,
) -> Tensor:
    """Check the arguments and run `call`, or, while a graph is traced, put a node into the graph that runs it."""
    if not is_transformed():
        q, k, v, spec = checked(q, k, v, options, sequences)
        if out is not None:
            if sequences is not None:
                raise ValueError("'out' is for one prompt, and 'sequences' are several. Leave one of the two out.")
            check_out(out, q, k, v)
        return call(q, k, v, spec, sequences, histories, out)
    for name, given in (("history", histories), ("out", out)):
        if given is not None:
            refuse_transforms(name)
    causal, scale = options.get("causal", True), options.get("scale")
    q, k, v, scale = check_inputs(q, k, v, causal=causal, scale=scale, sequences=sequences)
    return call_op(call, q, k, v, scale, options, sequences)


def call_op(
    call: OpaqueCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    options: AttentionOptions,
    sequences: Sequences | None = None,
) -> Tensor:
    """Put a node into the graph that is traced, which runs `call` of checked inputs."""
    numbers, sinks = as_numbers(scale, options)
    if sequences is None:
        out: Tensor = _attend(q, k, v, call, numbers, sinks, options.get("remaining", 0))
    else:
        out = _attend_each(q, k, v, call, sequences, numbers, sinks, options.get("remaining", 0))
    return out


# A graph has no attention specs: its nodes take their fields, as numbers and a tensor.


def as_numbers(scale: float, options: AttentionOptions) -> tuple[list[float], Tensor | None]:
    """The options of a layer as arguments of a node: causality, scale, window and softcap, with 0 for none.

    Sinks are `[Hq]`, or `[]` for one number. How much of a prompt remains is a separate argument, since a graph is
    compiled for each float.
    """
    check_options(options)
    causal, sinks = options.get("causal", True), options.get("sinks")
    if isinstance(sinks, HeadValues):
        sinks = sinks.values
    elif sinks is not None and not isinstance(sinks, Tensor):
        sinks = torch.tensor(sinks, dtype=torch.float64, device="cpu")
    return [float(causal), scale, float(options.get("window") or 0), float(options.get("softcap") or 0)], sinks


def spec_of(numbers: list[float], sinks: Tensor | None, heads: int, remaining: int = 0) -> AttentionSpec:
    """The spec whose fields a node got."""
    causal, scale, window, softcap = numbers
    options = AttentionOptions(
        causal=bool(causal), window=int(window) or None, softcap=softcap or None, sinks=sinks, remaining=remaining
    )
    return AttentionSpec.of(heads, scale, options)


@custom_op("blocksparse::attend")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: OpaqueCall, numbers: list[float], sinks: Tensor | None, remaining: int
) -> Tensor:
    return call(q, k, v, spec_of(numbers, sinks, q.shape[1], remaining))


# PyTorch knows no op with an argument that is such an object or None, so this is a separate op.
@custom_op("blocksparse::attend_each")
def _attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: OpaqueCall,
    sequences: Sequences,
    numbers: list[float],
    sinks: Tensor | None,
    remaining: int,
) -> Tensor:
    return call(q, k, v, spec_of(numbers, sinks, q.shape[1], remaining), sequences)


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
