"""Softmax attention over lists of kept blocks.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j]

over the keys `j` of the blocks listed for the row of query `i`. A row's full blocks are never masked; its partial
blocks are masked by original position. The softmax is in base 2, sums are in fp32, and the result is exact up to rounding.

The op has two kernels: the portable one in `sparse_attention_triton.py`, and the one for Hopper in
`sparse_attention_hopper.py`. The executor says which of them runs, and with which tiles.

Two approximations are off unless asked for, and while they are off they cost the exact kernel nothing: leaving out the
products of negligible weights (`pv_skip`), and 8-bit operands with scales (`q_scale`, `k_scale`, `v_scale`). Each query
decides for itself, so that no query's result depends on another query, or on a later key. Only the portable kernel has
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from blocksparse.kernels.common.hardware import device_of
from blocksparse.kernels.common.memory import empty_as
from blocksparse.kernels.moving.gather_rows import gather_rows, gather_two
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.rounding.quantize import FP8_LIMIT

_WORKSPACE = 2**28  # bytes of keys and values moved at a time


@torch.library.custom_op("blocksparse::sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor,  # [B, Hq, M, D], in slot order
    k: Tensor,  # [B, Hk, N, D], in slot order unless `k_slots` is given; Hk is Hkv or Hq
    v: Tensor,  # [B, Hk, N, Dv]
    full_count: Tensor,  # [B|1, Hm, rows] int32; Hm divides Hq
    partial_count: Tensor,  # [B|1, Hm, rows] int32
    index: Tensor,  # [B|1, Hm, rows, cols] int16 or int32, a row's full blocks, then its partial blocks
    q_position: Tensor,  # [B|1, Hq|1, rows * q_block] int32, original positions by place, -1 where empty
    k_position: Tensor,  # [B|1, Hk|1, cols * k_block] int32
    q_block: int,
    k_block: int,
    q_lead: int,  # empty places before the first query
    causal: bool,
    scale: float,
    kernel: str,  # "triton" or "hopper"
    tiles: list[int],  # as `TritonTiles` or `HopperTiles` list them
    q_in_order: bool = False,  # queries stand in original order, so that positions need not be read
    k_in_order: bool = False,  # likewise keys
    pv_skip: Tensor | None = None,  # [Hq] fp32, negative
    q_scale: Tensor | None = None,  # [B, Hq, M] fp32; q and k are then int8
    k_scale: Tensor | None = None,  # [B, copies * Hk, N] fp32
    k_copy: Tensor | None = None,  # [B|1, Hq|1, rows] int32; k is then [B, copies * Hk, N, D]
    v_scale: Tensor | None = None,  # [B, Hk, N] fp32; v is then fp8 (e4m3)
    k_slots: Tensor | None = None,  # [B, H, N] int32, the key in each slot; k and v are then [B, Hkv, N, D]
    *,
    out_dtype: torch.dtype | None = None,  # by default that of v; it must be given with v_scale
) -> tuple[Tensor, Tensor]:
    """Attention over the listed blocks: `out` `[B, Hq, M, Dv]` of the dtype of v, and `lse` `[B, Hq, M]` fp32.

    `out` lies in memory as `empty_as` has it.

    `pv_skip` is a difference of logits. In full blocks, a query leaves out a tile of keys whose best logit is more
    than `-pv_skip` below the best one that the query has met before. If all queries of a tile of queries leave it out,
    the product of its weights and values is not computed. `lse` is that of what was not left out.

    With `k_slots`, keys and values are moved into slot order here, once per head of `k_slots`, and so many heads at a
    time that the workspace stays small.

    With scales, token `i` is `x[i] * scale[i]`. Row `r` of the mask reads the keys of head `k_copy[r] * Hk + h`, where
    `h` is its KV head, so that rows may differ in how their keys were rounded. Weights of fp8 values become fp8, too.
    """
    if v_scale is not None and out_dtype is None:
        raise ValueError("'out_dtype' must be given with 'v_scale'")
    out, lse = _outputs(q, v, out_dtype)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    q_position, k_position = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_position, k_position))
    shape = q_block, k_block, q_lead, causal, scale
    for of in _by_heads(k, v, k_slots):
        part = [of(x) for x in (q, k, v, out, lse, full_count, partial_count, index, q_position, k_position)]
        if k_slots is not None:
            part[1:3] = gather_two(part[1], part[2], of(k_slots))
        with device_of(q):
            if kernel == "hopper":
                from blocksparse.kernels.attention.sparse_attention_hopper import sparse_attention_hopper

                sparse_attention_hopper(*part, *shape, *tiles, q_in_order, k_in_order)
            else:
                from blocksparse.kernels.attention.sparse_attention_triton import sparse_attention_triton

                sparse_attention_triton(*part, *shape, *tiles, pv_skip, q_scale, k_scale, k_copy, v_scale)
    return out, lse


def _by_heads(k: Tensor, v: Tensor, k_slots: Tensor | None) -> Iterator[Callable[[Tensor], Tensor]]:
    """Functions that cut a tensor to some heads each, so that the keys and values moved for one cut fit the workspace."""
    if k_slots is None:
        yield lambda x: x
        return
    heads = k.shape[1]
    moved = sum(x[:, 0].numel() * x.element_size() for x in (k, v)) * k_slots.shape[1] // heads
    step = max(1, min(heads, _WORKSPACE // moved))

    for first in range(0, heads, step):

        def cut(x: Tensor, first: int = first) -> Tensor:
            per_key = x.shape[1] // heads  # 0 where one entry serves all heads
            return x if per_key == 0 else x[:, first * per_key : (first + step) * per_key]

        yield cut


@sparse_attention.register_fake
def _(q, k, v, *_args, out_dtype=None, **_named):
    return _outputs(q, v, out_dtype)


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs. `out` lies in memory as `q` does, so `q` must come as the caller gave it, not a copy."""
    out = empty_as(q, v.shape[-1], dtype or v.dtype)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    full_count: Tensor,
    partial_count: Tensor,
    index: Tensor,
    q_position: Tensor,
    k_position: Tensor,
    q_block: int,
    k_block: int,
    q_lead: int,
    causal: bool,
    scale: float,
    kernel: str,
    tiles: list[int],
    q_in_order: bool = False,
    k_in_order: bool = False,
    pv_skip: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    k_copy: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_slots: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, for tests: one masked softmax over all pairs, in O(M N) memory.

    It rounds where the kernel rounds, and computes in the precision of the inputs or of their scales.
    """
    del kernel, q_in_order, k_in_order
    block_n = tiles[1]
    if k_slots is not None:
        k, v = gather_rows(k, k_slots), gather_rows(v, k_slots)
    _, Hq, M, _ = q.shape
    N, Hk = k.shape[2], v.shape[1]
    out_dtype = out_dtype or v.dtype
    q, k = (x if factor is None else x * factor.unsqueeze(-1) for x, factor in ((q, q_scale), (k, k_scale)))
    v = v.repeat_interleave(Hq // Hk, 1)

    rank = _visiting_rank(full_count + partial_count, index)  # [B|1, Hm, rows, cols]
    pairs = (rank < rank.shape[-1]).repeat_interleave(q_block, 2).repeat_interleave(k_block, 3)
    pairs = pairs.repeat_interleave(Hq // pairs.shape[1], 1)[:, :, q_lead : q_lead + M, :N]
    q_at = q_position[..., q_lead : q_lead + M, None]
    k_at = k_position[..., None, :N]
    if k_at.shape[1] != 1:
        k_at = k_at.repeat_interleave(Hq // k_at.shape[1], 1)
    pairs = pairs & (k_at >= 0) & ((k_at <= q_at) if causal else True)

    per_copy = [products(q, x, wide=False) * scale for x in k.split(Hk, 1)]
    logits = per_copy[0]
    if k_copy is not None:
        copy = k_copy.repeat_interleave(q_block, -1)[..., q_lead : q_lead + M, None]
        logits = torch.stack(per_copy).gather(0, copy.long().expand_as(logits).unsqueeze(0))[0]
    logits = logits.masked_fill(~pairs, float("-inf"))
    if pv_skip is None and v_scale is None:
        weight = logits.softmax(-1).masked_fill(~pairs, 0.0)
        return products(weight, v.mT, wide=False).to(out_dtype), logits.logsumexp(-1).float()

    # The tiles of keys in the order in which each query meets them, and the largest logit that it has met by each.
    split = k_block // block_n
    order = rank.argsort(-1).unsqueeze(-1) * split + torch.arange(split, device=q.device)
    order = order.flatten(-2).repeat_interleave(Hq // rank.shape[1], 1).repeat_interleave(q_block, 2)
    order = order[:, :, q_lead : q_lead + M].expand(*logits.shape[:3], -1)  # [B, Hq, M, tiles]

    def by_turn(x: Tensor) -> Tensor:
        """The largest entry of every tile of keys, in the order of visits."""
        x = torch.nn.functional.pad(x, (0, order.shape[-1] * block_n - N), value=float("-inf"))
        return x.unflatten(-1, (-1, block_n)).amax(-1).gather(-1, order)

    def by_key(x: Tensor) -> Tensor:
        """Undo the order of `by_turn`: an entry for each visit becomes one for each key of the tile visited."""
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
        # The kernel rounds a weight when it visits its tile, relative to the maximum and the largest scale met by then.
        factor = v_scale.repeat_interleave(Hq // Hk, 1).unsqueeze(-2).expand_as(logits)
        largest = by_turn(factor.masked_fill(logits == float("-inf"), 0.0)).clamp_min(0).cummax(-1).values
        unit = by_key(largest) / FP8_LIMIT
        turn = (logits - by_key(met)).nan_to_num(nan=float("-inf"), neginf=float("-inf")).exp()
        rounded = (turn * factor / unit.masked_fill(unit == 0, 1.0)).to(v.dtype).to(logits.dtype)
        weight = rounded * unit * (by_key(met) - origin).exp()
        v = v.to(logits.dtype)
    out = products(weight.to(v.dtype), v.mT, wide=False) / total.masked_fill(total == 0, 1.0)
    return out.to(out_dtype), (total.log() + origin).squeeze(-1).float()


def _visiting_rank(count: Tensor, index: Tensor) -> Tensor:
    """The turn at which each row visits each of its `count` blocks; `cols` where it never does."""
    cols = index.shape[-1]
    turn = torch.arange(cols, device=index.device).expand(index.shape)
    rank = torch.full((*index.shape[:-1], cols + 1), cols, device=index.device)
    return rank.scatter_(-1, index.long().where(turn < count.unsqueeze(-1), cols), turn)[..., :cols]
