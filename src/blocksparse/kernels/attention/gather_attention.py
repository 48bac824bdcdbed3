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

from blocksparse.kernels.attention.arguments import RankedLists, StopRule
from blocksparse.kernels.common.hardware import is_hopper
from blocksparse.kernels.moving.gathered_rows import GatheredRows
from blocksparse.kernels.positions.token_positions import TokenPositions

_LEAST_TRIED, _MOST_TRIED = (
    2,
    8,
)  # blocks of a row that plain torch attends to before it asks whether the row stops
_AT_ONCE = 256  # the most of all rows, unless each tries the least


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: RankedLists, positions: TokenPositions, rule: StopRule, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`out` `[B, Hq, M, Dv]` of the dtype of v, `lse` `[B, Hq, M]` fp32 or better, blocks visited `[B, Hq, rows]` int32.

    `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]` are in original order.
    """
    compute = gather_attention_reference
    if is_hopper(q.device) and fits_hopper(q, v, lists.q_block, lists.k_block, rule.commit):
        from blocksparse.kernels.attention.gather_attention_hopper import gather_attention_hopper as compute
    elif q.is_cuda and q.dtype != torch.float64:
        from blocksparse.kernels.attention.gather_attention_triton import gather_attention_triton as compute
    if positions.window is not None:
        raise ValueError(f"attention that stops early knows no sliding window: {positions.window}")
    return compute(q, k, v, lists, positions, rule, scale=scale)


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
    """The same in plain torch: a row attends to the blocks that it opens all at once, then to others one by one.

    The lse of a block says how much it adds to the denominators. A few blocks of a row are tried at a time, and merged in
    their order until it stops; how many does not depend on other rows, so neither does any bit of the result. The host asks
    which rows still run, so on a GPU it waits for the device.
    """
    rows = GatheredRows(q, k, v, lists.index, positions, q_block=lists.q_block, k_block=lists.k_block, scale=scale)
    opened, count = lists.opened.flatten(), lists.count.flatten()
    for blocks in opened.unique().tolist():
        alike = (opened == blocks).nonzero().squeeze(1)
        place = torch.arange(blocks, device=q.device).expand(len(alike), 1, -1)
        for at, *sets in rows.teams(alike, place) if blocks else ():
            out, lse = rows.attend(at, *sets)
            rows.out[at], rows.lse[at] = out.squeeze(1), lse.squeeze(1)

    visited, low, runs = opened.clone(), torch.zeros_like(opened), count > opened
    done = 0
    while len(at := runs.nonzero().squeeze(1)):
        # Rows that have visited many blocks are likely to visit many more. What is tried after the last is in vain.
        tried = min(max(_LEAST_TRIED, done // 4), _MOST_TRIED)
        done += tried
        place = visited[at, None] + torch.arange(tried, device=at.device)
        place = torch.minimum(place, count[at, None] - 1).unsqueeze(2)  # each block is a set
        for some, *sets in rows.teams(at, place):
            runs[some] = _visit(rows, some, *rows.attend(some, *sets), visited, low, count, rule)
    out, lse = rows.results()
    return out, lse, visited.view(lists.count.shape)


def _visit(
    rows: GatheredRows,
    at: Tensor,
    outs: Tensor,
    lses: Tensor,
    visited: Tensor,
    low: Tensor,
    count: Tensor,
    rule: StopRule,
) -> Tensor:
    """Merge the next blocks of the rows `at` `[n]` until each row stops, and say which go on, `[n]`.

    Args:
        outs: attention to each of these blocks, `[n, tried, q_block, Dv]`; lses: its lse, `[n, tried, q_block]`.
        visited: of all rows, `[R]`, like the next two: how many blocks they have visited.
        low: how many of them in succession have added little.
        count: how many they visit at most.
    """
    live, limit = rows.live[at], rule.tau.to(lses.dtype)[rows.head[at]]
    out, lse, lows, number = (x.index_select(0, at) for x in (rows.out, rows.lse, low, visited))
    runs = number < count[at]
    for i in range(outs.shape[1]):
        # The gain of the block over the denominator before it. An lse of -inf says that there was none.
        gain = (lses[:, i] - lse).masked_fill_(lse == float("-inf"), float("inf")).exp_()
        share = gain.masked_fill(~live, 0.0)
        low_now = share.sum(-1) < limit * live.sum(-1) if rule.mean else share.amax(-1) < limit
        lows = (lows + 1).where(low_now, 0)
        stops = runs & (lows >= rule.patience)
        counts = runs if rule.commit else runs & ~stops
        part = outs[:, i]
        if not bool(counts.all()):
            part[~counts] = 0.0  # it must not meet a weight of 0 as it is, since it may be infinite
            gain.masked_fill_(~counts.unsqueeze(1), 0.0)
        # Not `sigmoid` and `logaddexp`, which round the last numbers of a tensor in another way than those before.
        kept = (1 + gain).reciprocal_().unsqueeze(2)
        out.mul_(kept).addcmul_(part, 1 - kept)
        lse = lses[:, i].where(gain == float("inf"), lse + gain.log1p())
        number = number + counts
        runs = runs & ~stops & (number < count[at])
    for of_all, new in ((rows.out, out), (rows.lse, lse), (low, lows), (visited, number)):
        of_all.index_copy_(0, at, new.to(of_all.dtype))
    return runs
