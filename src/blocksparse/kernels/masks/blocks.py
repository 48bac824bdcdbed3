"""The positions that blocks hold, and masks of blocks as lists.

`block_places` and `block_bounds`: one launch serves queries and keys, and makes the positions together with their bounds.

`block_lists`:

    index[row] = columns kept and full, ascending, then columns kept and partial, ascending, then zeros

On GPUs one launch counts and writes every row by itself, without a sort, and nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import for_heads, index_dtype
from blocksparse.kernels.masks.grid import BlockGrid

NEVER = torch.iinfo(torch.int32).max

Bounds = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@on_gpus()
def block_places(
    q: Tensor, k: Tensor, q_index: Tensor | None, k_index: Tensor | None, q_block: int, k_block: int, offset: int
) -> tuple[Tensor, Tensor, Bounds]:
    """The position in each place of queries and of keys, and their `block_bounds`.

    Blocks are whole: `offset % q_block` empty places come before the first query, and as many as are missing after the
    last query and the last slot of keys. An empty place holds -1.

    Args:
        q: `[B, Hq, M, D]`, of which only sizes matter, as in `k` `[B, Hkv, N, D]`.
        q_index: `[B, Hq, M]` int32, the query in each slot. None if queries stay in place.
        k_index: `[B, H, G, slots]` int32, the key in each slot, -1 where empty. None if keys stay in place.
        offset: the position of query 0. Key 0 stands at position 0.

    Returns:
        `q_position` `[B|1, Hq|1, rows * q_block]` and `k_position` `[B|1, H|1, G, cols * k_block]` int32, which may be the
        maps themselves; and the bounds.
    """
    M, N, lead = q.shape[2], k.shape[2], offset % q_block
    in_order = torch.arange(max(N, offset + M), dtype=torch.int32, device=q.device)
    if q_index is None:
        q_position = in_order[offset : offset + M].view(1, 1, M)
    else:
        q_position = q_index + offset if offset else q_index
    k_position = in_order[:N].view(1, 1, 1, N) if k_index is None else k_index
    if lead or M % q_block:
        q_position = pad(q_position, (lead, -(lead + M) % q_block), value=-1)
    if k_position.shape[-1] % k_block:
        k_position = pad(k_position, (0, -k_position.shape[-1] % k_block), value=-1)
    return q_position, k_position, block_bounds.reference(q_position, k_position, q_block, k_block, q.shape[1])


@on_gpus()
def block_bounds(q_position: Tensor, k_position: Tensor, q_block: int, k_block: int, heads: int) -> Bounds:
    """Bounds of the blocks of queries and keys.

    Args:
        q_position: `[B|1, H|1, rows * q_block]` int32. -1 where empty.
        k_position: `[B|1, H|1, G, cols * k_block]` int32, -1 where empty.
        heads: heads of the result if `H` exceeds 1. A multiple of `H`, and heads are repeated.

    Returns:
        `q_first`, `q_last` `[B|1, heads|1, rows, 1]`, `k_first`, `k_last` `[B|1, heads|1, G, cols]` int32, and
        `k_whole` bool, whether no slot is empty. A block of empty slots goes from `NEVER` to -1.
    """
    q_first, q_last, _ = _side(q_position.unsqueeze(2), q_block, heads)
    return q_first.mT, q_last.mT, *_side(k_position, k_block, heads)


def _side(position: Tensor, block: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = position.unflatten(-1, (-1, block))
    there = blocks >= 0
    bounds = blocks.where(there, NEVER).amin(-1), blocks.amax(-1), blocks.amin(-1) >= 0  # `all` is far slower
    first, last, whole = (for_heads(x, heads) for x in bounds)
    return first, last, whole


@on_gpus()
def block_lists(keep: Tensor, grid: BlockGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Full blocks and partial blocks of each row of `keep` `[B, H, rows, cols]` bool.

    Returns:
        `full_count` and `partial_count` `[B, H, rows]` int32, `index` `[B, H, rows, cols]` of `index_dtype(cols)`.
        Entries of `index` past both counts are zeros, so that a kernel may load ahead.
    """
    full = keep & grid.full
    full_count, count = full.sum(-1, dtype=torch.int32), keep.sum(-1, dtype=torch.int32)
    group = keep.to(torch.uint8) + full  # 0 for dropped, 1 for partial, 2 for full
    cols = keep.shape[-1]
    index = group.argsort(dim=-1, descending=True, stable=True).to(index_dtype(cols))
    listed = torch.arange(cols, device=keep.device) < count.unsqueeze(-1)
    return full_count, count - full_count, index.masked_fill(~listed, 0)
