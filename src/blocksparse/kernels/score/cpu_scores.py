"""What chooses blocks, by a kernel that this machine compiles for its CPU: scores, means, products, orders and shares.

Operations such as `strided_mass` and `top_cdf` say the same in plain torch, with all logits, or copies in fp32, in memory. Here
a thread multiplies a few rows of queries with all keys that they may reach, and takes their softmax while the logits lie in
its cache.

bf16 is multiplied as it is where the CPU does that (AVX-512 BF16, AMX), and products are exact then too; fp16, and bf16
elsewhere, are widened to fp32. All sums and softmaxes are in fp32, in an order that neither the number of threads nor the
cut of a prompt into chunks changes. Orders and shares follow their reference implementations bit for bit. Ask `takes` first.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.compiled import TYPES, Call, load, steps, team
from blocksparse.kernels.common.sizes import ROOM, Heads, cdiv
from blocksparse.kernels.gemm.products import StridedPooling, edge_means, fillers, strided_view
from blocksparse.launch.torch_private import operations_are_noted

SOURCE = Path(__file__).with_suffix(".cpp")
_log = logging.getLogger(__name__)
_PARTS = 4  # of the last queries, each of which one thread sums: a fixed number, so that sums are


def takes(*tensors: Tensor) -> bool:
    """Whether the compiled kernel runs these: it is there, and they lie on a CPU in a dtype that it knows."""
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype in TYPES for x in tensors)
    return plain and not operations_are_noted() and scores_kernel() is not None


def strided_mass_on_cpu(
    q: Tensor, k: Tensor, of: StridedPooling, *, weight: float, floor: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Mass of every block, `[B, Hq, rows, cols]` fp32, as `strided_mass` has it, which is not joint."""
    q_filler, k_filler = fillers(q, k, of, edge_means)
    q = strided_view(q, of.slots, of.q_lead, q_filler)  # [B, Hq, cells, slots, D]
    k = strided_view(k, of.slots, 0, k_filler)
    queries, keys, first_cell = q.shape[2], k.shape[2], of.first_cell
    call = _of_tokens("StridedMassCall", q, k)
    # A block far larger than the prompt is cut to one that holds all of its cells.
    high, wide = min(of.high, max(first_cell + queries, ROOM)), min(of.wide, max(keys, ROOM))
    empty = first_cell % high
    rows, cols = cdiv(empty + queries, high), cdiv(keys, wide)
    cell = torch.arange(first_cell, first_cell + queries, dtype=torch.int32, device=q.device)
    if of.causal:
        q_last, k_first, q_floor, k_last = of.q_last, of.k_first, of.q_floor, of.k_last
        if q_last is None or k_first is None:
            q_last = ((cell + 1) * of.every - 1).view(1, 1, -1)
            k_first = torch.arange(keys, dtype=torch.int32, device=q.device).view(1, 1, -1)
            if of.behind is not None:
                q_floor, k_last = q_last - of.behind - 1, k_first
        ends = {"q_last": q_last, "q_floor": q_floor, "k_first": k_first, "k_last": k_last}
        call.set(**{name: None if at is None else at.contiguous() for name, at in ends.items()})
        for side, at in (("q", q_last), ("k", k_first)):
            call.set(**{f"{side}_at_heads": at.shape[1], f"{side}_at_batch": at[0].numel() * (len(at) > 1)})
    else:
        call.set(q_at_heads=1, k_at_heads=1)
    if of.segment is not None:
        call.set(limit=cell // of.segment * of.segment)
    mass = q.new_empty((*q.shape[:2], rows, cols), dtype=torch.float32)
    call.set(high=high, wide=wide, empty=empty, weight=weight, flipped=of.flipped, rows=rows, cols=cols, mass=mass)
    _make("strided_mass", call)
    return greater(mass, floor, factor)


def greater(mass: Tensor, floor: Tensor | None, factor: float) -> Tensor:
    """`mass`, or the greater of other mass and `factor` times it; it may lack the last rows of the other."""
    if floor is None:
        return mass
    mass = pad(mass.to(floor.dtype) * factor, (0, 0, 0, floor.shape[2] - mass.shape[2]))
    return torch.maximum(floor, mass)


def last_query_weights_on_cpu(
    last_q: Tensor, k: Tensor, q_len: int, causal: bool, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """`last_query_weights` by the CPU kernel, in fp32."""
    distances = k.shape[2] if causal else max(q_len, k.shape[2])
    first = (k.shape[2] if causal else q_len) - last_q.shape[2]
    vertical, slash = _weights(last_q, k, first, distances, causal=causal, scale=scale, window=window)
    return vertical.sum(2), slash.sum(2)


def key_importance_on_cpu(
    q: Tensor, k: Tensor, last_q: int, seen: int, causal: bool, scale: float, per_query_head: bool
) -> Tensor:
    """`key_importance` by the CPU kernel, in fp32."""
    queries, group = q[:, :, -min(last_q, q.shape[2]) :], 1 if per_query_head else q.shape[1] // k.shape[1]
    first = k.shape[2] - queries.shape[2]
    weight, _ = _weights(queries, k, first, 0, causal=causal, scale=scale, seen=seen, heads=group)
    parts: Tensor = weight.unflatten(1, (-1, group)).flatten(2, 3)
    return parts


def _weights(
    last_q: Tensor,
    k: Tensor,
    first: int,
    distances: int,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    seen: int | None = None,
    heads: int = 1,
) -> tuple[Tensor, Tensor]:
    """`[B, Hq, parts, N]` and `[B, Hq, parts, distances]`, of which the sums are means over the queries and so many heads."""
    (B, Hq, P, _), N = last_q.shape, k.shape[2]
    call, parts = _of_tokens("LastQueriesCall", last_q.unsqueeze(3), k.unsqueeze(3)), min(_PARTS, P)
    vertical, slash = (last_q.new_empty((B, Hq, parts, n), dtype=torch.float32) for n in (N, distances))
    call.set(first=first, causal=causal, window=window, seen=N if seen is None else seen, parts=parts)
    call.set(distances=distances, scale=scale, share=1 / (P * heads), vertical=vertical, slash=slash)
    _make("last_query_weights", call)
    return vertical, slash


def _of_tokens(name: str, q: Tensor, k: Tensor) -> Call:
    """A call that begins with the struct `Tokens`, for `q` `[B, Hq, rows, slots, D]` and `k`."""
    q, k = (x.resolve_neg() for x in (q, k))
    q, k = (x if x.stride(4) == 1 or x.shape[4] == 1 else x.contiguous() for x in (q, k))
    (batch, q_heads, queries, slots, dim), (_, kv_heads, keys, *_) = q.shape, k.shape
    call = Call(SOURCE, name)
    call.set("tokens", batch=batch, q_heads=q_heads, kv_heads=kv_heads, queries=queries, keys=keys, slots=slots)
    call.set("tokens", dim=dim, type=TYPES[q.dtype], q_step=steps(q, 4), k_step=steps(k, 4), q=q, k=k)
    call.set("tokens.team", **team())
    return call


@functools.cache
def scores_kernel() -> ctypes.PyDLL | None:
    """The compiled kernel, if there is one; compiled at the first call ever, which takes some seconds."""
    found = load(SOURCE)
    library = found.library
    if library is None:
        _log.info("blocks are selected on this CPU without the compiled kernel: %s", found.why_not)
    return library


def _make(function: str, call: Call) -> None:
    library = scores_kernel()
    assert library is not None, "ask 'takes' first"
    call.make(library, function, "to score blocks")


def products_on_cpu(q: Tensor, k: Tensor) -> Tensor:
    """`products` by the CPU kernel, fp32."""
    out = q.new_empty((*q.shape[:3], k.shape[2]), dtype=torch.float32)
    call = _of_tokens("ProductCall", q.unsqueeze(3), k.unsqueeze(3))
    call.set(out=out)
    _make("products", call)
    return out


def block_mean_on_cpu(
    x: Tensor,
    block: int,
    lead: int = 0,
    padded_tail: bool = False,
    index: Tensor | None = None,
    heads: Heads = None,
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
    call = Call(SOURCE, "MeanCall")
    call.set("team", **team())
    call.set(batch=B, heads=H, x_heads=Hx, tokens=N, dim=D, block=block if padded else min(block, lead + N))
    call.set(lead=lead, padded=padded, type=TYPES[x.dtype], step=steps(x, 3), x=x, mean=mean, centre=centre)
    call.set(alike=similarity if alike else None, guide=guide, products=products)
    if index is not None:
        call.set(index=index, index_step=steps(index, 2))
    if guide is not None:
        call.set(guides=guide.shape[1])
    _make("means", call)
    return mean, similarity


def order_on_cpu(scores: Tensor, until: int, S: int, out: Tensor) -> None:
    """Write the order of `coarse_order`, of fp32 scores `[B, H, G, keys]`, into `out` `[B, H, G, count]`."""
    B, H, G, keys = scores.shape
    order = out if out.stride(3) == 1 and out.stride(0) == H * out.stride(1) else out.new_empty(out.shape)
    call = Call(SOURCE, "OrderCall")
    call.set("team", **team())
    call.set(rows=B * H * G, groups=G, keys=keys, until=until, segment=S, count=out.shape[3])
    call.set(out_row=order.stride(1), out_group=order.stride(2), scores=scores.contiguous(), out=order)
    _make("order", call)
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
    call, (batch, heads, rows, cols) = Call(SOURCE, "ShareCall"), values.shape
    call.set("team", **team())
    call.set(batch=batch, heads=heads, rows=rows, cols=cols, crossing=crossing)
    call.set(mass=mass, mass_step=mass.stride(1) if mass.shape[1] > 1 else 0, keep=keep)
    call.set(values=values, value_step=steps(values, 4), there=there, there_step=steps(there, 4))
    call.set(always=always, always_step=steps(always, 4))
    if forced is not None:
        forced = forced.expand(values.shape)
        call.set(forced=forced, forced_step=steps(forced, 4))
    _make("shares", call)
    return keep
