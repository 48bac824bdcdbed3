"""What a call asks for, as tests write it, and which pairs its mask means."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from blocksparse.grid import Grid
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """What may be None and must not be."""
    assert value is not None
    return value


def wrong(value: Any) -> Any:
    """What a type checker would refuse."""
    return value


def asked(mask: BlockMask, scale: float = 1.0, **more: Any) -> AttentionSpec:
    """The spec for which a mask was made; a mask does not know the scale, the softcap and the sinks."""
    return AttentionSpec(scale=scale, causal=mask.grid.causal, window=mask.grid.window, **more)


def grid_of(
    q: Tensor,
    k: Tensor,
    q_block: int,
    k_block: int | None = None,
    *,
    permutation: Permutation | None = None,
    **asked: Any,
) -> Grid:
    """The grid of a call, of blocks of as many keys as queries unless both are said; a grid knows no scale."""
    spec = AttentionSpec(scale=1.0, **asked)
    return Grid.of(q, k, permutation or GlobalPermutation(), spec, q_block=q_block, k_block=k_block or q_block)


def kept(mask: BlockMask, row: int = 0, head: int = 0) -> list[int]:
    """The columns of blocks that a row of one head keeps, in the first batch entry."""
    columns: list[int] = mask.keep[0, head, row].nonzero().flatten().tolist()
    return columns


def kept_pairs(mask: BlockMask) -> Tensor:
    """The meaning of a mask, `[B, Hq, M, N]` bool, queries in original order."""
    grid = mask.grid
    shape = mask.keep.shape[0], grid.q_heads, grid.q_len, grid.k_len
    pairs = torch.zeros(shape, dtype=torch.bool, device=mask.keep.device)
    for row in range(grid.rows):
        index = mask.queries(row).unsqueeze(-1).expand(-1, -1, -1, grid.k_len)
        pairs.scatter_(2, index, mask.pairs(row))
    return pairs
