"""Softmax attention over ranked lists of blocks, whose keys are read through an index map, with an early stop.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j]

over the keys `j` in the slots of the blocks that the row of query `i` visits. A row visits its first `opened` blocks in any
case. After each later block, a query is satisfied if `gain < tau * l`. There `l` is the softmax denominator before the block
and `gain` what the block adds, both relative to the same running maximum. A row stops when its queries were satisfied
`patience` times in a row (S2O, algorithm 3). Nothing is moved: keys, values and queries are read, and outputs written, where
they stand.

The kernel for Hopper takes the arguments that `fits_hopper` names. In all implementations the same rows stop after the same
blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.attention.cpu_attention import cpu_gather_attention, cpu_kernel_refuses
from blocksparse.kernels.common.hardware import is_hopper
from blocksparse.kernels.common.sizes import empty_as
from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.masks.arguments import RankedLists, StopRule
from blocksparse.kernels.masks.grid import TokenPositions


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: RankedLists,
    positions: TokenPositions,
    rule: StopRule,
    *,
    scale: float,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`out` `[B, Hq, M, Dv]` of the dtype of v, `lse` `[B, Hq, M]` fp32 or better, blocks visited `[B, Hq, rows]` int32.

    `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]` are in original order. `kernel` is one of `kernels_for`,
    by default the first.
    """
    kernel = kernel or kernels_for(q, v, lists.q_block, lists.k_block, rule.commit)[0]
    if kernel == "hopper":
        from blocksparse.kernels.attention.gather_attention_hopper import gather_attention_hopper as compute
    elif kernel == "triton":
        from blocksparse.kernels.attention.gather_attention_triton import gather_attention_triton as compute
    else:
        compute = cpu_gather_attention if kernel == "cpu" else gather_attention_reference
    if positions.window is not None:
        raise ValueError(f"attention that stops early knows no sliding window: {positions.window}")
    return compute(q, k, v, lists, positions, rule, scale=scale)


def kernels_for(q: Tensor, v: Tensor, q_block: int, k_block: int, commit: bool) -> tuple[str, ...]:
    """The kernels that take these arguments, from the fastest on: "hopper", "triton" or "cpu", and "torch"."""
    if not q.is_cuda or q.dtype == torch.float64:
        return ("torch",) if cpu_kernel_refuses(q, v, v) else ("cpu", "torch")
    for_hopper = is_hopper(q.device) and fits_hopper(q, v, q_block, k_block, commit)
    return ("hopper", "triton") if for_hopper else ("triton",)


def fits_hopper(q: Tensor, v: Tensor, q_block: int, k_block: int, commit: bool) -> bool:
    """Whether the kernel for Hopper takes these arguments."""
    return (
        commit
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in (64, 128)
        and q_block in (64, 128)
        and (k_block in (32, 64) or k_block % q_block == 0)
    )


def gather_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, lists: RankedLists, positions: TokenPositions, rule: StopRule, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference implementation in plain torch: step `i` computes the `i`-th block of every row that has not stopped.

    Each step gathers one block of keys and values for every row that still runs. It asks which rows those are after each
    step, so on a GPU it waits for the device.
    """
    (B, Hq, M, _), (_, Hkv, N, _), Dv, causal = q.shape, k.shape, v.shape[-1], positions.causal
    index, q_block = lists.index, lists.q_block
    rows, dtype, device = index.shape[2], torch.promote_types(q.dtype, torch.float32), q.device
    R = B * Hq * rows  # rows of all heads, one behind another
    where_b, where_h, row = (
        x.flatten()
        for x in torch.meshgrid(*(torch.arange(n, device=device) for n in (B, Hq, rows)), indexing="ij")
    )
    q_at = positions.q_position.expand(B, Hq, -1).reshape(R, q_block)
    query = (q_at - (N - M if causal else 0)).clamp_min(0).long()  # an empty place reads query 0
    live = q_at >= 0
    maps_b, maps_h, G = positions.k_position.shape[:3]
    # Which map a row reads, of [maps, cols, k_block] slots; and where the keys of its head begin among all tokens.
    slots_of = positions.k_position.unflatten(-1, (-1, lists.k_block)).flatten(0, 2)
    map_of = (where_b % maps_b * maps_h + where_h * maps_h // Hq) * G
    if positions.group_of_row is not None:
        map_of = map_of + positions.group_of_row.long()[row]
    first_key = (where_b * Hkv + where_h * Hkv // Hq) * N
    keys, values = (x.to(dtype).reshape(B * Hkv * N, -1) for x in (k, v))

    result = q.new_zeros((R, q_block, Dv), dtype=dtype)
    lse_of = q.new_full((R, q_block), float("-inf"), dtype=dtype)
    visited = torch.zeros(R, dtype=torch.int32, device=device)

    # Of the rows that run, [n, ...] each. Softmax sums are relative to `peak`.
    at = (lists.count.flatten() > 0).nonzero().flatten()
    peak = q.new_full((len(at), q_block), float("-inf"), dtype=dtype)
    total, summed = torch.zeros_like(peak), q.new_zeros((len(at), q_block, Dv), dtype=dtype)
    queries = q[where_b[at, None], where_h[at, None], query[at]].to(dtype)  # [n, q_block, D]
    low = torch.zeros_like(at)
    order, opened, count = index.flatten(0, 2), lists.opened.flatten(), lists.count.flatten()
    limit = rule.tau.to(dtype)[where_h]
    earliest = q_at.where(live, torch.iinfo(torch.int32).max).amin(-1, keepdim=True)  # of the queries of a row

    def finish(which: Tensor, blocks: int) -> None:
        """Note the result of those rows; they have visited so many blocks."""
        done, sums = at[which], total[which]
        result[done] = (summed[which] / sums.unsqueeze(-1)).masked_fill((sums == 0).unsqueeze(-1), 0.0)
        lse_of[done] = sums.log() + peak[which]
        visited[done] = blocks

    for i in range(order.shape[1]):
        if not len(at):
            break
        slots = slots_of[map_of[at], order[at, i].long()]  # [n, k_block]
        token = (slots.clamp_min(0) + first_key[at, None]).flatten()
        some_keys, some_values = (x.index_select(0, token).unflatten(0, slots.shape) for x in (keys, values))
        logits = products(queries.unsqueeze(0), some_keys.unsqueeze(0))[0].mul_(scale)  # [n, q_block, k_block]
        there = slots >= 0
        if not bool((there & ((slots <= earliest[at]) if causal else there)).all()):
            allowed = there.unsqueeze(1)
            if causal:
                allowed = allowed & (slots.unsqueeze(1) <= q_at[at].unsqueeze(2))
            logits.masked_fill_(~allowed, float("-inf"))
            # An empty slot reads key 0; its weight is 0, which must not meet an infinite value.
            some_values.masked_fill_(~there.unsqueeze(2), 0.0)

        new_peak = torch.maximum(peak, logits.amax(-1))
        origin = new_peak.masked_fill(new_peak == float("-inf"), 0.0)
        weight = logits.sub_(origin.unsqueeze(-1)).exp_()
        rescale = (peak - origin).exp()
        before, gain = total * rescale, weight.sum(-1)  # relative to one maximum

        share = (gain / before.masked_fill(before == 0, 1.0)).masked_fill(before == 0, float("inf"))
        share = share.masked_fill(~live[at], 0.0)
        if rule.mean:
            satisfied = share.sum(-1) < limit[at] * live[at].sum(-1)
        else:
            satisfied = share.amax(-1) < limit[at]
        low = (low + 1).where(satisfied & (i >= opened[at]), 0)
        stops = low >= rule.patience

        if not rule.commit and bool(stops.any()):  # the block that ends a row does not count
            finish(stops, i)
            runs = ~stops
            at, low, queries, new_peak, before, gain = (
                x[runs] for x in (at, low, queries, new_peak, before, gain)
            )
            rescale, summed, weight, some_values = (x[runs] for x in (rescale, summed, weight, some_values))
            stops = stops[runs]
            if not len(at):
                break
        peak, total = new_peak, before + gain
        summed = summed.mul_(rescale.unsqueeze(-1)).add_(
            products(weight.unsqueeze(0), some_values.mT.unsqueeze(0))[0]
        )
        ends = stops | (i + 1 >= count[at])
        if bool(ends.any()):
            finish(ends, i + 1)
            runs = ~ends
            at, low, queries, peak, total, summed = (x[runs] for x in (at, low, queries, peak, total, summed))

    out = empty_as(q, Dv, v.dtype).zero_()  # as q lies in memory, not a copy of it
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    place, slot = live.nonzero(as_tuple=True)
    to = where_b[place], where_h[place], query[place, slot]
    out[to] = result[place, slot].to(out.dtype)
    lse[to] = lse_of[place, slot]
    return out, lse, visited.view(B, Hq, rows)
