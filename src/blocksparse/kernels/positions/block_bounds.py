"""The first and the last original position in every block of query places and of key slots.

On a GPU one launch serves both sides; other devices take the plain torch below.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int32).max

Bounds = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def block_bounds(q_position: Tensor, k_position: Tensor, q_block: int, k_block: int, heads: int) -> Bounds:
    """Bounds of the blocks of queries and keys.

    Args:
        q_position: `[B|1, H|1, rows * q_block]` int32, -1 where empty.
        k_position: `[B|1, H|1, G, cols * k_block]` int32, -1 where empty.
        heads: heads of the result if `H` is more than 1; a multiple of `H`, and heads are repeated.

    Returns:
        `q_first`, `q_last` `[B|1, heads|1, rows, 1]`, `k_first`, `k_last` `[B|1, heads|1, G, cols]` int32, and
        `k_whole` bool, whether no slot is empty. A block of empty slots goes from `NEVER` to -1.
    """
    if q_position.is_cuda:
        from blocksparse.kernels.positions.block_bounds_triton import block_bounds_triton

        return block_bounds_triton(q_position, k_position, q_block, k_block, heads)
    return block_bounds_reference(q_position, k_position, q_block, k_block, heads)


def block_bounds_reference(
    q_position: Tensor, k_position: Tensor, q_block: int, k_block: int, heads: int
) -> Bounds:
    """The same in plain torch."""
    q_first, q_last, _ = _side(q_position.unsqueeze(2), q_block, heads)
    return q_first.mT, q_last.mT, *_side(k_position, k_block, heads)


def _side(position: Tensor, block: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = position.unflatten(-1, (-1, block))
    there = blocks >= 0
    bounds = blocks.where(there, NEVER).amin(-1), blocks.amax(-1), there.all(-1)
    H = position.shape[1]
    if H in (1, heads):
        return bounds
    first, last, whole = (x.repeat_interleave(heads // H, dim=1) for x in bounds)
    return first, last, whole
