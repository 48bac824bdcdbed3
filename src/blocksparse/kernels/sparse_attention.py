"""Softmax attention over lists of kept blocks: one portable Triton kernel.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j]

over the keys `j` of the blocks listed for the row of query `i`. Full blocks are walked first and never masked;
partial blocks are masked by original position. One program computes `BLOCK_M` queries of one head; longest
rows start first. fp32 accumulation, base-2 softmax; exact up to rounding.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


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
) -> tuple[Tensor, Tensor]:
    """Attention over the listed blocks: `out` `[B, Hq, M, Dv]` like v, `lse` `[B, Hq, M]` fp32.

    `block_m` and `block_n` are the kernel's tiles; they divide `q_block` and `k_block`. `tma` loads keys and
    values through tensor descriptors, see `can_use_tma`.
    """
    B, Hq, M, D = q.shape
    Hk, Dv = k.shape[1], v.shape[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = _outputs(q, v)
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (k, v))
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
def _(q, k, v, *_args):
    return _outputs(q, v)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    *_tiles: int,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch: one masked softmax over all pairs. O(M N) memory, for tests."""
    _, Hq, M, _ = q.shape
    k, v = (x.repeat_interleave(Hq // x.shape[1], 1) for x in (k, v))
    listed = [
        torch.zeros(index.shape, dtype=torch.bool, device=q.device).scatter_(
            -1, index.long(), torch.arange(index.shape[-1], device=q.device) < count.unsqueeze(-1)
        )
        for count, index in ((partial_count, partial_index), (full_count, full_index))
    ]
    pairs = (listed[0] | listed[1]).repeat_interleave(q_block, 2).repeat_interleave(k_block, 3)
    pairs = pairs.repeat_interleave(Hq // pairs.shape[1], 1)[:, :, q_lead : q_lead + M, : k.shape[2]]
    q_at = q_position[..., q_lead : q_lead + M, None]
    k_at = k_position[..., None, : k.shape[2]].repeat_interleave(max(1, q_at.shape[1] // k_position.shape[1]), 1)
    pairs = pairs & (k_at >= 0) & ((k_at <= q_at) if causal else True)
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~pairs, float("-inf"))
    weight = logits.softmax(-1).masked_fill(~pairs, 0.0)
    return (weight @ v).to(v.dtype), logits.logsumexp(-1).float()


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
def _softmax_update(scores, values, running_max, running_sum, accumulator, MASKED: tl.constexpr):
    """One step of the online softmax, base 2. Masked scores are -inf, and so may be a whole row."""
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    if MASKED:
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        origin = new_max
    weight = tl.exp2(scores - origin[:, None])
    rescale = tl.exp2(running_max - origin)
    running_sum = running_sum * rescale + tl.sum(weight, 1)
    accumulator = accumulator * rescale[:, None]
    accumulator = tl.dot(weight.to(values.dtype), values, accumulator, input_precision="ieee")
    return new_max, running_sum, accumulator


@triton.jit
def _kernel(
    q_ptr, k_source, v_source, out_ptr, lse_ptr,
    partial_count_ptr, partial_index_ptr, full_count_ptr, full_index_ptr, q_position_ptr, k_position_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    count_strides, index_strides, q_position_strides, k_position_strides,
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

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    count_at = b.to(tl.int64) * count_strides[0] + h_mask.to(tl.int64) * count_strides[1] + row
    index_at = b.to(tl.int64) * index_strides[0] + h_mask.to(tl.int64) * index_strides[1] + row.to(tl.int64) * cols

    full_tiles = tl.load(full_count_ptr + count_at) * K_SPLIT
    for i in range(full_tiles):
        block = tl.load(full_index_ptr + index_at + i // K_SPLIT)
        start = (block * K_SPLIT + i % K_SPLIT) * BLOCK_N
        k_tile = _block(k_source, k_strides, b, h_key, start, within, dims, N, D, BLOCK_D, False, TMA)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        v_tile = _block(v_source, v_strides, b, h_key, start, within, dims_v, N, DV, BLOCK_DV, False, TMA)
        running_max, running_sum, accumulator = _softmax_update(
            scores, v_tile, running_max, running_sum, accumulator, False
        )

    q_at = tl.load(
        q_position_ptr + b.to(tl.int64) * q_position_strides[0] + h.to(tl.int64) * q_position_strides[1] + places
    )
    k_position_at = b.to(tl.int64) * k_position_strides[0] + h_key.to(tl.int64) * k_position_strides[1]
    partial_tiles = tl.load(partial_count_ptr + count_at) * K_SPLIT
    for i in range(partial_tiles):
        block = tl.load(partial_index_ptr + index_at + i // K_SPLIT)
        start = (block * K_SPLIT + i % K_SPLIT) * BLOCK_N
        k_tile = _block(k_source, k_strides, b, h_key, start, within, dims, N, D, BLOCK_D, True, TMA)
        k_at = tl.load(k_position_ptr + k_position_at + start + within)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        allowed = (k_at >= 0)[None, :]
        if CAUSAL:
            allowed = allowed & (k_at[None, :] <= q_at[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
        v_tile = _block(v_source, v_strides, b, h_key, start, within, dims_v, N, DV, BLOCK_DV, True, TMA)
        running_max, running_sum, accumulator = _softmax_update(
            scores, v_tile, running_max, running_sum, accumulator, True
        )

    empty = running_sum == 0.0
    result = accumulator / tl.where(empty, 1.0, running_sum)[:, None]
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
