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
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.positions.token_positions import TokenPositions
from blocksparse.kernels.rounding.tile_operands import TileOperands
from blocksparse.runtime.device import device_of


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
    with device_of(q):
        int8_attention_hopper(operands, out, lse, lists, positions, tiles, scale, pv_skip)
    return out, lse


def int8_attention_reference(
    operands: TileOperands,
    lists: Lists,
    positions: TokenPositions,
    tiles: TilesOnHopper,
    *,
    scale: float,
    pv_skip: Tensor | None = None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch and float64, for tests: O(M N) memory; weights are not rounded to fp8."""
    q, k, v, taken = operands.q, operands.k, operands.v, operands.taken
    q_block, k_block, q_lead, index = lists.q_block, lists.k_block, positions.q_lead, lists.index
    (_, Hq, M, _), (_, twice, N, _) = q.shape, k.shape
    Hk, tile = twice // 2, min(tiles.block_n, k_block)
    per_tile = tiles.block_n // tile  # pieces

    def of_queries(x: Tensor) -> Tensor:
        """`x` `[B|1, Hm, rows, ...]` repeated for each query head and query, `[B|1, Hq, M, ...]`."""
        x = x.repeat_interleave(Hq // x.shape[1], 1).repeat_interleave(q_block, 2)
        return x[:, :, q_lead : q_lead + M]

    def of_slots(x: Tensor) -> Tensor:
        """`x` `[B, Hk, tiles, 4]` repeated for each slot, `[B, Hk, N]`: a slot's group is `slot % 8 // 2`."""
        slot = torch.arange(N, device=x.device)
        return x[:, :, slot // tile, slot % 8 // 2]

    def of_heads(x: Tensor) -> Tensor:
        """`x` `[B, Hk, ...]` in float64, repeated for each query head."""
        return x.double().repeat_interleave(Hq // Hk, 1)

    def logits_of(keys: Tensor, factor: Tensor) -> Tensor:
        """Logits `[B, Hq, M, N]` of int8 keys whose scales are `factor` `[B, Hk, N]`."""
        exact = products(q.double(), keys.double())
        return exact * operands.q_scale.double()[..., None] * of_heads(factor)[:, :, None] * scale

    split = k_block // tile
    cols, tile_count = index.shape[-1], -(-N // tile)
    turn = torch.arange(cols, device=q.device)
    count = (lists.full_count + lists.partial_count).unsqueeze(-1)
    listed = index.long().where(turn < count, cols)
    # The place of each piece in its row's list, -1 where it is not listed. The kernel walks the list from its end:
    # partial blocks come first and are masked, and the very first step is masked in any case.
    place = torch.full((*index.shape[:-1], cols + 1), -1, device=q.device).scatter_(
        -1, listed, turn.expand_as(listed)
    )
    place = (place[..., :cols, None] * split + torch.arange(split, device=q.device)).where(
        place[..., :cols, None] >= 0, -1
    )
    place = place.flatten(-2)[..., :tile_count]
    # The kernel's first step has the pieces that are left when all other steps have `per_tile`.
    pieces, partial = count * split, lists.partial_count.unsqueeze(-1) * split
    masked = (pieces - 1) % per_tile + 1
    masked = masked + (partial - masked).clamp_min(0).add(per_tile - 1) // per_tile * per_tile
    least = pieces - masked
    kept, whole = (of_queries(x).repeat_interleave(tile, -1)[..., :N] for x in (place >= 0, place < least))

    plain = logits_of(k[:, Hk:], operands.k_token_scale)
    if taken is not None:
        plain = plain - taken.double()[..., None]
    logits = logits_of(k[:, :Hk], of_slots(operands.k_tile_scale)).where(whole, plain)
    allowed = kept
    if positions.causal:
        last = positions.q_position.expand(-1, Hq, -1)[:, :, q_lead : q_lead + M]
        at = positions.k_position[:, :, 0].repeat_interleave(Hq // positions.k_position.shape[1], 1)[:, :, :N]
        allowed = allowed & (at[:, :, None] <= last[..., None]) & (at[:, :, None] >= 0)
    logits = logits.masked_fill(~allowed, float("-inf"))
    if pv_skip is not None:
        logits = _without_negligible(logits, of_queries(place), whole, pv_skip, tile)
    weight = logits.softmax(-1).nan_to_num(0.0)
    v_tile_log2, v_token = operands.v_tile_log2, operands.v_token
    if v_tile_log2 is None or v_token is None:
        out = products(weight, v.double().mT)
    else:
        values = v.double().unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4).mT[:, :, :N]
        of_tiles = values[:, :Hk] * of_slots(v_tile_log2).double().exp2()[..., None]
        of_tokens = values[:, Hk:] * v_token[:, :Hk].double().exp2()[..., None]
        out = products(weight.where(whole, 0.0), of_tiles.mT)
        out = out + products(weight.masked_fill(whole, 0.0), of_tokens.mT)
    lse = logits.logsumexp(-1) if taken is None else logits.logsumexp(-1) + taken
    return out.to(out_dtype), lse.float()


def _without_negligible(logits: Tensor, place: Tensor, whole: Tensor, pv_skip: Tensor, tile: int) -> Tensor:
    """Logits, with -inf in pieces that a row sees whole and whose best logit is negligible.

    It is if it lies more than `-pv_skip` below the best one met before; pieces are met from the last place to the first.
    """
    N, tile_count = logits.shape[-1], place.shape[-1]
    padded = torch.nn.functional.pad(logits, (0, tile_count * tile - N), value=float("-inf"))
    best = padded.unflatten(-1, (tile_count, tile)).amax(-1)
    order = place.expand_as(best).argsort(-1, descending=True)
    met = best.gather(-1, order).cummax(-1).values
    before = torch.nn.functional.pad(met[..., :-1], (1, 0), value=float("-inf"))
    out = torch.zeros_like(best, dtype=torch.bool).scatter_(
        -1, order, best.gather(-1, order) - before < pv_skip.double()[:, None, None]
    )
    return logits.masked_fill(out.repeat_interleave(tile, -1)[..., :N] & whole, float("-inf"))
