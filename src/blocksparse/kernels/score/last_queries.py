"""Weights of the last queries, the observation window: by column and diagonal, and by block.

`last_query_weights` is a softmax over all keys, summed along columns and along diagonals. The kernel for GPUs leaves out many
queries and sliding windows.

`last_query_sums` sums it over blocks of keys and over bands of distances:

    columns[b, h, j]  the mean weight that the queries give to the keys of block `j`
    bands[b, h, j]    and to the distances `j run` to `j run + run - 1`

These are `run_sums` of the two results of `last_query_weights`, in causal calls without a window. Sums over runs need no
weight of a single key, so the kernel for GPUs computes each tile of logits once. It gives sums for each query, which are
divided by the query's whole sum when that is known.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import compiled, on_gpus
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.kernels.masks.grid import is_visible
from blocksparse.kernels.score import cpu_scores

_WORKSPACE = 2**28  # bytes of probabilities that are held at a time


def _takes(last_q: Tensor, k: Tensor, q_len: int, causal: bool, scale: float, window: int | None = None) -> bool:
    from blocksparse.kernels.score.last_queries_triton import takes

    return window is None and takes(last_q)


@on_gpus(where=_takes)
@compiled(cpu_scores.last_query_weights_on_cpu, lambda last_q, k, *_, **__: cpu_scores.takes(last_q, k))
def last_query_weights(
    last_q: Tensor,  # [B, Hq, P, D], the last queries
    k: Tensor,  # [B, H, N, D], in original order; H divides Hq
    q_len: int,  # queries in all
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean weight that the queries give to each key, `[B, Hq, N]`, and to each distance, `[B, Hq, L]`; fp32 or better.

    The distance of a pair is query position minus key position, or the absolute value of that when not causal. `L` is `N`,
    or `max(q_len, N)` when not causal. With a `window` a query sees only so many tokens, its own included.
    """
    (B, Hq, P, _), N = last_q.shape, k.shape[2]
    wide = wide_dtype(k)
    vertical = torch.zeros(B, Hq, N, dtype=wide, device=k.device)
    slash = torch.zeros(B, Hq, N if causal else max(q_len, N), dtype=wide, device=k.device)
    first = (N if causal else q_len) - P  # position of the first of the last queries
    position = torch.arange(N, device=k.device)
    step = max(1, _WORKSPACE // (B * Hq * N * wide.itemsize))
    for top in range(0, P, step):
        rows = last_q[:, :, top : top + step]
        count, begin = rows.shape[2], first + top
        logits = products(rows, k).mul_(scale)
        if causal:
            query = torch.arange(begin, begin + count, device=k.device)
            seen = is_visible(query[:, None], position, causal=causal, window=window)
            logits.masked_fill_(~seen, float("-inf"))
        weight = logits.softmax(-1)
        vertical += weight.sum(2)
        diagonals = _sums_of_diagonals(weight)  # from distance begin - (N - 1) to begin + count - 1
        ahead = max(N - 1 - begin, 0)  # how many of them belong to keys after the query
        slash[..., max(begin - N + 1, 0) : begin + count] += diagonals[..., ahead:]
        if not causal:
            slash[..., 1 : 1 + ahead] += diagonals[..., :ahead].flip(-1)
    return vertical / P, slash / P


def _sums_of_diagonals(x: Tensor) -> Tensor:
    """Sums of `x` `[B, H, rows, N]` where row minus column is 1 - N, ..., rows - 1: `[B, H, rows + N - 1]`."""
    rows, N = x.shape[-2:]
    # Rows are stored with `rows` zeros at their end, and read again as if they had one entry less. So each row stands one
    # column further on than the row before it, and a diagonal becomes a column.
    stored = pad(x.flip(-1), (0, rows)).flatten(-2)
    sums: Tensor = stored[..., : rows * (rows + N - 1)].unflatten(-1, (rows, -1)).sum(-2)
    return sums


_RUNS = 64, 128  # shorter runs are tiles too small to be worth it


def last_query_sums(
    last_q: Tensor,  # [B, Hq, P, D], the last queries
    k: Tensor,  # [B, H, N, D], in original order; H divides Hq
    scale: float,
    run: int,
) -> tuple[Tensor, Tensor] | None:
    """`columns` and `bands`, `[B, Hq, ceil(N / run)]` fp32 each; None where no kernel takes such queries."""
    if last_q.is_cuda and run in _RUNS:
        from blocksparse.kernels.score import last_queries_triton

        if last_queries_triton.takes_sums(last_q, run):
            return last_queries_triton.last_query_sums_triton(last_q, k, scale, run)
    return None
