"""Mean query and mean key of each small cell, rounded to the precision of the queries and keys.

    cell_means        out[b, h, i] = sum_r x[b, h, r] / (tokens of cell i)

over the tokens `r` of cell `i`. On GPUs one launch reads every token once, through an index map if one is given, so that no
token is moved; CPU tensors and float64 take the plain torch below. Both add the tokens of a cell one after another in fp32
and round the quotient once, so that they give the same bits: products of these means follow on tensor cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import FLOATS, on_gpus
from blocksparse.kernels.moving.gather_rows import gather_rows
from blocksparse.kernels.multiplying.cell_products import cells
from blocksparse.kernels.multiplying.products import wide_dtype


@on_gpus(*FLOATS)
def cell_means(
    q: Tensor,
    k: Tensor,
    slots: int,
    lead: int = 0,
    padded_tail: bool = False,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Means of `q` `[B, Hq, M, D]` and of `k` `[B, Hkv, N, D]`, `[B, Hq, q cells, D]` and `[B, H, k cells, D]`.

    Args:
        slots: tokens per cell.
        lead: empty slots before the first query in its cell, fewer than `slots`.
        padded_tail: divide the sum of a short cell by `slots` instead of by its tokens.
        q_index: `[B, Hq, M]` int32, the query in each slot.
        k_index: `[B, H, N]` int32, the key in each slot; `Hkv` divides `H`.
    """
    return cell_mean.plain(q, slots, lead, padded_tail, q_index), cell_mean.plain(
        k, slots, 0, padded_tail, k_index
    )


@on_gpus(*FLOATS)
def cell_mean(
    x: Tensor, slots: int, lead: int = 0, padded_tail: bool = False, index: Tensor | None = None
) -> Tensor:
    """The same of queries or of keys alone: `[B, H, cells, D]` of `x` `[B, Hx, N, D]`."""
    x = x if index is None else gather_rows.plain(x, index)
    by_slot = cells(x, slots, lead).unbind(3)  # `slots` of [B, H, cells, D]
    sums = by_slot[0].to(wide_dtype(x), copy=True)
    for tokens in by_slot[1:]:
        sums += tokens
    if padded_tail:
        return sums.div_(slots).to(x.dtype)
    start = torch.arange(sums.shape[2], device=x.device) * slots - lead
    count = (start + slots).clamp(max=x.shape[2]) - start.clamp(min=0)
    return sums.div_(count.to(sums.dtype).unsqueeze(1)).to(x.dtype)
