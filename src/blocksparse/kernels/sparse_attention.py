"""Softmax attention over lists of kept blocks: one portable Triton kernel.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j]

over the keys `j` of the blocks listed for the row of query `i`. Full blocks are walked first and never masked;
partial blocks are masked by original position. One program computes `BLOCK_M` queries of one head; longest
rows start first. fp32 accumulation, base-2 softmax; exact up to rounding.

Two approximations are off unless asked for, and then cost the exact kernel nothing: leaving out the products of
negligible weights (`pv_skip`), and 8-bit operands with scales (`q_scale`, `k_scale`, `v_scale`). Each query decides
for itself, so that no query's result depends on another query, or on a later key.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blocksparse.kernels.quantize import FP8_LIMIT

_FP8_LIMIT = tl.constexpr(FP8_LIMIT)


@torch.library.custom_op("blocksparse::sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor,  # [B, Hq, M, D], in slot order
    k: Tensor,  # [B, Hk, N, D], in slot order; Hk is Hkv or Hq
    v: Tensor,  # [B, Hk, N, Dv]
    partial_count: Tensor,  # [B|1, Hm, rows] int32; Hm divides Hq
    partial_index: Tensor,  # [B|1, Hm, rows, cols] int32
    full_count: Tensor,  # [B|1, Hm, rows] int32
    full_index: Tensor,  # [B|1, Hm, rows, cols] int32
    q_position: Tensor,  # [B|1, Hq|1, rows * q_block] int32, original positions by place, -1 where empty
    k_position: Tensor,  # [B|1, Hk|1, cols * k_block] int32
    q_block: int,
    k_block: int,
    q_lead: int,  # empty places before the first query
    causal: bool,
    scale: float,
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    tma: bool,
    pv_skip: Tensor | None = None,  # [Hq] fp32, negative
    q_scale: Tensor | None = None,  # [B, Hq, M] fp32; q and k are then int8
    k_scale: Tensor | None = None,  # [B, copies * Hk, N] fp32
    k_copy: Tensor | None = None,  # [B|1, Hq|1, rows] int32; k is then [B, copies * Hk, N, D]
    v_scale: Tensor | None = None,  # [B, Hk, N] fp32; v is then fp8 (e4m3)
    *,
    out_dtype: torch.dtype | None = None,  # that of v; to be given with v_scale
) -> tuple[Tensor, Tensor]:
    """Attention over the listed blocks: `out` `[B, Hq, M, Dv]` like v, `lse` `[B, Hq, M]` fp32.

    `block_m` and `block_n` are the kernel's tiles; they divide `q_block` and `k_block`. `tma` loads keys and
    values through tensor descriptors, see `can_use_tma`.

    `pv_skip` is a difference of logits. In full blocks, a query leaves out a tile of `block_n` keys whose best
    logit is more than `-pv_skip` below the best one that the query has met before. Where all queries of a tile
    leave it out, its product with the values is not computed. `lse` is that of what was not left out.

    With scales, token `i` is `x[i] * scale[i]`. Row `r` of the mask reads the keys of head `k_copy[r] * Hk + h`, so
    that rows may differ in how their keys were rounded. Weights that meet fp8 values are rounded to fp8 too.
    """
    B, Hq, M, D = q.shape
    Hk, Dv = v.shape[1], v.shape[-1]
    if v_scale is not None and out_dtype is None:
        raise ValueError("'out_dtype' must be given with 'v_scale'")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = _outputs(q, v, out_dtype)
    block_d, block_dv = (max(_least_depth(x), triton.next_power_of_2(x.shape[-1])) for x in (k, v))
    k_source, v_source = k, v
    if tma:
        k_source = TensorDescriptor.from_tensor(k, [1, 1, block_n, block_d])
        v_source = TensorDescriptor.from_tensor(v, [1, 1, block_n, block_dv])
    tiles = partial_count.shape[-1] * (q_block // block_m)
    with _device_of(q):
        _kernel[(tiles, Hq, B)](
            q, k_source, v_source, out, lse,
            partial_count, partial_index, full_count, full_index, q_position, k_position,
            q.stride()[:3], k.stride()[:3], v.stride()[:3], out.stride()[:3], lse.stride()[:2],
            _batch_head_strides(partial_count), _batch_head_strides(partial_index),
            _batch_head_strides(q_position), _batch_head_strides(k_position),
            pv_skip, q_scale, k_scale, k_copy, v_scale,
            *(None if x is None else _batch_head_strides(x) for x in (q_scale, k_scale, k_copy, v_scale)),
            M, k.shape[2], partial_index.shape[-1],
            Hq // Hk, Hq // partial_count.shape[1], q_lead, scale * math.log2(math.e),
            D=D, DV=Dv,
            BLOCK_D=block_d, BLOCK_DV=block_dv,
            BLOCK_M=block_m, BLOCK_N=block_n,
            Q_SPLIT=q_block // block_m, K_SPLIT=k_block // block_n,
            CAUSAL=causal, TMA=tma,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out, lse


@sparse_attention.register_fake
def _(q, k, v, *_args, out_dtype=None):
    return _outputs(q, v, out_dtype)


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype or v.dtype)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    partial_count: Tensor,
    partial_index: Tensor,
    full_count: Tensor,
    full_index: Tensor,
    q_position: Tensor,
    k_position: Tensor,
    q_block: int,
    k_block: int,
    q_lead: int,
    causal: bool,
    scale: float,
    block_m: int,
    block_n: int,
    num_warps: int = 0,
    num_stages: int = 0,
    tma: bool = False,
    pv_skip: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    k_copy: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch: one masked softmax over all pairs. O(M N) memory, for tests.

    It rounds where the kernel rounds, and computes in the precision of the inputs or of their scales.
    """
    del block_m, num_warps, num_stages, tma
    _, Hq, M, _ = q.shape
    N, Hk = k.shape[2], v.shape[1]
    out_dtype = out_dtype or v.dtype
    q, k = (x if factor is None else x * factor.unsqueeze(-1) for x, factor in ((q, q_scale), (k, k_scale)))
    v = v.repeat_interleave(Hq // Hk, 1)

    rank = _visiting_rank(partial_count, partial_index, full_count, full_index)  # [B|1, Hm, rows, cols]
    pairs = (rank < rank.shape[-1]).repeat_interleave(q_block, 2).repeat_interleave(k_block, 3)
    pairs = pairs.repeat_interleave(Hq // pairs.shape[1], 1)[:, :, q_lead : q_lead + M, :N]
    q_at = q_position[..., q_lead : q_lead + M, None]
    k_at = k_position[..., None, :N].repeat_interleave(max(1, q_at.shape[1] // k_position.shape[1]), 1)
    pairs = pairs & (k_at >= 0) & ((k_at <= q_at) if causal else True)

    per_copy = [q @ x.repeat_interleave(Hq // Hk, 1).transpose(-1, -2) * scale for x in k.split(Hk, 1)]
    logits = per_copy[0]
    if k_copy is not None:
        copy = k_copy.repeat_interleave(q_block, -1)[..., q_lead : q_lead + M, None]
        logits = torch.stack(per_copy).gather(0, copy.long().expand_as(logits).unsqueeze(0))[0]
    logits = logits.masked_fill(~pairs, float("-inf"))
    if pv_skip is None and v_scale is None:
        weight = logits.softmax(-1).masked_fill(~pairs, 0.0)
        return (weight @ v).to(out_dtype), logits.logsumexp(-1).float()

    # The tiles that each query meets, in order, and the largest logit it has met by then.
    split = k_block // block_n
    order = rank.argsort(-1).unsqueeze(-1) * split + torch.arange(split, device=q.device)
    order = order.flatten(-2).repeat_interleave(Hq // rank.shape[1], 1).repeat_interleave(q_block, 2)
    order = order[:, :, q_lead : q_lead + M].expand(*logits.shape[:3], -1)  # [B, Hq, M, tiles]

    def by_turn(x: Tensor) -> Tensor:
        """Largest entry of every tile, in the order of visits."""
        x = torch.nn.functional.pad(x, (0, order.shape[-1] * block_n - N), value=float("-inf"))
        return x.unflatten(-1, (-1, block_n)).amax(-1).gather(-1, order)

    def by_key(x: Tensor) -> Tensor:
        """What holds at the turn of a tile, for each of its keys."""
        return torch.zeros_like(x).scatter_(-1, order, x).repeat_interleave(block_n, -1)[..., :N]

    best = by_turn(logits)
    met = best.cummax(-1).values
    if pv_skip is not None:
        before = torch.nn.functional.pad(met[..., :-1], (1, 0), value=float("-inf"))
        full = torch.arange(order.shape[-1], device=q.device) < split * full_count.unsqueeze(-1)
        full = full.repeat_interleave(Hq // full.shape[1], 1).repeat_interleave(q_block, 2)
        left_out = (best - before < pv_skip.view(-1, 1, 1)) & full[:, :, q_lead : q_lead + M]
        logits = logits.masked_fill(by_key(left_out), float("-inf"))
    origin = met[..., -1:].masked_fill(met[..., -1:] == float("-inf"), 0.0)
    weight = (logits - origin).exp()
    total = weight.sum(-1, keepdim=True)
    if v_scale is not None:
        # Rounded at the turn of its tile, relative to the maximum and to the largest scale met by then.
        factor = v_scale.repeat_interleave(Hq // Hk, 1).unsqueeze(-2).expand_as(logits)
        largest = by_turn(factor.masked_fill(logits == float("-inf"), 0.0)).clamp_min(0).cummax(-1).values
        unit = by_key(largest) / FP8_LIMIT
        turn = (logits - by_key(met)).nan_to_num(nan=float("-inf"), neginf=float("-inf")).exp()
        rounded = (turn * factor / unit.masked_fill(unit == 0, 1.0)).to(v.dtype).to(logits.dtype)
        weight = rounded * unit * (by_key(met) - origin).exp()
        v = v.to(logits.dtype)
    out = (weight.to(v.dtype) @ v / total.masked_fill(total == 0, 1.0)).to(out_dtype)
    return out, (total.log() + origin).squeeze(-1).float()


def _visiting_rank(partial_count: Tensor, partial_index: Tensor, full_count: Tensor, full_index: Tensor) -> Tensor:
    """The turn at which each row visits each block, full ones first; `cols` where it never does."""
    cols = full_index.shape[-1]
    turn = torch.arange(cols, device=full_index.device)

    def rank(count: Tensor, index: Tensor, before: Tensor) -> Tensor:
        turns = (turn + before.unsqueeze(-1)).masked_fill(turn >= count.unsqueeze(-1), cols)
        return torch.zeros_like(turns).scatter_(-1, index.long(), turns)

    full = rank(full_count, full_index, torch.zeros_like(full_count))
    return full.minimum(rank(partial_count, partial_index, full_count))


def _least_depth(x: Tensor) -> int:
    """Matrix units multiply tiles at least this deep."""
    return 32 if x.element_size() == 1 else 16


@frozen
class TileConfig:
    """How one kernel is launched: tiles of `block_m` x `block_n`, warps, and software-pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = True  # where the hardware and the tensors allow it

    def fits(self, q_block: int, k_block: int) -> bool:
        """Tiles are powers of two, at least 16, that divide the mask's blocks."""
        return all(
            tile >= 16 and tile & (tile - 1) == 0 and block % tile == 0
            for tile, block in ((self.block_m, q_block), (self.block_n, k_block))
        )


def default_config(q_block: int, k_block: int, head_dim: int, itemsize: int) -> TileConfig:
    """Tiles that divide the blocks and fit on chip, as measured fastest on Hopper (docs/performance.md)."""
    row_bytes = head_dim * itemsize
    large = itemsize <= 2 and 128 < row_bytes <= 256
    limit = 128 if large else 64 if row_bytes <= 512 else 32
    block_m, block_n = (min(block & -block, limit) for block in (q_block, k_block))
    stages = 4 if itemsize <= 2 and row_bytes <= 128 else 2
    return TileConfig(block_m, block_n, num_warps=8 if block_m == 128 else 4, num_stages=stages)


def can_use_tma(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can load these: Hopper or later, 16-byte aligned rows, last axis contiguous."""
    return all(
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def runs_interpreted() -> bool:
    """Whether Triton's interpreter, not its compiler, runs the kernel (TRITON_INTERPRET at import time)."""
    return not isinstance(_kernel, triton.JITFunction)


def _device_of(x: Tensor) -> torch.cuda.device | torch.device:
    """Launch on the tensor's own device, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.device(x.device)


def _batch_head_strides(x: Tensor) -> tuple[int, int]:
    """Strides of the first two axes, 0 where an axis is broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))


@triton.jit
def _tile(ptr, strides, b, h, offsets, dims, limit, D: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr):
    """Rows `offsets` of `[B, H, N, D]` at `(b, h)`, zeros outside `[0, limit)` and past `D`."""
    at = ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    at = at + offsets.to(tl.int64)[:, None] * strides[2] + dims[None, :]
    if RAGGED:
        inside = (offsets >= 0) & (offsets < limit)
        if BLOCK_D != D:
            return tl.load(at, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
        return tl.load(at, mask=inside[:, None], other=0.0)
    if BLOCK_D != D:
        return tl.load(at, mask=(dims < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _block(
    source, strides, b, h, start, within, dims, limit,
    D: tl.constexpr, BLOCK_D: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys or values `start + within`; `source` is a pointer, or a descriptor that fills with zeros itself."""
    if TMA:
        tile = source.load([b, h, start, 0]).reshape(within.shape[0], BLOCK_D)
    else:
        tile = _tile(source, strides, b, h, start + within, dims, limit, D, BLOCK_D, RAGGED)
    return tile


@triton.jit
def _factors(ptr, at, inside, RAGGED: tl.constexpr):
    """Scales of a tile's tokens, 0 outside; None where there are none."""
    if ptr is None:
        factors = None
    elif RAGGED:
        factors = tl.load(ptr + at, mask=inside, other=0.0)
    else:
        factors = tl.load(ptr + at)
    return factors


@triton.jit
def _scores(q_tile, k_tile, q_factor, k_factor, scale_log2):
    """Logits in base 2. With scales the products are of integers; `q_factor` holds `scale_log2` as well."""
    if k_factor is None:
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
    else:
        scores = tl.dot(q_tile, tl.trans(k_tile)).to(tl.float32) * q_factor[:, None] * k_factor[None, :]
    return scores


@triton.jit
def _add_values(accumulator, unit, rescale, weight, scores, values, v_factor, left_out, MASKED: tl.constexpr):
    """Rescale what is accumulated, and add values by weight. With scales, in units of the largest scale met."""
    if v_factor is None:
        accumulator = accumulator * rescale[:, None]
        accumulator = tl.dot(weight.to(values.dtype), values, accumulator, input_precision="ieee")
        new_unit = unit
    else:
        if MASKED:
            largest = tl.max(tl.where(scores > float("-inf"), v_factor[None, :], 0.0), 1)
        else:
            largest = tl.max(v_factor, 0)
        if left_out is not None:
            largest = tl.where(left_out, 0.0, largest)
        new_unit = tl.maximum(unit, largest)
        inverse = 1.0 / tl.where(new_unit == 0.0, 1.0, new_unit)
        share = v_factor[None, :] * inverse[:, None]
        if MASKED:
            share = tl.minimum(share, 1.0)  # where a key is masked it may overflow, and its weight is 0
        weight = weight * share * _FP8_LIMIT
        accumulator = accumulator * (rescale * (unit * inverse))[:, None]
        # Hopper adds fp8 products in some 14 bits: one tile so, and tiles to each other in fp32.
        accumulator = tl.dot(weight.to(values.dtype), values, accumulator, max_num_imprecise_acc=values.shape[0])
    return accumulator, new_unit


@triton.jit
def _softmax_update(
    scores, values, v_factor, running_max, running_sum, unit, accumulator, skip_log2, live, MASKED: tl.constexpr
):  # fmt: skip
    """One step of the online softmax, base 2. Masked scores are -inf, and so may be a whole row."""
    best = tl.max(scores, 1)
    new_max = tl.maximum(running_max, best)
    if MASKED:
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        origin = new_max
    weight_origin = origin
    left_out = None
    needed = True
    if skip_log2 is not None:
        left_out = best - running_max < skip_log2  # never the first tile: inf, or NaN
        weight_origin = tl.where(left_out, float("inf"), origin)
        kept = (live & ~left_out).to(tl.int32)
        needed = tl.max(tl.max(kept[None, :], 1), 0) > 0  # Triton 3.7 fails on sm_100 if it stays one-dimensional
    weight = tl.exp2(scores - weight_origin[:, None])
    rescale = tl.exp2(running_max - origin)
    running_sum = running_sum * rescale + tl.sum(weight, 1)
    if needed:  # else no maximum rose: nothing to rescale
        accumulator, unit = _add_values(
            accumulator, unit, rescale, weight, scores, values, v_factor, left_out, MASKED
        )
    return new_max, running_sum, unit, accumulator


@triton.jit
def _kernel(
    q_ptr, k_source, v_source, out_ptr, lse_ptr,
    partial_count_ptr, partial_index_ptr, full_count_ptr, full_index_ptr, q_position_ptr, k_position_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    count_strides, index_strides, q_position_strides, k_position_strides,
    pv_skip_ptr, q_scale_ptr, k_scale_ptr, k_copy_ptr, v_scale_ptr,  # None: compiled away
    q_scale_strides, k_scale_strides, k_copy_strides, v_scale_strides,
    M, N, cols,
    heads_per_key, heads_per_mask, q_lead, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, Q_SPLIT: tl.constexpr, K_SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows are the longest: start them first
    h = tl.program_id(1)
    b = tl.program_id(2)
    row = tile // Q_SPLIT
    h_key = h // heads_per_key
    h_mask = h // heads_per_mask

    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    places = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = places - q_lead
    within = tl.arange(0, BLOCK_N)
    q_tile = _tile(q_ptr, q_strides, b, h, queries, dims, M, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]

    h_copy = h_key
    if k_copy_ptr is not None:
        k_copy_at = b.to(tl.int64) * k_copy_strides[0] + h.to(tl.int64) * k_copy_strides[1]
        h_copy = h_key + tl.load(k_copy_ptr + k_copy_at + row) * (tl.num_programs(1) // heads_per_key)
    q_factor = None
    k_scale_at = 0
    if q_scale_ptr is not None:
        q_scale_at = b.to(tl.int64) * q_scale_strides[0] + h.to(tl.int64) * q_scale_strides[1]
        asked = (queries >= 0) & (queries < M)
        q_factor = tl.load(q_scale_ptr + q_scale_at + queries, mask=asked, other=0.0) * scale_log2
        k_scale_at = b.to(tl.int64) * k_scale_strides[0] + h_copy.to(tl.int64) * k_scale_strides[1]
    v_scale_at = 0
    if v_scale_ptr is not None:
        v_scale_at = b.to(tl.int64) * v_scale_strides[0] + h_key.to(tl.int64) * v_scale_strides[1]
    skip_log2 = None
    live = None
    if pv_skip_ptr is not None:
        skip_log2 = tl.load(pv_skip_ptr + h) * 1.4426950408889634  # log2(e)
        live = (queries >= 0) & (queries < M)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    unit = tl.zeros([BLOCK_M], tl.float32)  # largest scale of a value so far
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    count_at = b.to(tl.int64) * count_strides[0] + h_mask.to(tl.int64) * count_strides[1] + row
    index_at = b.to(tl.int64) * index_strides[0] + h_mask.to(tl.int64) * index_strides[1] + row.to(tl.int64) * cols

    full_tiles = tl.load(full_count_ptr + count_at) * K_SPLIT
    for i in range(full_tiles):
        block = tl.load(full_index_ptr + index_at + i // K_SPLIT)
        start = (block * K_SPLIT + i % K_SPLIT) * BLOCK_N
        k_tile = _block(k_source, k_strides, b, h_copy, start, within, dims, N, D, BLOCK_D, False, TMA)
        k_factor = _factors(k_scale_ptr, k_scale_at + start + within, within >= 0, False)
        scores = _scores(q_tile, k_tile, q_factor, k_factor, scale_log2)
        v_tile = _block(v_source, v_strides, b, h_key, start, within, dims_v, N, DV, BLOCK_DV, False, TMA)
        v_factor = _factors(v_scale_ptr, v_scale_at + start + within, within >= 0, False)
        running_max, running_sum, unit, accumulator = _softmax_update(
            scores, v_tile, v_factor, running_max, running_sum, unit, accumulator, skip_log2, live, False
        )

    q_at = tl.load(
        q_position_ptr + b.to(tl.int64) * q_position_strides[0] + h.to(tl.int64) * q_position_strides[1] + places
    )
    k_position_at = b.to(tl.int64) * k_position_strides[0] + h_key.to(tl.int64) * k_position_strides[1]
    partial_tiles = tl.load(partial_count_ptr + count_at) * K_SPLIT
    for i in range(partial_tiles):
        block = tl.load(partial_index_ptr + index_at + i // K_SPLIT)
        start = (block * K_SPLIT + i % K_SPLIT) * BLOCK_N
        k_tile = _block(k_source, k_strides, b, h_copy, start, within, dims, N, D, BLOCK_D, True, TMA)
        k_at = tl.load(k_position_ptr + k_position_at + start + within)
        inside = start + within < N
        k_factor = _factors(k_scale_ptr, k_scale_at + start + within, inside, True)
        scores = _scores(q_tile, k_tile, q_factor, k_factor, scale_log2)
        allowed = (k_at >= 0)[None, :]
        if CAUSAL:
            allowed = allowed & (k_at[None, :] <= q_at[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
        v_tile = _block(v_source, v_strides, b, h_key, start, within, dims_v, N, DV, BLOCK_DV, True, TMA)
        v_factor = _factors(v_scale_ptr, v_scale_at + start + within, inside, True)
        # Partial blocks hold a query's own neighbours: none is left out.
        running_max, running_sum, unit, accumulator = _softmax_update(
            scores, v_tile, v_factor, running_max, running_sum, unit, accumulator, None, live, True
        )

    empty = running_sum == 0.0
    result = accumulator / tl.where(empty, 1.0, running_sum)[:, None]
    if v_scale_ptr is not None:
        result = result * (unit / _FP8_LIMIT)[:, None]
    out_at = out_ptr + b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
    out_at = out_at + queries.to(tl.int64)[:, None] * out_strides[2] + dims_v[None, :]
    stored = (queries >= 0) & (queries < M)
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=stored[:, None] & (dims_v < DV)[None, :])
    lse_at = lse_ptr + b.to(tl.int64) * lse_strides[0] + h.to(tl.int64) * lse_strides[1] + queries
    # 0.6931... is ln 2: scores are in base 2.
    log_sum = tl.where(
        empty, float("-inf"), (running_max + tl.log2(tl.where(empty, 1.0, running_sum))) * 0.6931471805599453
    )
    tl.store(lse_at, log_sum, mask=stored)
