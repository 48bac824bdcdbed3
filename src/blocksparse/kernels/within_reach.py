"""A choice of blocks as a mask on a grid: spread over finer blocks, with the diagonal, as far as queries can see."""

from __future__ import annotations

from torch import Tensor

from blocksparse.kernels.block_grid import BlockGrid


def within_reach(keep: Tensor, grid: BlockGrid, n: int = 1, skipped: int = 0, *, diagonal: bool = False) -> Tensor:
    """The blocks of `grid` that `keep` chooses and some query can see, `[B|1, H|1, rows, cols]` bool.

    One launch on a GPU; on other devices the plain torch below. Batch entries and heads for which neither `keep` nor
    the positions differ stay one.

    Args:
        keep: bool, each entry `n` x `n` blocks of `grid`: `[B|1, H|1, ceil((rows + skipped) / n), ceil(cols / n)]`.
            If `n` is 1 its last axes may be 1.
        skipped: rows of blocks at the start of `keep` that are not part of `grid`.
        diagonal: keep `grid.diagonal` too.
    """
    if keep.is_cuda:
        from blocksparse.kernels.within_reach_triton import within_reach_triton

        return within_reach_triton(keep, grid, n, skipped, diagonal=diagonal)
    return within_reach_reference(keep, grid, n, skipped, diagonal=diagonal)


def within_reach_reference(
    keep: Tensor, grid: BlockGrid, n: int = 1, skipped: int = 0, *, diagonal: bool = False
) -> Tensor:
    """The same in plain torch."""
    reachable = grid.reachable
    if n > 1:
        keep = keep.repeat_interleave(n, dim=-2).repeat_interleave(n, dim=-1)
        keep = keep[..., skipped : skipped + reachable.shape[-2], : reachable.shape[-1]]
    return (keep | grid.diagonal if diagonal else keep) & reachable
