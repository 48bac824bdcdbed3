"""What the kernels over block lists compute, in plain torch and O(M N) memory: their specification.

`pv_skip` is a difference of logits. In full blocks, a query leaves out a tile of keys whose best logit is more than
`-pv_skip` below the best one that the query has met before. If all queries of a tile of queries leave it out, the product
of its weights and values is not computed. `lse` is that of what was not left out. Logits are those after a softcap, and a
sink is no logit that a query has met. Each query decides for itself, so that no query's result depends on another query, or
on a later key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.attention.sparse_attention import UNCHANGED
from blocksparse.kernels.common.tiles import HopperTiles
from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.masks.arguments import Approximation, Lists, LogitChange
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.kernels.quantize.tile_operands import TileOperands
from blocksparse.kernels.quantize.tokens import FP8_LIMIT


def sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists,
    positions: TokenPositions,
    *,
    scale: float,
    change: LogitChange = UNCHANGED,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention`: one masked softmax over all pairs, in the precision of the inputs and O(M N) memory."""
    pairs = listed_pairs(lists, positions, q, k)
    logits = capped(_products(q, k) * scale, change).masked_fill(~pairs, float("-inf"))
    if change.sinks is not None:
        sink = change.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits, pairs = torch.cat((logits, sink), -1), pad(pairs, (0, 1))
    weight = logits.softmax(-1).masked_fill(~pairs, 0.0)[..., : k.shape[2]]
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    seen = pairs[..., : k.shape[2]].any(-1, keepdim=True)
    return _products(weight, v.mT).masked_fill(~seen, 0.0), logits.logsumexp(-1).float()


def capped(logits: Tensor, change: LogitChange) -> Tensor:
    """The logits `[B, Hq, M, N]` after the softcap."""
    return logits if change.softcap is None else change.softcap * torch.tanh(logits / change.softcap)


def listed_pairs(lists: Lists, positions: TokenPositions, q: Tensor, k: Tensor) -> Tensor:
    """The pairs of all listed blocks that original positions allow, `[B, Hq, M, N]` bool."""
    (_, Hq, M, _), N = q.shape, k.shape[2]
    queries = slice(positions.q_lead, positions.q_lead + M)
    rank = visiting_rank(lists)
    pairs = (rank < rank.shape[-1]).repeat_interleave(lists.q_block, 2).repeat_interleave(lists.k_block, 3)
    pairs = pairs.repeat_interleave(Hq // pairs.shape[1], 1)[:, :, queries, :N]
    q_at, k_at = positions.q_position[..., queries, None], positions.k_position[..., :N]  # one key map: G is 1
    k_at = k_at if k_at.shape[1] == 1 else k_at.repeat_interleave(Hq // k_at.shape[1], 1)
    return pairs & positions.is_visible(q_at, k_at)


def visiting_rank(lists: Lists) -> Tensor:
    """The turn at which each row visits each of its blocks, `[B|1, Hm, rows, cols]`; `cols` where it never does."""
    count, index = lists.full_count + lists.partial_count, lists.index
    cols = index.shape[-1]
    turn = torch.arange(cols, device=index.device).expand(index.shape)
    rank = torch.full((*index.shape[:-1], cols + 1), cols, device=index.device)
    return rank.scatter_(-1, index.long().where(turn < count.unsqueeze(-1), cols), turn)[..., :cols]


def approximate_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Lists,
    positions: TokenPositions,
    block_n: int,
    *,
    scale: float,
    approximation: Approximation,
    change: LogitChange = UNCHANGED,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with an `Approximation`: it rounds where the kernel rounds, and computes in the precision of the inputs or of their scales.

    `block_n` is how many keys are a tile of keys; the other arguments are those of `sparse_attention`.
    """
    pv_skip, v_scale = approximation.pv_skip, approximation.v_scale
    (_, Hq, M, _), N = q.shape, k.shape[2]
    out_dtype = out_dtype or v.dtype
    pairs = listed_pairs(lists, positions, q, k)
    logits = capped(_logits(q, k, v.shape[1], lists, positions, scale, approximation), change)
    logits = logits.masked_fill(~pairs, float("-inf"))
    v = v.repeat_interleave(Hq // v.shape[1], 1)

    # The tiles of keys in the order in which each query meets them, and the largest logit that it has met by each.
    rank, split = visiting_rank(lists), lists.k_block // block_n
    order = rank.argsort(-1).unsqueeze(-1) * split + torch.arange(split, device=q.device)
    order = _of_queries(order.flatten(-2), lists, positions, Hq, M).expand(
        *logits.shape[:3], -1
    )  # [B, Hq, M, tiles]

    def by_turn(x: Tensor) -> Tensor:
        """The largest entry of every tile of keys, in the order of visits."""
        x = pad(x, (0, order.shape[-1] * block_n - N), value=float("-inf"))
        largest: Tensor = x.unflatten(-1, (-1, block_n)).amax(-1)
        return largest.gather(-1, order)

    def by_key(x: Tensor) -> Tensor:
        """Undo the order of `by_turn`: an entry for each visit becomes one for each key of the tile visited."""
        return torch.zeros_like(x).scatter_(-1, order, x).repeat_interleave(block_n, -1)[..., :N]

    best = by_turn(logits)
    met = best.cummax(-1).values
    if pv_skip is not None:
        before = pad(met[..., :-1], (1, 0), value=float("-inf"))
        full = torch.arange(order.shape[-1], device=q.device) < split * lists.full_count.unsqueeze(-1)
        left_out = (best - before < pv_skip.view(-1, 1, 1)) & _of_queries(full, lists, positions, Hq, M)
        logits = logits.masked_fill(by_key(left_out), float("-inf"))
    origin = met[..., -1:].masked_fill(met[..., -1:] == float("-inf"), 0.0)
    weight = (logits - origin).exp()
    total = weight.sum(-1, keepdim=True)
    if v_scale is not None:
        # The kernel rounds a weight when it visits its tile, relative to the maximum and the largest scale met by then.
        factor = v_scale.repeat_interleave(Hq // v_scale.shape[1], 1).unsqueeze(-2).expand_as(logits)
        largest = by_turn(factor.masked_fill(logits == float("-inf"), 0.0)).clamp_min(0).cummax(-1).values
        unit = by_key(largest) / FP8_LIMIT
        turn = (logits - by_key(met)).nan_to_num(nan=float("-inf"), neginf=float("-inf")).exp()
        rounded = (turn * factor / unit.masked_fill(unit == 0, 1.0)).to(v.dtype).to(logits.dtype)
        weight = rounded * unit * (by_key(met) - origin).exp()
        v = v.to(logits.dtype)
    out = _products(weight.to(v.dtype), v.mT) / total.masked_fill(total == 0, 1.0)
    lse = total.log() + origin  # [B, Hq, M, 1]
    if change.sinks is not None:
        sinks = change.sinks.to(lse.dtype).view(1, -1, 1, 1)
        out, lse = out * torch.sigmoid(lse - sinks), torch.logaddexp(lse, sinks)
    return out.to(out_dtype), lse.squeeze(-1).float()


def _products(q: Tensor, k: Tensor) -> Tensor:
    """As `products`, in the dtype of `q`."""
    if q.dtype.itemsize > 2:
        return products(q, k)
    grouped: Tensor = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.mT
    return grouped.view(*q.shape[:3], -1)


def _logits(
    q: Tensor,
    k: Tensor,
    Hk: int,
    lists: Lists,
    positions: TokenPositions,
    scale: float,
    approximation: Approximation,
) -> Tensor:
    """The logits of all pairs, `[B, Hq, M, N]`, of the keys that each row reads."""
    scales, k_copy = (approximation.q_scale, approximation.k_scale), approximation.k_copy
    q, k = (x if factor is None else x * factor.unsqueeze(-1) for x, factor in zip((q, k), scales, strict=True))
    M = q.shape[2]
    copies = [_products(q, x) * scale for x in k.split(Hk, 1)]
    if k_copy is None:
        return copies[0]
    copy = k_copy.repeat_interleave(lists.q_block, -1)[..., positions.q_lead : positions.q_lead + M, None]
    return torch.stack(copies).gather(0, copy.long().expand_as(copies[0]).unsqueeze(0))[0]


def _of_queries(x: Tensor, lists: Lists, positions: TokenPositions, Hq: int, M: int) -> Tensor:
    """`x` `[B|1, Hm, rows, ...]` repeated for each query head and query, `[B|1, Hq, M, ...]`."""
    x = x.repeat_interleave(Hq // x.shape[1], 1).repeat_interleave(lists.q_block, 2)
    return x[:, :, positions.q_lead : positions.q_lead + M]


def of_slots(x: Tensor, tile: int, slots: int) -> Tensor:
    """What belongs to groups, `[B, H, tiles, 4]`, for each slot, `[B, H, slots]`: its group is `slot % 8 // 2`."""
    slot = torch.arange(slots, device=x.device)
    return x[:, :, slot // tile, slot % 8 // 2]


def in_order(values: Tensor, slots: int) -> Tensor:
    """`[B, 2 * H, D, 16 n]` back in the order of slots, `[B, 2 * H, slots, D]`."""
    tokens: Tensor = values.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4).mT[:, :, :slots]
    return tokens


def int8_attention_reference(
    operands: TileOperands,
    lists: Lists,
    positions: TokenPositions,
    tiles: HopperTiles,
    *,
    scale: float,
    pv_skip: Tensor | None = None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`int8_attention` in float64; weights are not rounded to fp8."""
    q, k, v, taken = operands.q, operands.k, operands.v, operands.taken
    k_block, q_lead = lists.k_block, positions.q_lead
    (_, Hq, M, _), (_, twice, N, _) = q.shape, k.shape
    Hk, tile = twice // 2, min(tiles.block_n, k_block)
    per_tile = tiles.block_n // tile  # pieces

    def of_queries(x: Tensor) -> Tensor:
        return _of_queries(x, lists, positions, Hq, M)

    def of_heads(x: Tensor) -> Tensor:
        """`x` `[B, Hk, ...]` in float64, repeated for each query head."""
        return x.double().repeat_interleave(Hq // Hk, 1)

    def logits_of(keys: Tensor, factor: Tensor) -> Tensor:
        """Logits `[B, Hq, M, N]` of int8 keys whose scales are `factor` `[B, Hk, N]`."""
        exact = products(q.double(), keys.double())
        return exact * operands.q_scale.double()[..., None] * of_heads(factor)[:, :, None] * scale

    split = k_block // tile
    rank, count = visiting_rank(lists).unsqueeze(-1), (lists.full_count + lists.partial_count).unsqueeze(-1)
    # The place of each piece in its row's list, -1 where it is not listed. The kernel walks the list from its end:
    # partial blocks come first and are masked, and the very first step is masked in any case.
    place = (rank * split + torch.arange(split, device=q.device)).where(rank < rank.shape[-2], -1)
    place = place.flatten(-2)[..., : -(-N // tile)]
    # The kernel's first step has the pieces that are left when all other steps have `per_tile`.
    pieces, partial = count * split, lists.partial_count.unsqueeze(-1) * split
    masked = (pieces - 1) % per_tile + 1
    masked = masked + (partial - masked).clamp_min(0).add(per_tile - 1) // per_tile * per_tile
    least = pieces - masked
    kept, whole = (of_queries(x).repeat_interleave(tile, -1)[..., :N] for x in (place >= 0, place < least))

    plain = logits_of(k[:, Hk:], operands.k_token_scale)
    if taken is not None:
        plain = plain - taken.double()[..., None]
    logits = logits_of(k[:, :Hk], of_slots(operands.k_tile_scale, tile, N)).where(whole, plain)
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
        values = in_order(v.double(), N)
        of_tiles = values[:, :Hk] * of_slots(v_tile_log2, tile, N).double().exp2()[..., None]
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
