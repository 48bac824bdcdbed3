"""Softmax attention over the kept blocks, in 16 or 32 bits and in 8.

`sparse_attention`: Softmax attention over lists of kept blocks.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j]

over the keys `j` of the blocks listed for the row of query `i`. A row's full blocks are never masked; its partial
blocks are masked by original position: by causality, and by a sliding window if there is one. A layer may cap its logits
before that, and have a sink in its softmax (`LogitChange`). The softmax is in base 2, sums are in fp32, and the result is
exact up to rounding.

The tiles say whether the portable kernel or the one for Hopper runs. Two approximations are off unless asked for, and while
they are off they cost the exact kernel nothing: leaving out the products of negligible weights, and 8-bit operands with
scales. Only the portable kernel has them.

`int8_attention`: Softmax attention over lists of kept blocks, from 8-bit operands as `tile_operands.py` makes them, for Hopper.

It computes what `sparse_attention` does, with

    q[i] ~ q8[i] * q_scale[i],    k[j] ~ k8[j] * scale(j),    v[j] ~ v8[j] * scale(j)

Tiles of keys that a row sees whole are read from heads 0 to Hk - 1 of `k` and of fp8 `v`. There a piece (a tile of
keys, or the part of one that a narrower block fills) has four scales, one for each group of its keys. Masked tiles of keys
are read from heads Hk to 2 Hk - 1, where each token has a scale. A tile of keys counts as masked if it holds a part of the
row's partial blocks, or is the last of the row's list. Products in int8 are exact. The tensor cores add fp8 products in
about 14 bits, over four tiles of keys at most; further sums are in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from blocksparse.kernels.common.sizes import empty_as
from blocksparse.kernels.common.tiles import HopperTiles, Tiles
from blocksparse.kernels.layout.gather import gather_two
from blocksparse.kernels.masks.arguments import Approximation, Lists, LogitChange
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.kernels.quantize.tile_operands import TileOperands

EXACT = Approximation()
UNCHANGED = LogitChange()
_WORKSPACE = 2**28  # bytes of keys and values moved at a time; a chunk of a prompt takes twice as much


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists,
    positions: TokenPositions,
    tiles: Tiles,
    *,
    scale: float,
    key_slots: Tensor | None = None,
    visited: Tensor | None = None,
    approximation: Approximation = EXACT,
    change: LogitChange = UNCHANGED,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the listed blocks: `out` `[B, Hq, M, Dv]`, and `lse` `[B, Hq, M]` fp32.

    Args:
        q: `[B, Hq, M, D]`, in slot order.
        k: `[B, Hk, N, D]`, in slot order unless `key_slots` is given. Hk is Hkv or Hq.
        v: `[B, Hk, N, Dv]`, likewise.
        key_slots: `[B, H, N]` int32, the key in each slot. Keys and values `[B, Hkv, N, ...]` are then moved into slot order
            here, once per head of `key_slots`. A few heads move at a time, so that the workspace stays small.
        visited: `[B|1, Hw, cols]` bool, the blocks that `visited_columns` finds in the mask. `Hw` divides H. No others
            are then moved into slot order. None moves all.
        out: where the output is written, with its last axis innermost. If None, it has the dtype of v, and lies in memory
            as `empty_as` has it. It must be given if v is fp8.
    """
    if out is None:
        if approximation.v_scale is not None:
            raise ValueError("'out' must be given with 'v_scale'")
        out = empty_as(q, v.shape[-1], v.dtype)  # as q lies in memory, so before any copy of it
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    q = q if q.stride(-1) == 1 else q.contiguous()
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    attend = _kernel(tiles, approximation, change)
    if key_slots is None:
        attend(q, k, v, out, lse, lists, positions, tiles, scale)
    elif (step := _heads_at_a_time(q, k, v, key_slots)) == k.shape[1]:
        moved = gather_two(k, v, key_slots, wanted=visited, block=lists.k_block)
        attend(q, *moved, out, lse, lists, positions, tiles, scale)
    else:
        for first in range(0, k.shape[1], step):
            of = functools.partial(_of_heads, first=first, step=step, heads=k.shape[1])
            counts: dict[str, Any] = {
                name: of(getattr(lists, name)) for name in ("full_count", "partial_count", "index")
            }
            wanted = None if visited is None else of(visited)
            moved = gather_two(of(k), of(v), of(key_slots), wanted=wanted, block=lists.k_block)
            _kernel(tiles, approximation.of_heads(of), change.of_heads(of))(
                of(q), *moved, of(out), of(lse), evolve(lists, **counts), positions.of_heads(of), tiles, scale
            )
    return out, lse


def _kernel(tiles: Tiles, approximation: Approximation, change: LogitChange) -> Callable[..., None]:
    """The function that fills `out` and `lse` by the kernel that `tiles` names."""
    if tiles.kernel == "hopper":
        from blocksparse.kernels.attention.sparse_attention_hopper import sparse_attention_hopper

        return functools.partial(sparse_attention_hopper, change=change)
    from blocksparse.kernels.attention.sparse_attention_triton import sparse_attention_triton

    return functools.partial(sparse_attention_triton, approximation=approximation, change=change)


def _heads_at_a_time(q: Tensor, k: Tensor, v: Tensor, key_slots: Tensor) -> int:
    """For how many KV heads moved keys and values fit the workspace, which is larger for chunks: they have little work."""
    B, heads, N, _ = k.shape
    moved = sum(x.shape[-1] * x.element_size() for x in (k, v)) * B * N * key_slots.shape[1] // heads
    room = _WORKSPACE if q.shape[2] == N else 2 * _WORKSPACE
    return max(1, min(heads, room // moved))


def _of_heads(x: Tensor, first: int, step: int, heads: int) -> Tensor:
    """What belongs to KV heads `first` to `first + step` of `heads`; all of `x` where one entry serves all heads."""
    per_key = x.shape[1] // heads
    return x if per_key == 0 else x[:, first * per_key : (first + step) * per_key]


def int8_attention(
    operands: TileOperands,
    lists: Lists,
    positions: TokenPositions,
    tiles: HopperTiles,
    *,
    scale: float,
    pv_skip: Tensor | None = None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`out` `[B, Hq, M, D]` of `out_dtype` and `lse` `[B, Hq, M]` fp32.

    Args:
        pv_skip: `[Hq]` fp32, negative, as in `Approximation`.
    """
    from blocksparse.kernels.attention.int8_attention_hopper import int8_attention_hopper

    if positions.window is not None:
        raise ValueError(f"attention in 8 bits knows no sliding window: {positions.window}")
    q = operands.q
    out, lse = empty_as(q, q.shape[-1], out_dtype), q.new_empty(q.shape[:3], dtype=torch.float32)
    int8_attention_hopper(operands, out, lse, lists, positions, tiles, scale, pv_skip)
    return out, lse
