"""What any of several heads keeps of a mask."""

from __future__ import annotations

from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus


@on_gpus()
def any_head(keep: Tensor, heads: int) -> Tensor:
    """The blocks of `keep` `[B, H, rows, cols]` bool that any of `H / heads` heads keeps, `[B, heads, rows, cols]`."""
    kept: Tensor = keep.unflatten(1, (heads, -1)).any(2)
    return kept


@on_gpus()
def visited_columns(keep: Tensor, heads: int) -> Tensor:
    """The key blocks that kernels may read with the lists of `keep` `[B, H, rows, cols]`, `[B, heads, cols]` bool.

    These are the blocks that any row of any of the `H / heads` heads keeps, and block 0, since the lists of rows without
    any name that one.
    """
    visited: Tensor = keep.unflatten(1, (heads, -1)).any((2, 3))
    visited[..., 0] = True
    return visited
