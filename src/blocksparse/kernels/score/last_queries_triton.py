"""The Triton kernels of `score/last_queries.py`: fp16, bf16 and fp32. No sum depends on which program comes first.

`last_query_weights` computes logits twice: for the softmax denominators, then for the weights, which are added up on chip,
along columns and along diagonals, so that no weight is stored. Squares of `SPAN` queries and as many keys hold parts of
diagonals: those that begin in the square's first row, and those that come in from the square before. Parts are stored, and a
last launch adds them up. `last_query_sums` computes each logit once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import joined, rows_of, step
from blocksparse.kernels.common.dispatch import FLOATS
from blocksparse.kernels.common.hardware import Hardware, fitted, hardware_of, needed
from blocksparse.kernels.common.sizes import REMEMBERED, cdiv, power_of_2
from blocksparse.launch.launches import remembered

_KEYS, _DISTANCES = 1024, 512  # keys, and distances, per program
_SPAN = 32  # queries and keys of a square: as many as a warp has threads, so that these exchange a row at once


def takes(last_q: Tensor) -> bool:
    """Whether the kernels compute in the precision of the queries, and a program can hold all of them."""
    row_bytes = last_q.shape[3] * last_q.element_size()
    if last_q.shape[2] > 128 or row_bytes > 512 or last_q.dtype not in FLOATS:
        return False
    hardware = hardware_of(last_q)
    options = launch_options(last_q.shape[2], last_q.shape[3], last_q.element_size(), hardware)
    return shared_memory(hardware, options, last_q.shape[3], last_q.element_size()) <= hardware.shared


@functools.lru_cache(maxsize=REMEMBERED)
def launch_options(P: int, head_dim: int, itemsize: int, hardware: Hardware) -> dict[str, int]:
    """Tiles of all queries and of keys that fit on chip together."""
    stages = 1 if itemsize > 2 or head_dim > 128 else 2 if hardware.multiplies_from_shared else 3
    options = {"BLOCK_M": max(16, power_of_2(P)), "BLOCK_N": 128, "num_warps": 8, "num_stages": stages}
    if stages == 2 and P <= 64:
        options["maxnreg"] = 128  # two programs share a multiprocessor
    return fitted(options, lambda x: shared_memory(hardware, x, head_dim, itemsize), hardware, rows=False)


def shared_memory(
    hardware: Hardware, options: dict[str, int], head_dim: int, itemsize: int, *, sums: bool = False
) -> int:
    """Bytes of shared memory of a program, at most; of `last_query_sums` with `sums`."""
    row_bytes = max(16, power_of_2(head_dim)) * itemsize
    M, N = options["BLOCK_M"], options["BLOCK_N"]
    return needed(
        hardware,
        held=M * row_bytes,
        loaded=(N * row_bytes,),
        stages=options["num_stages"],
        between=M * 64 if sums else M * N * 4,  # weights: squares of which each lies in one warp
        single=sums and itemsize == 4,
    )


def last_query_weights_triton(
    last_q: Tensor, k: Tensor, q_len: int, causal: bool, scale: float, window: None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernels; arguments as in `last_query_weights`, without a window."""
    (B, Hq, P, D), (_, H, N, _) = last_q.shape, k.shape
    last_q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (last_q, k))
    first = (N if causal else q_len) - P  # position of the first of the last queries
    rows, k_parts = max(16, power_of_2(P)), cdiv(N, _KEYS)
    new: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    log_sum = torch.empty((B, Hq, k_parts, rows), **new)
    vertical = torch.empty((B, Hq, N), **new)
    slash = torch.empty((B, Hq, N if causal else max(q_len, N)), **new)
    sizes = (P, N, first, Hq // H, scale * math.log2(math.e))
    options = launch_options(P, D, k.element_size(), hardware_of(k))
    keys = options["BLOCK_N"]
    span = min(_SPAN, rows, keys)
    shears = torch.empty((B, Hq, cdiv(N, keys) * (keys // span), rows // span, 2, span), **new)
    tile = {
        "D": D, "BLOCK_D": max(16, power_of_2(D)), "ROWS": rows, "KEYS": keys, "TILES": _KEYS // keys, "CAUSAL": causal,
        **{name: value for name, value in options.items() if not name.startswith("BLOCK")},
    }  # fmt: skip
    strides = last_q.stride()[:3], k.stride()[:3]
    _log_sums[(k_parts, Hq, B)](last_q, k, log_sum, *strides, *sizes, **tile)
    _weights[(k_parts, Hq, B)](last_q, k, log_sum, vertical, shears, *strides, k_parts, *sizes, SPAN=span, **tile)
    _diagonals[(cdiv(slash.shape[2], _DISTANCES), Hq, B)](
        shears, slash, P, slash.shape[2], first, shears.shape[2],
        CAUSAL=causal, DISTANCES=_DISTANCES, SPAN=span, GROUPS=rows // span,
        num_warps=4,
    )  # fmt: skip
    return vertical, slash


@triton.jit
def _logits(
    q_tile, k_ptr, k_strides, b, h_key, start, N, first, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of the keys from `start` on, `[ROWS, KEYS]`, -inf where a query sees no key; 0 of rows past the last query."""
    key = start + tl.arange(0, KEYS)
    k_tile = rows_of(k_ptr, k_strides, b, h_key, key, key < N, D, BLOCK_D, False)
    logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
    if CAUSAL:
        if start + KEYS > first + 1:  # some query does not see some key
            logits = tl.where(key[None, :] <= first + tl.arange(0, ROWS)[:, None], logits, float("-inf"))
    elif start + KEYS > N:
        logits = tl.where((key < N)[None, :], logits, float("-inf"))
    return logits


@remembered
@triton.jit(do_not_specialize=["P", "N", "first"])
def _log_sums(
    q_ptr, k_ptr, log_sum_ptr, q_strides, k_strides, P, N, first, heads_per_key, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Stores the base-2 logarithm of each query's sum over this program's keys, `[B, Hq, k_parts, ROWS]`."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    query = tl.arange(0, ROWS)
    q_tile = rows_of(q_ptr, q_strides, b, h, query, query < P, D, BLOCK_D, False)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for i in range(TILES):
        start = (tl.program_id(0) * TILES + i) * KEYS
        logits = _logits(
            q_tile, k_ptr, k_strides, b, h // heads_per_key, start, N, first, scale_log2, D, BLOCK_D, ROWS, KEYS, CAUSAL
        )  # fmt: skip
        peak, weight, rescale = step(logits, peak, True)
        total = total * rescale + tl.sum(weight, 1)
    log_sum = peak + tl.log2(tl.where(total == 0.0, 1.0, total))
    at = ((b * tl.num_programs(1) + h).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * ROWS
    tl.store(log_sum_ptr + at + tl.arange(0, ROWS), log_sum)


@remembered
@triton.jit(do_not_specialize=["P", "N", "first", "k_parts"])
def _weights(
    q_ptr, k_ptr, log_sum_ptr, vertical_ptr, shears_ptr, q_strides, k_strides, k_parts,
    P, N, first, heads_per_key, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
    SPAN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Stores the means of softmax weights over the queries, and the parts of diagonals.

    The parts are `[B, Hq, spans of keys, spans of queries, 2, SPAN]`. In each square the first part is that of the diagonals
    that meet its first row at each of its keys. The second part is that of the diagonals that would meet this row in the
    square before.
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    row = tl.arange(0, ROWS)
    at = (b * tl.num_programs(1) + h).to(tl.int64)
    q_tile = rows_of(q_ptr, q_strides, b, h, row, row < P, D, BLOCK_D, False)
    # Rows past the last query weigh nothing.
    total = tl.where(row < P, joined(log_sum_ptr + at * k_parts * ROWS, k_parts, ROWS), float("inf"))
    across: tl.constexpr = KEYS // SPAN
    squares: tl.constexpr = (ROWS // SPAN) * across
    # Rows of squares stand apart: those of one square are `squares` apart, so that a warp holds whole squares, and no two
    # warps meet in a sum.
    column = tl.arange(0, SPAN)[None, :]
    ahead = column + tl.arange(0, SPAN * squares)[:, None] // squares  # where a diagonal stands in each row
    square = tl.arange(0, squares)[:, None]
    part_of = (square % across * (ROWS // SPAN) + square // across) * (2 * SPAN) + column
    tiles = tl.cdiv(N, KEYS)
    for i in range(TILES):
        tile = tl.program_id(0) * TILES + i
        logits = _logits(
            q_tile, k_ptr, k_strides, b, h // heads_per_key, tile * KEYS, N, first, scale_log2, D, BLOCK_D, ROWS, KEYS,
            CAUSAL,
        )  # fmt: skip
        weight = tl.reshape(tl.exp2(logits - total[:, None]), [ROWS // SPAN, SPAN, across, SPAN])
        weight = tl.reshape(tl.permute(weight, 1, 0, 2, 3), [SPAN * squares, SPAN])
        # A gather of each column from itself: it deals rows out to warps.
        weight = tl.gather(weight, column + tl.zeros_like(ahead), 1)
        of_keys = tl.sum(tl.reshape(_of_squares(weight, squares, SPAN), [ROWS // SPAN, across * SPAN]), 0)
        key = tile * KEYS + tl.arange(0, KEYS)
        tl.store(vertical_ptr + at * N + key, of_keys / P, mask=key < N)
        along = tl.gather(weight, ahead % SPAN, 1)
        begun = tl.where(ahead < SPAN, along, 0.0)
        came = tl.where(ahead < SPAN, 0.0, along)
        part_at = shears_ptr + (at * tiles + tile) * squares * (2 * SPAN) + part_of
        met = tl.zeros_like(part_of) + tile < tiles  # one number is no mask to Triton 3.9's interpreter
        tl.store(part_at, _of_squares(begun, squares, SPAN), mask=met)
        tl.store(part_at + SPAN, _of_squares(came, squares, SPAN), mask=met)


@triton.jit
def _of_squares(x, SQUARES: tl.constexpr, SPAN: tl.constexpr):
    """The sums of rows `x` `[SPAN * SQUARES, SPAN]` over the rows of each square, `[SQUARES, SPAN]`."""
    return tl.sum(tl.reshape(x, [SPAN, SQUARES, SPAN]), 0)


@remembered
@triton.jit(do_not_specialize=["P", "L", "first", "spans"])
def _diagonals(
    shears_ptr, slash_ptr, P, L, first, spans,
    CAUSAL: tl.constexpr, DISTANCES: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores the means of weights along diagonals, `[B, Hq, L]`."""
    head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    distance = tl.program_id(0) * DISTANCES + tl.arange(0, DISTANCES)
    at = shears_ptr + head * spans * GROUPS * 2 * SPAN
    sums = _diagonal(at, first - distance, distance < L, spans, SPAN, GROUPS)
    if not CAUSAL:
        sums += _diagonal(at, first + distance, (distance < L) & (distance > 0), spans, SPAN, GROUPS)
    tl.store(slash_ptr + head * L + distance, sums / P, mask=distance < L)


@triton.jit
def _diagonal(shears_ptr, begin, there, spans, SPAN: tl.constexpr, GROUPS: tl.constexpr):
    """The sums of the diagonals that begin at the keys `begin`; keys before the first and after the last have no weight."""
    at = begin + GROUPS * SPAN  # not negative where a diagonal meets keys
    sums = tl.zeros_like(begin).to(tl.float32)
    for group in tl.static_range(GROUPS):
        for came in tl.static_range(2):
            span = at // SPAN - GROUPS + group + came
            met = there & (at >= 0) & (span >= 0) & (span < spans)
            part = (span.to(tl.int64) * GROUPS + group) * 2 + came
            sums += tl.load(shears_ptr + part * SPAN + at % SPAN, mask=met, other=0.0)
    return sums


_TILES = 8  # tiles of keys that a program takes one behind another
_JOINED = 8  # blocks, and bands, of a program of the second launch


def takes_sums(last_q: Tensor, run: int) -> bool:
    """The same of `last_query_sums`."""
    P, D, itemsize = last_q.shape[2], last_q.shape[3], last_q.element_size()
    if run > 128 or power_of_2(run) != run or run < P or D * itemsize > 512 or last_q.dtype not in FLOATS:
        return False
    hardware = hardware_of(last_q)
    options = options_of_sums(P, D, itemsize, run, hardware)
    return shared_memory(hardware, options, D, itemsize, sums=True) <= hardware.shared


@functools.lru_cache(maxsize=REMEMBERED)
def options_of_sums(P: int, head_dim: int, itemsize: int, run: int, hardware: Hardware) -> dict[str, int]:
    """The tile of all queries and a block of keys; fewer steps of loads are in flight where memory is small."""
    options = {
        "BLOCK_M": max(16, power_of_2(P)),
        "BLOCK_N": run,
        "num_warps": 8 if run > 64 else 4,
        "num_stages": 2,
    }
    if hardware.multiplies_from_shared and itemsize == 2 and head_dim <= 128 and run > 64:
        # Two programs share a multiprocessor: one computes exponentials while the other multiplies.
        options["maxnreg"] = 128
    if shared_memory(hardware, options, head_dim, itemsize, sums=True) > hardware.shared:
        options["num_stages"] = 1
    return options


def last_query_sums_triton(last_q: Tensor, k: Tensor, scale: float, run: int) -> tuple[Tensor, Tensor]:
    """Launch the kernels; arguments as in `last_query_sums`.

    A tile has the logits of all queries with one block of keys. Its distances lie in up to three bands. Row `r` and column
    `c` of the tile are in part 0 if `c >= r + offset`. They are in part 2 if `c < r + offset - RUN`, else in part 1. For
    each query a tile stores its maximum, and the sums of its weights relative to it in each part. A second launch joins
    them.
    """
    (B, Hq, P, D), (_, H, N, _) = last_q.shape, k.shape
    last_q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (last_q, k))
    first = N - P  # position of the first of the last queries
    band, offset = divmod(first + 1, run)
    parts = 3 if offset + P > run + 1 else 2
    tiles, rows = cdiv(N, run), max(16, power_of_2(P))
    programs = cdiv(tiles, _TILES)
    new: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    log_sum = torch.empty((B, Hq, programs, rows), **new)
    of_tiles = torch.empty((B, Hq, tiles, parts + 1, rows), **new)  # the maximum, then the sum of each part
    columns, bands = (torch.empty((B, Hq, tiles), **new) for _ in range(2))
    options = options_of_sums(P, D, k.element_size(), run, hardware_of(k))
    _sums_of_tiles[(programs, Hq, B)](
        last_q, k, log_sum, of_tiles, last_q.stride()[:3], k.stride()[:3],
        P, N, first, offset, tiles, Hq // H, scale * math.log2(math.e),
        D=D, BLOCK_D=max(16, power_of_2(D)), ROWS=rows, KEYS=run, TILES=_TILES, PARTS=parts,
        **{name: value for name, value in options.items() if not name.startswith("BLOCK")},
    )  # fmt: skip
    _joined[(cdiv(tiles, _JOINED), Hq, B)](
        log_sum, of_tiles, columns, bands, P, programs, tiles, band,
        ROWS=rows, PARTS=parts, JOINED=_JOINED, num_warps=4,
    )  # fmt: skip
    return columns, bands


@remembered
@triton.jit(do_not_specialize=["P", "N", "first", "offset", "tiles"])
def _sums_of_tiles(
    q_ptr, k_ptr, log_sum_ptr, of_tiles_ptr, q_strides, k_strides, P, N, first, offset, tiles, heads_per_key, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Stores `[B, Hq, tiles, 1 + PARTS, ROWS]`, and the base-2 logarithm of each query's sum, `[B, Hq, programs, ROWS]`."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    row = tl.arange(0, ROWS)
    q_tile = rows_of(q_ptr, q_strides, b, h, row, row < P, D, BLOCK_D, False)
    each = tl.arange(0, KEYS)
    limit = row + offset
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    begin = tl.program_id(0) * TILES
    for tile in range(begin, tl.minimum(begin + TILES, tiles)):
        # Not `_logits`, with which the compiler divides earlier, and makes other code for Hopper.
        key = tile * KEYS + each
        k_tile = rows_of(k_ptr, k_strides, b, h // heads_per_key, key, key < N, D, BLOCK_D, False)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        if tile * KEYS + KEYS > first + 1:  # some query does not see some key
            logits = tl.where(key[None, :] <= first + row[:, None], logits, float("-inf"))
        best = tl.max(logits, 1)
        weight = tl.exp2(logits - tl.where(best == float("-inf"), 0.0, best)[:, None])
        of_part = tl.where(each[None, :] >= limit[:, None], weight, 0.0)
        rest = weight - of_part  # either is the weight, and the other 0
        at = of_tiles_ptr + ((head * tiles + tile) * (PARTS + 1)) * ROWS + row
        tl.store(at, best)
        whole = tl.sum(of_part, 1)
        tl.store(at + ROWS, whole)
        if PARTS == 3:
            of_part = tl.where(each[None, :] < limit[:, None] - KEYS, weight, 0.0)
            rest = rest - of_part
            sums = tl.sum(of_part, 1)
            tl.store(at + 3 * ROWS, sums)
            whole += sums
        sums = tl.sum(rest, 1)
        tl.store(at + 2 * ROWS, sums)
        whole += sums
        new = tl.maximum(peak, best)
        origin = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(peak - origin) + whole * tl.exp2(best - origin)
        peak = new
    log_sum = peak + tl.log2(tl.where(total == 0.0, 1.0, total))
    tl.store(log_sum_ptr + (head * tl.num_programs(0) + tl.program_id(0)) * ROWS + row, log_sum)


@remembered
@triton.jit(do_not_specialize=["P", "programs", "tiles", "band"])
def _joined(
    log_sum_ptr, of_tiles_ptr, columns_ptr, bands_ptr, P, programs, tiles, band,
    ROWS: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Stores mean weights by block and by band of distances, `[B, Hq, tiles]`; part `i` is of band `band - 1 - t + i`."""
    head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    total = joined(log_sum_ptr + head * programs * ROWS, programs, ROWS)
    each = tl.program_id(0) * JOINED + tl.arange(0, JOINED)
    at = of_tiles_ptr + head * tiles * (PARTS + 1) * ROWS
    of_columns = tl.zeros([JOINED], tl.float32)
    of_bands = tl.zeros([JOINED], tl.float32)
    for i in tl.static_range(PARTS):
        of_columns += _part(at, each, total, P, tiles, i, ROWS, PARTS)
        of_bands += _part(at, band - 1 + i - each, total, P, tiles, i, ROWS, PARTS)
    tl.store(columns_ptr + head * tiles + each, of_columns / P, mask=each < tiles)
    tl.store(bands_ptr + head * tiles + each, of_bands / P, mask=each < tiles)


@triton.jit
def _part(of_tiles_ptr, tile, total, P, tiles, PART: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The sum over the queries of the weights in part `PART` of the tiles `tile`, `[len(tile)]`; 0 of tiles that are not there."""
    row = tl.arange(0, ROWS)[None, :]
    there = (tile >= 0) & (tile < tiles)
    mask = there[:, None] & (row < P)
    at = of_tiles_ptr + tile.to(tl.int64)[:, None] * (PARTS + 1) * ROWS + row
    best = tl.load(at, mask=mask, other=float("-inf"))
    sums = tl.load(at + (PART + 1) * ROWS, mask=mask, other=0.0)
    return tl.sum(sums * tl.exp2(best - total[None, :]), 1)
