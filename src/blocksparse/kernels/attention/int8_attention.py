"""Softmax attention over lists of kept blocks, from 8-bit operands as `tile_operands.py` makes them, for Hopper.

It computes what `sparse_attention` does, with

    q[i] ~ q8[i] * q_scale[i],    k[j] ~ k8[j] * scale(j),    v[j] ~ v8[j] * scale(j)

TilesOnHopper of keys that a row sees whole are read from heads 0 to Hk - 1 of `k` and of fp8 `v`. There a piece (a tile of
keys, or the part of one that a narrower block fills) has four scales, one for each group of its keys. Masked tiles of
keys are read from heads Hk to 2 Hk - 1, where each token has a scale. A tile of keys counts as masked if it holds a part
of the row's partial blocks, or is the last of the row's list. int8 products are exact; fp8 products are added by the
tensor cores in some 14 bits, over four tiles of keys at most, and from there on in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.attention.arguments import Lists, TilesOnHopper
from blocksparse.kernels.common.memory import empty_as
from blocksparse.kernels.positions.token_positions import TokenPositions
from blocksparse.kernels.rounding.tile_operands import TileOperands


def int8_attention(
    operands: TileOperands,
    lists: Lists,
    positions: TokenPositions,
    tiles: TilesOnHopper,
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
