"""Residual compensation: the blocks that are not kept enter attention by their mean keys and values.

    with o, z the output and the softmax denominator of the kept pairs, and n_j, k_j, v_j the tokens of block j and their
    mean key and mean value:

        z' = z + sum_j n_j exp(scale q . k_j),    o' = (z o + sum_j n_j exp(scale q . k_j) v_j) / z'

over the blocks `j` that a row does not keep and that every query of it sees whole. On a GPU it takes three launches. One
pools keys and values, one selects the blocks of each row, and one attends with all queries to these means and joins the
result to `o`. So the kernels of exact attention do not change, and it takes about `1 / block` of dense attention's time.

A block of which a mean is not finite gives NaN to the queries that it enters, and no bit to others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import for_heads
from blocksparse.kernels.common.tiles import TritonTiles
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.kernels.layout.gather import rows_at
from blocksparse.kernels.masks.arguments import KeptBlocks
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.score.block_mean import block_mean

_LOGITS = 2**26  # that are held at a time


@on_gpus(of=lambda q, *_, **__: q, where=lambda *_, tiles=None, **__: tiles is not None)
def add_mean_correction(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: KeptBlocks,
    *,
    scale: float,
    softcap: float | None = None,
    tiles: TritonTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the lse with the mean correction, `[B, Hq, M, Dv]` and `[B, Hq, M]`, in new memory.

    Args:
        q: `[B, Hq, M, D]`, in original order, as `k`, `v` `[B, Hkv, N, ...]`, `out` and `lse` are.
        out: attention over the kept pairs. Where a query has none, 0.
        lse: its lse, with a layer's sinks if it has them.
        tiles: how the kernel is launched, which takes tensors on a GPU alone. None is plain torch, a few rows of blocks at
            a time.
    """
    q_index, k_block = kept.q_index, kept.grid.k_block
    (B, Hq, M, _), N = q.shape, k.shape[2]
    keys, values = (block_mean(x, k_block, index=kept.key_slots) for x in (k, v))  # [B, H, cols, ...]
    bad = ~(keys.isfinite().all(-1) & values.isfinite().all(-1))  # [B, H, cols]
    keys, values = (x.masked_fill(bad.unsqueeze(-1), 0.0) for x in (keys, values))
    keys = keys.to(q.dtype)  # which multiplies on tensor cores, as in Sol-Attn's code
    cols = keys.shape[2]
    size = torch.full((cols,), float(k_block), dtype=wide_dtype(q), device=q.device)
    size[-1] = N - (cols - 1) * k_block
    dropped = for_heads(~kept.keep & seen_whole(kept.grid), Hq)
    bad = for_heads(bad, Hq).unsqueeze(2)
    place = torch.arange(M, device=q.device) + kept.grid.q_lead
    results, sums = [], []
    for first in range(0, M, step := max(1, _LOGITS // (B * Hq * cols))):
        row = place[first : first + step] // kept.grid.q_block
        query = (
            q[:, :, first : first + step] if q_index is None else rows_at(q, q_index[:, :, first : first + step])
        )
        logits = products(query, keys) * scale
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        taken = dropped[:, :, row]
        logits = (logits + size.log()).masked_fill(~taken, float("-inf"))
        total = logits.logsumexp(-1)
        shares = (logits - total.unsqueeze(-1)).exp().masked_fill(~taken, 0.0)
        spoilt = (taken & bad).any(-1)
        results.append(products(shares, values.mT).masked_fill(spoilt.unsqueeze(-1), float("nan")))
        sums.append(total.masked_fill(spoilt, float("nan")))
    rest, of_rest = torch.cat(results, 2), torch.cat(sums, 2)
    if q_index is not None:
        order = q_index.long()
        of_rest = torch.empty_like(of_rest).scatter_(2, order, of_rest)
        rest = torch.empty_like(rest).scatter_(2, order.unsqueeze(-1).expand_as(rest), rest)
    together = torch.logaddexp(lse.to(of_rest.dtype), of_rest)
    of_exact, share = ((x.to(of_rest.dtype) - together).exp().unsqueeze(-1) for x in (lse, of_rest))
    # Where a query sees no means, not a bit of its output changes.
    joined = out.to(rest.dtype) * of_exact + rest * share
    joined = torch.where((of_rest == float("-inf")).unsqueeze(-1), out.to(rest.dtype), joined)
    return joined.to(out.dtype), together.to(lse.dtype)


def seen_whole(grid: BlockGrid) -> Tensor:
    """The blocks of which every query of their row sees every key, `[B|1, H|1, rows, cols]`; they may be short."""
    there = grid.k_last >= 0
    if not grid.causal:
        return there & (grid.q_last >= 0)
    seen = there & (grid.k_last <= grid.q_first)
    return seen if grid.window is None else seen & (grid.k_first > grid.q_last - grid.window)
