"""One call of attention as one node of a compiled graph, whatever Python runs behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type  # no public name up to torch 2.13
from torch._opaque_base import OpaqueBase

from blocksparse.precision import without_autocast

Run = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]
"""`(q, k, v, causal, scale)`, all checked: `[B, Hq, M, Dv]`."""


@final
class OpaqueCall(OpaqueBase):
    """Attention that torch.compile calls and does not look into: an input of the graph, told apart by identity."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        with without_autocast(q):
            return _laid_out_as(q, self.run(q, k, v, causal, scale))


# `hoist` keeps what runs out of the key under which compiled graphs are cached: it is an input, not a constant.
register_opaque_type(OpaqueCall, typ="reference", hoist=True)


def attend(call: OpaqueCall, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Run `call`; while a graph is traced, leave a node there that will."""
    if torch.compiler.is_compiling():
        out: Tensor = _attend(q, k, v, call, causal, scale)
        return out
    return call(q, k, v, causal, scale)


@torch.library.custom_op("blocksparse::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, call: OpaqueCall, causal: bool, scale: float) -> Tensor:
    return call(q, k, v, causal, scale)


@_attend.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> Tensor:
    return _laid_out_as(q, q.new_empty((*q.shape[:3], v.shape[-1])))


def _laid_out_as(q: Tensor, out: Tensor) -> Tensor:
    """`out` with tokens before heads in memory where `q` has them so, else contiguous.

    A graph must know which before anything runs; so it is the same for every executor, and without a graph too.
    """
    if q.transpose(1, 2).is_contiguous():
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()
