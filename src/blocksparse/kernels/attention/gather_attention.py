"""Softmax attention over ranked lists of blocks, whose keys are read through an index map, with an early stop.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j]

over the keys `j` in the slots of the blocks that the row of query `i` visits. A row visits its first `opened`
blocks in any case. After each later block, with `l` the softmax denominator before it and `gain` what the block
adds, both relative to the same running maximum, a query is satisfied if `gain < tau * l`; a row stops when its
queries were satisfied `patience` times in a row (S2O, algorithm 3). Nothing is moved: keys, values and queries are
read, and outputs written, where they stand.

The op has three implementations: the portable Triton kernel in `gather_attention_triton.py`; the kernel for Hopper in
`gather_attention_hopper.py`, for the arguments that `fits_hopper` names; and for CPU tensors and float64 the plain torch
below, which computes in fp32 or better. In all of them the same rows stop after the same blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.hardware import is_hopper
from blocksparse.kernels.common.memory import empty_as
from blocksparse.kernels.multiplying.products import products


@torch.library.custom_op("blocksparse::gather_attention", mutates_args=())
def gather_attention(
    q: Tensor,  # [B, Hq, M, D], in original order
    k: Tensor,  # [B, Hkv, N, D], in original order
    v: Tensor,  # [B, Hkv, N, Dv]
    index: Tensor,  # [B, Hq, rows, cols] int32, blocks in visiting order
    opened: Tensor,  # [B, Hq, rows] int32, how many blocks are visited in any case
    count: Tensor,  # [B, Hq, rows] int32, how many blocks may be visited
    q_position: Tensor,  # [B|1, Hq|1, rows * q_block] int32, original positions by place, -1 where empty
    k_position: Tensor,  # [B|1, Hm|1, G, cols * k_block] int32, the key in each slot, -1 where empty
    group: Tensor,  # [rows] int32, the key map of each row
    tau: Tensor,  # [Hq] fp32
    q_block: int,
    k_block: int,
    causal: bool,
    scale: float,
    patience: int,
    commit: bool,  # whether the block after which a row stops is part of the result
    mean: bool,  # a row is satisfied if the mean of gain / l over its queries is below tau; else each must be
) -> tuple[Tensor, Tensor, Tensor]:
    """`out` `[B, Hq, M, Dv]` of the dtype of v, `lse` `[B, Hq, M]` fp32 or better, blocks visited `[B, Hq, rows]` int32."""
    compute = gather_attention_reference
    if is_hopper(q.device) and fits_hopper(q, v, q_block, k_block, commit):
        from blocksparse.kernels.attention.gather_attention_hopper import gather_attention_hopper as compute
    elif q.is_cuda and q.dtype != torch.float64:
        from blocksparse.kernels.attention.gather_attention_triton import gather_attention_triton as compute
    return compute(
        q, k, v, index, opened, count, q_position, k_position, group, tau,
        q_block, k_block, causal, scale, patience, commit, mean,
    )  # fmt: skip


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


@gather_attention.register_fake
def _(q, k, v, index, opened, *_args):
    return _outputs(q, v, opened)


def _outputs(q: Tensor, v: Tensor, opened: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised outputs. `out` lies in memory as `q` does, so `q` must come as the caller gave it, not a copy."""
    out = empty_as(q, v.shape[-1], v.dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return out, lse, opened.new_empty(opened.shape)


def gather_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    opened: Tensor,
    count: Tensor,
    q_position: Tensor,
    k_position: Tensor,
    group: Tensor,
    tau: Tensor,
    q_block: int,
    k_block: int,
    causal: bool,
    scale: float,
    patience: int,
    commit: bool,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch: step `i` computes the `i`-th block of every row that has not stopped.

    Each step gathers one block of keys and values for every row that still runs. It asks which rows those are after each
    step, so on a GPU it waits for the device.
    """
    (B, Hq, M, _), (_, Hkv, N, _), Dv = q.shape, k.shape, v.shape[-1]
    rows, dtype, device = index.shape[2], torch.promote_types(q.dtype, torch.float32), q.device
    q_at = q_position.expand(B, Hq, -1).reshape(-1, q_block)  # [R, q_block], R = B * Hq * rows
    if k_position.shape[1] != 1:
        k_position = k_position.repeat_interleave(Hq // k_position.shape[1], dim=1)
    k_blocks = k_position.unflatten(-1, (-1, k_block))  # [B|1, Hq|1, G, cols, k_block]
    where_b, where_h, row = (
        x.flatten()
        for x in torch.meshgrid(*(torch.arange(n, device=device) for n in (B, Hq, rows)), indexing="ij")
    )
    order, opened, count = index.flatten(0, 2).long(), opened.flatten(), count.flatten()
    query = (q_at - (N - M if causal else 0)).clamp_min(0).long()  # an empty place reads query 0
    live = q_at >= 0
    limit = tau.to(dtype)[where_h]

    peak = q.new_full(q_at.shape, float("-inf"), dtype=dtype)
    total = torch.zeros_like(peak)
    summed = q.new_zeros((*q_at.shape, Dv), dtype=dtype)
    visited, low = torch.zeros_like(count), torch.zeros_like(count)

    running = (count > 0).nonzero().flatten()
    for i in range(order.shape[1]):
        if not len(running):
            break
        b, h = where_b[running], where_h[running]
        slots = k_blocks[
            b if k_blocks.shape[0] > 1 else 0,
            h if k_blocks.shape[1] > 1 else 0,
            group[row[running]].long(),
            order[running, i],
        ]  # [running, k_block]
        there, token = (slots >= 0).unsqueeze(1), slots.clamp_min(0).long()
        allowed = there & (slots.unsqueeze(1) <= q_at[running].unsqueeze(2)) if causal else there
        queries = q[b[:, None], h[:, None], query[running]].to(dtype)
        keys, values = (x[b[:, None], h[:, None] // (Hq // Hkv), token].to(dtype) for x in (k, v))
        logits = products(queries.unsqueeze(0), keys.unsqueeze(0)).squeeze(0) * scale
        logits = logits.masked_fill(~allowed, float("-inf"))  # [running, q_block, k_block]

        new_peak = torch.maximum(peak[running], logits.amax(-1))
        origin = new_peak.masked_fill(new_peak == float("-inf"), 0.0)
        weight = (logits - origin.unsqueeze(-1)).exp()
        rescale = (peak[running] - origin).exp()
        before, gain = total[running] * rescale, weight.sum(-1)  # both relative to the new maximum
        # An empty slot reads the value of token 0. Its weight is 0, but 0 times an infinity would be NaN.
        values = values.masked_fill(~there.transpose(1, 2), 0.0)
        added = products(weight.unsqueeze(0), values.mT.unsqueeze(0)).squeeze(0)
        after = summed[running] * rescale.unsqueeze(-1) + added

        share = (gain / before.masked_fill(before == 0, 1.0)).masked_fill(before == 0, float("inf"))
        share, present = share.masked_fill(~live[running], 0.0), live[running].sum(-1)
        if mean:
            satisfied = share.sum(-1) < limit[running] * present
        else:
            satisfied = share.amax(-1) < limit[running]
        asked = i >= opened[running]
        low[running] = (low[running] + 1).where(satisfied & asked, 0).to(low.dtype)
        stops = low[running] >= patience
        counts = ~stops | commit
        taken = running[counts]
        peak[taken], total[taken] = new_peak[counts], (before + gain)[counts]
        summed[taken] = after[counts]
        visited[taken] += 1
        running = running[~stops & (i + 1 < count[running])]

    out, lse, _ = _outputs(q, v, opened)
    out, lse = out.zero_(), lse.fill_(float("-inf"))
    result = summed / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    place, slot = live.nonzero(as_tuple=True)
    at = (where_b[place], where_h[place], query[place, slot])
    out[at] = result[place, slot].to(out.dtype)
    lse[at] = (total.log() + peak)[place, slot]
    return out, lse, visited.view(B, Hq, rows)
