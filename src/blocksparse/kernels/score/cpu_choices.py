"""Means, products, orders and shares of which choices of blocks are made, by a kernel that this machine compiles.

`block_mean`, `products`, `coarse_order` and `top_cdf` say the same in plain torch, in many operations with a copy in fp32
of what is read. Sums of means and products are in fp32, in an order that sizes alone decide; orders and shares follow
their reference implementations bit for bit. Ask `cpu_scores.takes` first.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blocksparse.kernels.common.compiled import steps
from blocksparse.kernels.common.sizes import HeadMask, cdiv
from blocksparse.kernels.score.cpu_scores import TYPES, Team, Tokens, make


class _ProductCall(ctypes.Structure):
    """The struct `ProductCall` of `cpu_scores.cpp`, field by field, like those below."""

    _fields_ = [("tokens", Tokens), ("out", ctypes.c_void_p)]


class _MeanCall(ctypes.Structure):
    _fields_ = [
        ("team", Team),
        *((name, ctypes.c_int64) for name in (
            "batch", "heads", "x_heads", "tokens", "dim", "block", "lead", "padded", "type",
        )),
        ("step", ctypes.c_int64 * 3), ("index_step", ctypes.c_int64 * 2),
        *((name, ctypes.c_void_p) for name in ("x", "index", "centre", "guide")),
        ("guides", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("mean", "alike", "products")),
    ]  # fmt: skip


class _OrderCall(ctypes.Structure):
    _fields_ = [
        ("team", Team),
        *((name, ctypes.c_int64) for name in (
            "rows", "groups", "keys", "until", "segment", "count", "out_row", "out_group",
        )),
        *((name, ctypes.c_void_p) for name in ("scores", "out")),
    ]  # fmt: skip


class _ShareCall(ctypes.Structure):
    _fields_ = [
        ("team", Team),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "rows", "cols", "crossing")),
        *((f"{name}_step", ctypes.c_int64 * 4) for name in ("value", "forced", "there", "always")),
        ("mass_step", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("values", "mass", "forced", "there", "always", "keep")),
    ]  # fmt: skip


def products_on_cpu(q: Tensor, k: Tensor) -> Tensor:
    """`products` by the CPU kernel, fp32."""
    call, out = _ProductCall(), q.new_empty((*q.shape[:3], k.shape[2]), dtype=torch.float32)
    held = call.tokens.set(q.unsqueeze(3), k.unsqueeze(3))
    call.out = out.data_ptr()
    make("products", call)
    del held
    return out


def block_mean_on_cpu(
    x: Tensor,
    block: int,
    lead: int = 0,
    padded_tail: bool = False,
    index: Tensor | None = None,
    heads: HeadMask | None = None,
) -> Tensor:
    """`block_mean` by the CPU kernel, fp32."""
    return _means(x, block, lead, padded_tail, index)[0]


def mean_and_products_on_cpu(q: Tensor, guide: Tensor, S: int, lead: int = 0) -> tuple[Tensor, Tensor]:
    """`mean_and_products` by the CPU kernel, fp32."""
    products = q.new_empty(q.shape[:3], dtype=torch.float32)
    return _means(q, S, lead, guide=guide.float().contiguous(), products=products)[0], products


def block_similarity_on_cpu(
    x: Tensor, block: int, lead: int = 0, centred: bool = False, index: Tensor | None = None
) -> Tensor:
    """`block_similarity` by the CPU kernel, fp32."""
    centre = _means(x, x.shape[2])[0] if centred else None
    if centre is not None and index is not None:
        centre = centre.repeat_interleave(index.shape[1] // x.shape[1], 1)
    return _means(x, block, lead, index=index, centre=centre, alike=True)[1]


def _means(
    x: Tensor,
    block: int,
    lead: int = 0,
    padded: bool = False,
    index: Tensor | None = None,
    *,
    centre: Tensor | None = None,
    guide: Tensor | None = None,
    products: Tensor | None = None,
    alike: bool = False,
) -> tuple[Tensor, Tensor]:
    x = x.resolve_neg()
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    B, Hx, _, D = x.shape
    H, N = x.shape[1:3] if index is None else index.shape[1:]
    if index is not None:
        index = (index if index.shape[0] == B else index.expand(B, -1, -1)).contiguous()
    blocks = cdiv(lead + N, block)
    mean = x.new_empty((B, H, blocks, D), dtype=torch.float32)
    similarity = mean.new_empty((B, H, blocks) if alike else 0)
    call = _MeanCall()
    call.team.set()
    call.batch, call.heads, call.x_heads, call.tokens, call.dim, call.block = B, H, Hx, N, D, min(block, lead + N)
    if padded:
        call.block = block
    call.lead, call.padded, call.type, call.step = lead, padded, TYPES[x.dtype], steps(x, 3)
    call.x, call.mean = x.data_ptr(), mean.data_ptr()
    if index is not None:
        call.index, call.index_step = index.data_ptr(), steps(index, 2)
    call.centre = 0 if centre is None else centre.data_ptr()
    call.alike = similarity.data_ptr() if alike else 0
    if guide is not None and products is not None:
        call.guide, call.guides, call.products = guide.data_ptr(), guide.shape[1], products.data_ptr()
    make("means", call)
    return mean, similarity


def order_on_cpu(scores: Tensor, until: int, S: int, out: Tensor) -> None:
    """Write the order of `coarse_order`, of fp32 scores `[B, H, G, keys]`, into `out` `[B, H, G, count]`."""
    B, H, G, keys = scores.shape
    order = out if out.stride(3) == 1 and out.stride(0) == H * out.stride(1) else out.new_empty(out.shape)
    scores, call = scores.contiguous(), _OrderCall()
    call.team.set()
    call.rows, call.groups, call.keys, call.until, call.segment = B * H * G, G, keys, until, S
    call.count, call.out_row, call.out_group = out.shape[3], order.stride(1), order.stride(2)
    call.scores, call.out = scores.data_ptr(), order.data_ptr()
    make("order", call)
    if order is not out:
        out.copy_(order)


def shares_on_cpu(
    values: Tensor, forced: Tensor | None, mass: Tensor, there: Tensor, always: Tensor, *, crossing: bool
) -> Tensor:
    """The blocks that `top_cdf` takes by their fp32 `values`, and those of `always`, `[B, H, rows, cols]` bool.

    Args:
        mass: `[1, H|1, 1, 1]`.
        there: `[B|1, H|1, rows|1, cols|1]` bool. What is not counts nothing.
    """
    mass, keep = mass.float(), values.new_empty(values.shape, dtype=torch.bool)
    there, always = there.expand(values.shape), always.expand(values.shape)
    call = _ShareCall()
    call.team.set()
    call.batch, call.heads, call.rows, call.cols = values.shape
    call.crossing, call.mass_step = crossing, mass.stride(1) if mass.shape[1] > 1 else 0
    call.value_step, call.there_step, call.always_step = (steps(x, 4) for x in (values, there, always))
    if forced is not None:
        forced = forced.expand(values.shape)
        call.forced, call.forced_step = forced.data_ptr(), steps(forced, 4)
    call.values, call.mass, call.there = values.data_ptr(), mass.data_ptr(), there.data_ptr()
    call.always, call.keep = always.data_ptr(), keep.data_ptr()
    make("shares", call)
    return keep
