"""Scores of blocks: their softmax, those that are too unlike to count, and the divergence of two.

`block_softmax` and `prefix_softmax` go over the blocks, or over the first keys, that a row may see:

    mass[row, col] = exp(scale * logits[row, col]) / sum of the same over the row's eligible columns

and 0 where a column is not eligible. A row without an eligible column holds no mass, nor does a logit of -inf.
The kernel reads and writes each logit once and makes no mask.

`gate_blocks` forces blocks in rows and columns whose tokens are too unlike each other for one score to speak for them:

    unlike[block] = not similarity[block] > theta
    forced[row, col] = visible and (unlike[row] or unlike[col] or forced before)
    values[row, col] = 0 where unlike[col]

`block_divergence` is the square root of the Jensen-Shannon divergence of pooled weights from true ones (FlexPrefill):

    p = softmax(scale logits),  m = (p + q) / 2,  out = sqrt((sum p ln(p / m) + sum q ln(q / m)) / 2)

Weights of 0 add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import Heads
from blocksparse.kernels.masks.grid import BlockGrid


@on_gpus(torch.float32)
def block_softmax(
    logits: Tensor, grid: BlockGrid, *, scale: float = 1.0, segment: int | None = None, heads: Heads = None
) -> tuple[Tensor, Tensor | None]:
    """Softmax of `logits` `[B, H, rows, cols]` over each row's visible blocks; it may overwrite the logits.

    Args:
        scale: a positive number that logits are multiplied by.
        segment: also leave out the row's own segment. Segments have this many positions.
        heads: without a segment, those whose mass is asked for. In the others it is 0.

    Returns:
        The mass, in fp32 or better; and with `segment` the blocks of each row's own segment, `[B|1, H|1, rows, cols]`
        bool, else None.
    """
    own = None if segment is None else grid.own_segment(segment)
    eligible = grid.visible if own is None else grid.visible & ~own
    return _softmax(logits * scale, eligible if heads is None else eligible & heads.these()), own


@on_gpus(torch.float32)
def prefix_softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax of `logits` `[B, H, rows, keys]` over the first `seen` keys of each row; it may overwrite the logits.

    Args:
        seen: `[B|1, H|1, rows|1, 1]`, of any integer dtype and value.
    """
    return _softmax(logits, torch.arange(logits.shape[-1], device=logits.device) < seen)


def _softmax(logits: Tensor, eligible: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    eligible = eligible & (logits != float("-inf"))
    return logits.masked_fill(~eligible, float("-inf")).softmax(dim=-1).masked_fill(~eligible, 0.0)


@on_gpus(torch.float32)
def gate_blocks(
    values: Tensor, of_q: Tensor, of_k: Tensor, theta: float | Tensor, forced: Tensor | None, grid: BlockGrid
) -> tuple[Tensor, Tensor]:
    """Gated `values` `[B, Hq, rows, cols]`, in separate memory, and `forced`, bool of the same shape.

    Args:
        of_q: `[B, Hq, rows]`, the similarity of the tokens of query blocks. NaN is not similar.
        of_k: `[B, H, cols]`, that of key blocks. `H` divides Hq.
        theta: a number, or `[1, Hq|1, 1, 1]`, rounded to the dtype of similarities.
        forced: `[B|1, Hq|1, rows, cols]` bool, what was forced before.
    """
    if not isinstance(theta, Tensor):
        theta = torch.full((1, 1, 1, 1), theta, dtype=torch.float64, device=values.device)
    theta, of_k = theta.to(of_q.dtype), of_k.repeat_interleave(values.shape[1] // of_k.shape[1], dim=1)
    unlike_row, unlike_col = ~(of_q.unsqueeze(-1) > theta), ~(of_k.unsqueeze(-2) > theta)
    chosen = unlike_row | unlike_col
    chosen = chosen if forced is None else chosen | forced
    return values.masked_fill(unlike_col, 0.0), (chosen & grid.visible).expand(values.shape)


LONGEST = 32768


@on_gpus(torch.float32, where=lambda logits, true, *_: true.dtype == torch.float32 and logits.shape[-1] <= LONGEST)
def block_divergence(logits: Tensor, true: Tensor, scale: float = 1.0) -> Tensor:
    """`[B, H]`, from 0 to sqrt(ln 2), for `logits` and weights `true` `[B, H, cols]`."""
    pooled = (logits * scale).softmax(-1)
    mean = (pooled + true) / 2
    parts = (torch.xlogy(x, x) - torch.xlogy(x, mean) for x in (pooled, true))
    return (sum(parts, torch.zeros_like(pooled)).sum(-1) / 2).clamp_min(0.0).sqrt()
