"""Mass of cells, and weights of the last queries, by a kernel that this machine compiles for its CPU.

`strided_mass`, `last_query_weights` and `key_importance` say the same in plain torch, with passes over
all logits in memory. Here a thread multiplies a few rows of queries with all keys that they may reach, and takes their
softmax while the logits lie in its cache.

bf16 is multiplied as it is where the CPU does that (AVX-512 BF16, AMX), and products are exact then too; fp16, and bf16
elsewhere, are widened to fp32. All sums and softmaxes are in fp32, in an order that neither the number of threads nor the
cut of a prompt into chunks changes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from blocksparse.kernels.common.compiled import load, parallel, python_calls, steps
from blocksparse.kernels.common.sizes import ROOM, cdiv
from blocksparse.kernels.gemm.products import StridedPooling, edge_means, strided_view
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
) -> Tensor:
    """Mass of every block, `[B, Hq, rows, cols]` fp32, as `strided_mass` has it, which is not joint."""
    q_filler, k_filler = (
        None if of.padded_tail else edge_means(x, of.slots, lead) for x, lead in ((q, of.q_lead), (k, 0))
    )
    q, k = (
        strided_view(q, of.slots, of.q_lead, q_filler),
        strided_view(k, of.slots, 0, k_filler),
    )  # [B, H, cells, slots, D]
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
            q_last, k_first = (
                cell.view(1, 1, -1),
                torch.arange(keys, dtype=torch.int32, device=q.device).view(1, 1, -1),
            )
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
    return mass


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
