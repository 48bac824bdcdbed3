"""The Triton kernels of `order/segments.py`.

`key_importance`: a program holds a tile of queries on chip and walks a share of the keys. The tiles of the query heads that share a KV
head run side by side, so that a key comes from memory once in each pass. The softmax is in base 2, and exact up to rounding.

`segment_sort` sorts integers with a value in the upper bits and the value's index in the segment in the lower ones. They are int64 with
32 bits of each, or for a coarse sort int32 with `log2(S)` bits of index. So no two are equal, and equal values keep their
order.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blocksparse.kernels.common.device_functions import rows_of
from blocksparse.kernels.common.hardware import Hardware, fitted, fp32_products, hardware_of, needed
from blocksparse.kernels.common.sizes import REMEMBERED, cdiv, copies_in_bulk, empty_together, power_of_2
from blocksparse.launch.launches import remembered

_SPLITS = 32  # shares that the keys are divided into, at most
_PIECES = 8  # pieces of 128 keys in a share, at most while there are fewer than `_SPLITS` shares
_TMA_FROM = 16384  # keys from which on a descriptor is made, which takes the host some microseconds
_OF_PROMPT = ["N", "share", "splits", "seen", "plain"]
_LEAST = tl.constexpr(-3.0e38)  # below every product; finite, so that differences of peaks are numbers


def key_importance_triton(
    q: Tensor, k: Tensor, last_q: int, seen: int, causal: bool, scale: float, per_query_head: bool
) -> Tensor:
    """Launch the kernels; arguments as in `key_importance`."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (_, _, M, _), (_, Hkv, N, _) = q.shape, k.shape
    P, seen = min(last_q, M), min(seen, N)
    # A negative scale is that of negated queries: the largest product then stays the largest logit.
    q = q.narrow(2, M - P, P)
    q = q if scale >= 0 else -q
    plan = _plan(q.shape, k.shape, q.element_size(), per_query_head, hardware_of(q))
    peak, total, parts = empty_together(torch.float32, q.device, *plan.outputs)
    # How many of the first keys every query sees: those need no mask.
    plain = min(seen, N - P + 1) if causal else seen
    scale_log2 = abs(scale) * math.log2(math.e)
    sizes = q.stride()[:3], k.stride()[:3], N, P, plan.rows, plan.share, plan.splits, seen, plain, Hkv, scale_log2
    tma = plan.tma and copies_in_bulk(k)
    _sums[plan.grid_of_sums](
        q, _source(k, plan.sums, tma), peak, total, *sizes, TMA=tma, CAUSAL=causal, **plan.sums
    )  # fmt: skip
    _weights[plan.grid_of_weights](
        q, _source(k, plan.weights, tma), peak, total, parts, *sizes, plan.share_of_a_vote, plan.tiles,
        SPLITS=_SPLITS, TMA=tma, CAUSAL=causal, **plan.weights,
    )  # fmt: skip
    return parts


class _Plan(NamedTuple):
    """What sizes alone decide of both launches."""

    outputs: tuple[tuple[int, ...], ...]  # the shapes of the peaks, of the sums of weights and of the parts
    grid_of_sums: tuple[int, int, int]
    grid_of_weights: tuple[int, int, int]
    rows: int  # queries of a KV head
    share: int  # keys of a program
    splits: int  # shares
    tiles: int  # tiles of queries in the second pass, of each query head
    share_of_a_vote: float  # what a query counts in a mean
    tma: bool  # whether there are keys enough for a descriptor
    sums: dict[str, Any]  # constants and options of the first pass
    weights: dict[str, Any]


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(
    of_queries: tuple[int, ...], of_keys: tuple[int, ...], itemsize: int, per_query_head: bool, hardware: Hardware
) -> _Plan:
    """The plan for the shapes of the last queries `[B, Hq, P, D]` and of the keys `[B, Hkv, N, D]`."""
    (B, Hq, P, D), (_, Hkv, N, _) = of_queries, of_keys
    G = Hq // Hkv
    sums, weights = _options(D, itemsize, P, G, hardware)
    constants = {"D": D, "BLOCK_D": max(16, power_of_2(D)), "PRECISION": fp32_products()}
    row_tiles, tiles = cdiv(G * P, sums["BLOCK_M"]), cdiv(P, weights["BLOCK_M"])
    pieces = cdiv(N, 128)
    share = cdiv(pieces, min(_SPLITS, cdiv(pieces, _PIECES))) * 128
    splits = cdiv(N, share)
    of_sums = B * Hkv, splits, G * P
    of_parts = B, Hq if per_query_head else Hkv, tiles if per_query_head else G * tiles, N
    return _Plan(
        outputs=(of_sums, of_sums, of_parts),
        grid_of_sums=(row_tiles, splits, B * Hkv),
        grid_of_weights=(G * tiles, splits, B * Hkv),
        rows=G * P,
        share=share,
        splits=splits,
        tiles=tiles,
        share_of_a_vote=1 / (P if per_query_head else P * G),
        tma=hardware.multiplies_from_shared and N >= _TMA_FROM,
        sums={**constants, **sums},
        weights={**constants, **weights},
    )


def _options(D: int, itemsize: int, P: int, G: int, hardware: Hardware) -> tuple[dict[str, int], dict[str, int]]:
    """Options of both kernels, whose tiles of queries have at most as many rows as there are queries."""
    sums, weights = (f(D, itemsize, hardware) for f in (options_of_sums, options_of_weights))
    for options, rows in ((sums, G * P), (weights, P)):
        options["BLOCK_M"] = min(max(power_of_2(rows), 16), options["BLOCK_M"])
    return sums, weights


def options_of_sums(head_dim: int, itemsize: int, hardware: Hardware) -> dict[str, int]:
    """Tiles of queries and of keys that fit on chip together."""
    row_bytes = max(16, power_of_2(head_dim)) * itemsize
    if hardware.multiplies_from_shared and row_bytes <= 256:
        # Two programs share a multiprocessor: one computes exponentials while the other multiplies.
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2, "maxnreg": 128}
    return _small_options(row_bytes, itemsize, hardware)


def options_of_weights(head_dim: int, itemsize: int, hardware: Hardware) -> dict[str, int]:
    """As `options_of_sums`, for the second pass."""
    row_bytes = max(16, power_of_2(head_dim)) * itemsize
    if hardware.multiplies_from_shared and row_bytes <= 256:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return _small_options(row_bytes, itemsize, hardware)


def _small_options(row_bytes: int, itemsize: int, hardware: Hardware) -> dict[str, int]:
    if hardware.multiplies_from_shared:
        return {"BLOCK_M": 128 if row_bytes <= 512 else 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    if row_bytes <= 256:
        options = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2 if row_bytes <= 128 else 1}
    else:
        block_m, block_n = (64, 32) if row_bytes <= 512 else (32, 16)
        options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 1}

    return fitted(options, lambda x: shared_memory(hardware, x, row_bytes, itemsize), hardware)


def shared_memory(hardware: Hardware, options: dict[str, int], row_bytes: int, itemsize: int) -> int:
    """Bytes of shared memory of a program, at most."""
    M, N, single = options["BLOCK_M"], options["BLOCK_N"], itemsize == 4
    held, loaded = M * row_bytes, (N * row_bytes,)
    bytes_ = needed(
        hardware, held=held, loaded=loaded, stages=options["num_stages"], between=M * N, single=single, second=True
    )
    # Where products read from shared memory, the parts of fp32 numbers lie there too.
    return bytes_ + (N * row_bytes - 2 * M * N if single and hardware.multiplies_from_shared else 0)


def _source(k: Tensor, options: dict[str, Any], tma: bool) -> Any:
    if not tma:
        return k
    return TensorDescriptor.from_tensor(k, [1, 1, options["BLOCK_N"], options["BLOCK_D"]])


@triton.jit
def _keys(
    k_source, k_strides, b, h, start, N,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The tile of keys from `start` on. `k_source` is a pointer, or with `TMA` a descriptor, which fills in zeros itself."""
    if TMA:
        k_tile = k_source.load([b, h, start, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        key = start + tl.arange(0, BLOCK_N)
        k_tile = rows_of(k_source, k_strides, b, h, key, key < N, D, BLOCK_D, not MASKED)
    return k_tile


@triton.jit
def _last_key(query, N, P, seen, CAUSAL: tl.constexpr):
    """The last key that each query sees."""
    last = tl.zeros_like(query) + seen - 1
    if CAUSAL:
        last = tl.minimum(last, N - P + query)
    return last


@triton.jit
def _share(share, plain, BLOCK_N: tl.constexpr):
    """Where this program's share of the keys begins, and the start of its first tile of keys that needs a mask."""
    begin = tl.program_id(1) * share
    return begin, begin + tl.maximum(tl.minimum(begin + share, plain) - begin, 0) // BLOCK_N * BLOCK_N


@triton.jit
def _more(
    peak, total, q_tile, k_source, k_strides, b, h, start, last, N, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest product of each query and the sum of its weights, with one more tile of keys."""
    k_tile = _keys(k_source, k_strides, b, h, start, N, D, BLOCK_D, BLOCK_N, MASKED, TMA)
    product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if MASKED:
        sees = (start + tl.arange(0, BLOCK_N))[None, :] <= last[:, None]
        new = tl.maximum(peak, tl.max(tl.where(sees, product, _LEAST), 1))
        weight = tl.exp2(tl.where(sees, product * scale - (new * scale)[:, None], float("-inf")))
    else:
        new = tl.maximum(peak, tl.max(product, 1))
        weight = tl.exp2(product * scale - (new * scale)[:, None])
    return new, total * tl.exp2((peak - new) * scale) + tl.sum(weight, 1)


@remembered
@triton.jit(do_not_specialize=_OF_PROMPT)
def _sums(
    q_ptr, k_source, peak_ptr, total_ptr,
    q_strides, k_strides,
    N, P, rows, share, splits, seen, plain, kv_heads, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the largest product and the sum of weights over each share of the keys, for the `rows` queries of a KV head."""
    b = tl.program_id(2) // kv_heads
    h = tl.program_id(2) % kv_heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    last = _last_key(row % P, N, P, seen, CAUSAL)
    q_tile = rows_of(q_ptr, q_strides, b, h * (rows // P) + row // P, row % P, row < rows, D, BLOCK_D, False)

    begin, masked_from = _share(share, plain, BLOCK_N)
    peak = tl.full([BLOCK_M], _LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, masked_from, BLOCK_N):
        peak, total = _more(
            peak, total, q_tile, k_source, k_strides, b, h, start, last, N, scale,
            D, BLOCK_D, BLOCK_N, False, TMA, PRECISION,
        )  # fmt: skip
    for start in range(masked_from, tl.minimum(begin + share, seen), BLOCK_N):
        peak, total = _more(
            peak, total, q_tile, k_source, k_strides, b, h, start, last, N, scale,
            D, BLOCK_D, BLOCK_N, True, TMA, PRECISION,
        )  # fmt: skip
    at = (tl.program_id(2) * splits + tl.program_id(1)).to(tl.int64) * rows + row
    tl.store(peak_ptr + at, peak, mask=row < rows)
    tl.store(total_ptr + at, total, mask=row < rows)


@triton.jit
def _weigh(
    out_at, q_tile, k_source, k_strides, b, h, start, last, log_sum, N, scale, mean,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds up the weights of each key of a tile of keys over the program's queries, and stores the sums."""
    k_tile = _keys(k_source, k_strides, b, h, start, N, D, BLOCK_D, BLOCK_N, MASKED, TMA)
    product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
    exponent = product * scale - log_sum[None, :]
    key = start + tl.arange(0, BLOCK_N)
    if MASKED:
        exponent = tl.where(key[:, None] <= last[None, :], exponent, float("-inf"))
        tl.store(out_at + key, tl.sum(tl.exp2(exponent), 1) * mean, mask=key < N)
    else:
        tl.store(out_at + key, tl.sum(tl.exp2(exponent), 1) * mean)


@remembered
@triton.jit(do_not_specialize=[*_OF_PROMPT, "tiles"])
def _weights(
    q_ptr, k_source, peak_ptr, total_ptr, out_ptr,
    q_strides, k_strides,
    N, P, rows, share, splits, seen, plain, kv_heads, scale, mean, tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, SPLITS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores normalised weights of every key, summed over one of the `tiles` tiles of a query head's queries."""
    b = tl.program_id(2) // kv_heads
    h = tl.program_id(2) % kv_heads
    head = tl.program_id(0) // tiles  # the query head's number among those that share the KV head
    query = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    last = _last_key(query, N, P, seen, CAUSAL)

    split = tl.arange(0, SPLITS)
    at = (tl.program_id(2) * splits + split).to(tl.int64)[:, None] * rows + (head * P + query)[None, :]
    there = (split < splits)[:, None] & (query < P)[None, :]
    peaks = tl.load(peak_ptr + at, mask=there, other=_LEAST)
    totals = tl.load(total_ptr + at, mask=there, other=0.0)
    peak = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp2((peaks - peak[None, :]) * scale), 0)
    log_sum = peak * scale + tl.log2(tl.where(query < P, total, 1.0))
    log_sum = tl.where(query < P, log_sum, float("inf"))  # where there is no query, weights come to 0
    q_tile = rows_of(q_ptr, q_strides, b, h * (rows // P) + head, query, query < P, D, BLOCK_D, False)

    begin, masked_from = _share(share, plain, BLOCK_N)
    out_at = out_ptr + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * N
    for start in range(begin, masked_from, BLOCK_N):
        _weigh(
            out_at, q_tile, k_source, k_strides, b, h, start, last, log_sum, N, scale, mean,
            D, BLOCK_D, BLOCK_N, False, TMA, PRECISION,
        )  # fmt: skip
    for start in range(masked_from, tl.minimum(begin + share, N), BLOCK_N):
        _weigh(
            out_at, q_tile, k_source, k_strides, b, h, start, last, log_sum, N, scale, mean,
            D, BLOCK_D, BLOCK_N, True, TMA, PRECISION,
        )  # fmt: skip


_TILE = 256  # tokens per program, if segments are shorter than that


def segment_sort_triton(values: Tensor, S: int, coarse: bool = False) -> Tensor:
    """Launch the kernel; arguments as in `segment_sort`, `S` a power of two."""
    B, H, *parts, N = values.shape
    values = values.contiguous()
    index = torch.empty((B, H, N), dtype=torch.int32, device=values.device)
    rows = max(_TILE // S, 1)
    _segment_sort_kernel[(cdiv(N, rows * S), H, B)](
        values, index,
        N, N // S * S,
        S=S, ROWS=rows, COARSE=coarse, PARTS=parts[0] if parts else 1,
        num_warps=min(max(rows * S // 256, 1), 8),
    )  # fmt: skip
    return index


@triton.jit
def _every_fourth(values_at, N, there, FIRST: tl.constexpr, PARTS: tl.constexpr):
    """The sum of every fourth part from `FIRST` on: `torch.sum` adds on GPUs by fours, and so gives the same bits."""
    value = tl.load(values_at + FIRST * N, mask=there, other=0.0)
    for part in tl.static_range(FIRST + 4, PARTS, 4):
        value += tl.load(values_at + part * N, mask=there, other=0.0)
    return value


@remembered
@triton.jit(do_not_specialize=["N", "whole"])
def _segment_sort_kernel(
    values_ptr, index_ptr, N, whole, S: tl.constexpr, ROWS: tl.constexpr, COARSE: tl.constexpr, PARTS: tl.constexpr
):
    start = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * N
    first = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * S
    place = tl.arange(0, S)[None, :]
    token = first + place
    values_at = values_ptr + start * PARTS + token
    value = _every_fourth(values_at, N, token < whole, 0, PARTS)
    for part in tl.static_range(1, min(PARTS, 4)):
        value += _every_fourth(values_at, N, token < whole, part, PARTS)

    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the values, as `whole_numbers`
    bits = tl.where(value != value, 0x7FFFFFFF, bits)
    falling = tl.where(token < whole, ~bits, 0)  # the tail's tokens are all equal, and so stay in place
    if COARSE:
        order = tl.sort((falling & -S) | place, dim=1) & (S - 1)
    else:
        ranked = tl.sort((falling.to(tl.int64) << 32) | place.to(tl.int64), dim=1)
        order = (ranked & 0xFFFFFFFF).to(tl.int32)
    tl.store(index_ptr + start + token, first + order, mask=token < N)
