"""What pooling scorers share: means of blocks, and products under GQA."""

from __future__ import annotations

from attrs import validators
from torch import Tensor

from blocksparse.kernels import cell_products
from blocksparse.kernels.block_mean import block_mean as mean_of_blocks
from blocksparse.scorers.grid import Grid

size = [validators.instance_of(int), validators.gt(0)]
"""Validator of a number of tokens."""


def block_mean(
    x: Tensor, block: int, *, lead: int = 0, padded_tail: bool = False, index: Tensor | None = None
) -> Tensor:
    """Mean over the tokens of each block, `[B, Hx, N, D] -> [B, H, blocks, D]`, summed in fp32 or better.

    Args:
        block: slots per block.
        lead: empty places before the first token in block 0, fewer than `block`.
        padded_tail: divide a short block by the whole block instead of by its tokens.
        index: the token in each slot, `[B, H, N]` int32; by default tokens are in place, and `H` is `Hx`.
    """
    mean: Tensor = mean_of_blocks(x, block, lead=lead, padded_tail=padded_tail, index=index)
    return mean


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every query row with every key row, `[B, Hq, rows, D]` and `[B, H, cols, D]` to `[B, Hq, rows, cols]`.

    `H` divides `Hq`; keys are not repeated. Summed in fp32 or better.
    """
    sums: Tensor = cell_products.products(q, k)
    return sums


def own_segment(grid: Grid, segment: int | None) -> Tensor | None:
    """What PBS-Attn forces: the row's own segment; nothing without segments or without causality."""
    return grid.own_segment(segment) if segment is not None and grid.causal else None
