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

from blocksparse.kernels.common.compiled import load, parallel, python_calls, steps
from blocksparse.kernels.common.sizes import ROOM, HeadMask, cdiv
from blocksparse.kernels.gemm.products import StridedPooling, edge_means, fillers, strided_view
from blocksparse.launch.torch_private import operations_are_noted

SOURCE = Path(__file__).with_suffix(".cpp")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_log = logging.getLogger(__name__)
_PARTS = 4  # of the last queries, each of which one thread sums: a fixed number, so that sums are


def takes(*tensors: Tensor) -> bool:
    """Whether the compiled kernel runs these: it is there, and they lie on a CPU in a dtype that it knows."""
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype in TYPES for x in tensors)
    return plain and not operations_are_noted() and scores_kernel() is not None


def strided_mass_on_cpu(
    q: Tensor,
    k: Tensor,
    of: StridedPooling,
    *,
    first_cell: int,
    segment: int | None,
    weight: float,
    flipped: bool,
    joint: bool = False,
    floor: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Mass of every block, `[B, Hq, rows, cols]` fp32, as `strided_mass` has it, which is not joint."""
    q_filler, k_filler = fillers(q, k, of, edge_means)
    q = strided_view(q, of.slots, of.q_lead, q_filler)  # [B, Hq, cells, slots, D]
    k = strided_view(k, of.slots, 0, k_filler)
    queries, keys = q.shape[2], k.shape[2]
    call = _StridedMassCall()
    held: list[Tensor | None] = [*call.tokens.set(q, k)]
    # A block far larger than the prompt is cut to one that holds all of its cells.
    call.high, call.wide = min(of.high, max(first_cell + queries, ROOM)), min(of.wide, max(keys, ROOM))
    call.empty, call.weight, call.flipped = first_cell % call.high, weight, flipped
    call.rows, call.cols = cdiv(call.empty + queries, call.high), cdiv(keys, call.wide)
    call.q_at_heads = call.k_at_heads = 1

    cell = torch.arange(first_cell, first_cell + queries, dtype=torch.int32, device=q.device)
    if of.causal:
        q_last, k_first, q_floor, k_last = of.q_last, of.k_first, of.q_floor, of.k_last
        if q_last is None or k_first is None:
            q_last = ((cell + 1) * of.every - 1).view(1, 1, -1)
            k_first = torch.arange(keys, dtype=torch.int32, device=q.device).view(1, 1, -1)
            if of.behind is not None:
                q_floor, k_last = q_last - of.behind - 1, k_first
        positions = [None if at is None else at.contiguous() for at in (q_last, q_floor, k_first, k_last)]
        held += positions
        call.q_last, call.q_floor, call.k_first, call.k_last = (
            0 if x is None else x.data_ptr() for x in positions
        )
        call.q_at_heads, call.k_at_heads = q_last.shape[1], k_first.shape[1]
        call.q_at_batch = queries * q_last.shape[1] if q_last.shape[0] > 1 else 0
        call.k_at_batch = keys * k_first.shape[1] if k_first.shape[0] > 1 else 0
    if segment is not None:
        held.append(limit := cell // segment * segment)
        call.limit = limit.data_ptr()
    mass = q.new_empty((*q.shape[:2], call.rows, call.cols), dtype=torch.float32)
    call.mass = mass.data_ptr()
    make("strided_mass", call)
    del held
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
    call = _LastQueriesCall()
    held = call.tokens.set(last_q.unsqueeze(3), k.unsqueeze(3))
    call.first, call.causal, call.window, call.seen = first, causal, window or 0, N if seen is None else seen
    call.parts, call.distances, call.scale, call.share = min(_PARTS, P), distances, scale, 1 / (P * heads)
    vertical, slash = (last_q.new_empty((B, Hq, call.parts, n), dtype=torch.float32) for n in (N, distances))
    call.vertical, call.slash = vertical.data_ptr(), slash.data_ptr()
    make("last_query_weights", call)
    del held
    return vertical, slash


class Team(ctypes.Structure):
    """The struct `Team` of the source, field by field, like those below; what is not set is 0 or null."""

    _fields_ = [
        ("threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("parallel", "release", "acquire")),
    ]  # fmt: skip

    def set(self) -> None:
        self.threads, self.parallel = torch.get_num_threads(), parallel()
        self.release, self.acquire, _ = python_calls()


class Tokens(ctypes.Structure):
    _fields_ = [
        ("team", Team),
        *((name, ctypes.c_int64) for name in (
            "batch", "q_heads", "kv_heads", "queries", "keys", "slots", "dim", "type",
        )),
        ("q_step", ctypes.c_int64 * 4), ("k_step", ctypes.c_int64 * 4),
        *((name, ctypes.c_void_p) for name in ("q", "k")),
    ]  # fmt: skip

    def set(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Fill it in for `q` `[B, Hq, rows, slots, D]` and `k`; what is returned must live as long as the call."""
        q, k = (x.resolve_neg() for x in (q, k))
        q, k = (x if x.stride(4) == 1 or x.shape[4] == 1 else x.contiguous() for x in (q, k))
        self.batch, self.q_heads, self.queries, self.slots, self.dim = q.shape
        self.kv_heads, self.keys = k.shape[1:3]
        self.type = TYPES[q.dtype]
        self.q_step, self.k_step, self.q, self.k = steps(q, 4), steps(k, 4), q.data_ptr(), k.data_ptr()
        self.team.set()
        return q, k


class _StridedMassCall(ctypes.Structure):
    _fields_ = [
        ("tokens", Tokens),
        *((name, ctypes.c_int64) for name in (
            "high", "wide", "empty", "rows", "cols", "flipped", "q_at_heads", "q_at_batch", "k_at_heads", "k_at_batch",
        )),
        ("weight", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("q_last", "q_floor", "limit", "k_first", "k_last", "mass")),
    ]  # fmt: skip


class _LastQueriesCall(ctypes.Structure):
    _fields_ = [
        ("tokens", Tokens),
        *((name, ctypes.c_int64) for name in ("first", "causal", "window", "seen", "parts", "distances")),
        ("scale", ctypes.c_double), ("share", ctypes.c_double),
        ("vertical", ctypes.c_void_p), ("slash", ctypes.c_void_p),
    ]  # fmt: skip


@functools.cache
def scores_kernel() -> ctypes.PyDLL | None:
    """The compiled kernel, if there is one; compiled at the first call ever, which takes some seconds."""
    found = load(SOURCE)
    library = found.library
    if library is None:
        _log.info("blocks are selected on this CPU without the compiled kernel: %s", found.why_not)
    return library


def make(name: str, call: ctypes.Structure) -> None:
    """Make a call of the kernel."""
    library = scores_kernel()
    assert library is not None, "ask 'takes' first"
    if getattr(library, f"blocksparse_{name}")(ctypes.byref(call)):
        raise MemoryError("no memory to score blocks")


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
