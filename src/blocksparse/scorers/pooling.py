"""What pooling scorers share: means of blocks, products under GQA, and the softmax over blocks."""

from __future__ import annotations

import torch
from attrs import validators
from einops import rearrange
from torch import Tensor

from blocksparse.scorers.grid import Grid

size = [validators.instance_of(int), validators.gt(0)]
"""Validator of a number of tokens."""


def block_mean(x: Tensor, block: int, *, lead: int = 0, padded_tail: bool = False) -> Tensor:
    """Mean over the tokens of each block, `[B, H, N, D] -> [B, H, blocks, D]`, summed in fp32 or better.

    Args:
        block: slots per block.
        lead: empty places before the first token in block 0.
        padded_tail: divide a short block by the whole block instead of by its tokens.
    """
    N, dtype = x.shape[2], torch.promote_types(x.dtype, torch.float32)
    whole_from = min(-lead % block, N)
    whole_to = whole_from + (N - whole_from) // block * block
    parts = [x[:, :, whole_from:whole_to].unflatten(2, (-1, block)).mean(3, dtype=dtype)]
    for rest, first in ((x[:, :, :whole_from], True), (x[:, :, whole_to:], False)):
        if rest.shape[2]:
            count = block if padded_tail else rest.shape[2]
            mean = rest.sum(2, keepdim=True, dtype=dtype) / count
            parts = [mean, *parts] if first else [*parts, mean]
    return torch.cat(parts, dim=2)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every query row with every key row, `[B, Hq, rows, D]` and `[B, H, cols, D]` to `[B, Hq, rows, cols]`.

    `H` divides `Hq`; keys are not repeated. Summed in fp32 or better: half precision would round long sums, and
    fp16 may not hold them. A GPU's tensor cores take half precision as it is; elsewhere it is converted.
    """
    H, rows, wide = k.shape[1], q.shape[2], torch.promote_types(q.dtype, torch.float32)
    if q.dtype != wide and (not q.is_cuda or torch.version.hip is not None):
        q, k = q.to(wide), k.to(wide)
    queries = rearrange(q, "B (H G) rows D -> (B H) (G rows) D", H=H)
    keys = k.flatten(0, 1).transpose(-1, -2)
    sums = torch.bmm(queries, keys) if q.dtype == wide else torch.bmm(queries, keys, wide)
    return rearrange(sums, "(B H) (G rows) cols -> B (H G) rows cols", H=H, rows=rows)


def softmax_over(eligible: Tensor, logits: Tensor) -> Tensor:
    """Softmax of `logits` `[B, Hq, rows, cols]` over the eligible blocks of each row, fp32 or better.

    A row with nothing eligible holds no mass.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.masked_fill(~eligible, float("-inf")).softmax(dim=-1).masked_fill(~eligible, 0.0)


def own_segment(grid: Grid, segment: int | None) -> Tensor | None:
    """What PBS-Attn forces: the row's own segment; nothing without segments or without causality."""
    return grid.own_segment(segment) if segment is not None and grid.causal else None
