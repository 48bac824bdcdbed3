"""Means of cells, and the best product of two groups of tokens.

`strided_means` rounds the mean query and the mean key of each cell to the precision of the queries and keys:

    out[b, h, i] = sum_r x[b, h, r] / (tokens of cell i)

over the tokens `r` of cell `i`. On GPUs one launch reads every token once, through an index map if one is given, so that no
token is moved. It and the plain torch below add the tokens of a cell one after another in fp32 and round the quotient once, so
that they give the same bits. Products of these means follow on tensor cores.

`group_max`: a group is `g` consecutive slots. The product of two groups is `q[t] . k[t]` summed over their places `t`; the
score of a block is the best product of its pairs of groups. A pair takes part if the row of blocks may see some key of the
group, and if some slot has a token in both groups. Short groups are compared over the tokens that are there.
The kernel keeps no product; it leaves out blocks that do not fill tiles, and sliding windows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import FLOATS, on_gpus
from blocksparse.kernels.common.sizes import ROOM, cdiv
from blocksparse.kernels.gemm.products import StridedPooling, products, strided_view, wide_dtype
from blocksparse.kernels.layout.gather import gather_rows
from blocksparse.kernels.score import cpu_scores


@on_gpus(*FLOATS)
def strided_means(
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
        lead: empty slots before the first query in its cell. Fewer than `slots`.
        padded_tail: divide the sum of a short cell by `slots` instead of by its tokens.
        q_index: query in each slot. `[B, Hq, M]` int32.
        k_index: key in each slot. `[B, H, N]` int32. `Hkv` divides `H`.
    """
    return strided_mean.reference(q, slots, lead, padded_tail, q_index), strided_mean.reference(
        k, slots, 0, padded_tail, k_index
    )


@on_gpus(*FLOATS)
def strided_mean(
    x: Tensor, slots: int, lead: int = 0, padded_tail: bool = False, index: Tensor | None = None
) -> Tensor:
    """Means of cells of queries or of keys alone: `[B, H, cells, D]` of `x` `[B, Hx, N, D]`."""
    x = x if index is None else gather_rows.reference(x, index)
    by_slot = strided_view(x, slots, lead).unbind(3)  # `slots` of [B, H, cells, D]
    sums = by_slot[0].to(wide_dtype(x), copy=True)
    for tokens in by_slot[1:]:
        sums += tokens
    if padded_tail:
        return sums.div_(slots).to(x.dtype)
    start = torch.arange(sums.shape[2], device=x.device) * slots - lead
    count = (start + slots).clamp(max=x.shape[2]) - start.clamp(min=0)
    return sums.div_(count.to(sums.dtype).unsqueeze(1)).to(x.dtype)


_WORKSPACE = 2**25  # products of groups that are held at a time


def _fills_tiles(q: Tensor, k: Tensor, of: StridedPooling, *, first_row: int, per_token: bool) -> bool:
    return not of.windowed and all(size & (size - 1) == 0 and size <= 64 for size in (of.high, of.wide))


@on_gpus(*FLOATS, where=_fills_tiles)
def group_max(q: Tensor, k: Tensor, of: StridedPooling, *, first_row: int, per_token: bool) -> Tensor:
    """Best product of every block, `[B, Hq, rows, cols]` fp32 or better; -inf where no pair takes part.

    With `padded_tail`, what takes no part counts as 0, and with `per_token` as well products are divided by the slots of a
    group.

    Args:
        q: `[B, Hq, M, D]`, in slot order.
        k: `[B, H, N, D]`, in slot order. H divides Hq.
        of: the groups, as cells. With the last position of each row of blocks.
        first_row: index of row 0 in the whole prompt.
        per_token: divide a product by the number of places that have a token in both groups.
    """
    M, N, device = q.shape[2], k.shape[2], q.device
    q_lead, causal, padded_tail, q_last, k_first = of.q_lead, of.causal, of.padded_tail, of.q_last, of.k_first
    q_floor, k_last = of.q_floor, of.k_last
    # A group, or a block, far larger than the prompt is cut to one that holds all tokens, and takes no more memory.
    longest = max(q_lead + M, N, ROOM)
    g = min(of.slots, longest)
    high, groups = min(of.high, cdiv(longest, g)), cdiv(N, g)
    wide = min(of.wide, groups)
    rows, cols = cdiv(q_lead + M, g * high), cdiv(groups, wide)
    queries = pad(q, (0, 0, q_lead, rows * high * g - q_lead - M)).unflatten(2, (-1, g)).flatten(3)
    keys = pad(k, (0, 0, 0, groups * g - N)).unflatten(2, (-1, g)).flatten(3)
    if q_last is None or k_first is None:
        q_last = (torch.arange(first_row + 1, first_row + rows + 1, device=device) * high - 1).view(1, 1, -1)
        k_first = torch.arange(groups, device=device).view(1, 1, -1)
        if of.behind is not None:
            q_floor, k_last = q_last - high - of.behind, k_first

    start = torch.arange(0, rows * high * g, g, device=device).unsqueeze(1)
    ends = (q_lead + M - start, N - torch.arange(0, N, g, device=device))
    places = torch.minimum(*ends).clamp_max(g) - (q_lead - start).clamp_min(0)  # that a pair shares; none if <= 0
    left_out = 0.0 if padded_tail else float("-inf")
    step = max(1, _WORKSPACE // (q.shape[0] * q.shape[1] * high * groups))
    best = []
    multiply = cpu_scores.products_on_cpu if q.dtype.itemsize == 2 and cpu_scores.takes(q, k) else products
    for top in range(0, rows, step):
        product = multiply(queries[:, :, top * high : (top + step) * high], keys)
        shared = places[top * high : (top + step) * high]
        if per_token:
            product = product / (g if padded_tail else shared.clamp_min(1))
        takes_part = shared > 0
        if causal:
            seen = k_first.unsqueeze(2) <= q_last[..., top : top + step].unsqueeze(3)
            if q_floor is not None and k_last is not None:
                seen = seen & (k_last.unsqueeze(2) > q_floor[..., top : top + step].unsqueeze(3))
            takes_part = takes_part & seen.repeat_interleave(high, dim=2)
        product = product.masked_fill(~takes_part, left_out)  # [B, Hq, step * high, groups]
        product = pad(product, (0, cols * wide - groups), value=left_out)
        best.append(product.unflatten(3, (cols, wide)).amax(4).unflatten(2, (-1, high)).amax(3))
    return torch.cat(best, dim=2)
