"""A choice of blocks as a mask on a grid: spread over finer blocks, with the diagonal, as far as queries can see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blocksparse.kernels.block_grid import BlockGrid
from blocksparse.kernels.counter_hash import counter_hash
from blocksparse.kernels.sizes import FAR


class Places(NamedTuple):
    """Blocks that are chosen for where they lie, as numbers that the kernel compares; None chooses none.

    Numbers of any size: what is beyond every position is taken as `FAR`.
    """

    near: int | None = None  # `BlockGrid.within` so many tokens
    first: int | None = None  # `BlockGrid.holding_first` so many tokens
    stride: tuple[int, int] | None = None  # one of so many blocks in a row, from an offset drawn with this seed

    def joined(self, other: Places) -> Places | None:
        """Both as one; None where both say how many of a kind."""
        pairs = list(zip(self, other, strict=True))
        if any(a is not None and b is not None for a, b in pairs):
            return None
        return Places(*(b if a is None else a for a, b in pairs))

    def fitted(self) -> Places:
        """The same places in numbers that fit the kernel's; its twin sees to that itself."""
        return Places(
            None if self.near is None else min(self.near, FAR),
            None if self.first is None else min(self.first, FAR),
            None if self.stride is None else (min(self.stride[0], FAR), self.stride[1]),
        )


NOWHERE = Places()


def within_reach(
    keep: Tensor | None,
    grid: BlockGrid,
    n: int = 1,
    skipped: int = 0,
    *,
    places: Places = NOWHERE,
    diagonal: bool = False,
) -> Tensor:
    """The blocks of `grid` that `keep` or `places` choose and some query can see, `[B|1, H|1, rows, cols]` bool.

    One launch on a GPU; on other devices the plain torch below. Batch entries and heads for which neither `keep` nor
    the positions differ stay one.

    Args:
        keep: bool, each entry `n` x `n` blocks of `grid`: `[B|1, H|1, ceil((rows + skipped) / n), ceil(cols / n)]`.
            If `n` is 1 its last axes may be 1, and those before missing. None chooses none.
        skipped: rows of blocks at the start of `keep` that are not part of `grid`.
        diagonal: keep `grid.diagonal` too.
    """
    if grid.q_first.is_cuda:
        from blocksparse.kernels.within_reach_triton import within_reach_triton as compute
    else:
        compute = within_reach_reference
    return compute(keep, grid, n, skipped, places=places, diagonal=diagonal)


def within_reach_reference(
    keep: Tensor | None,
    grid: BlockGrid,
    n: int = 1,
    skipped: int = 0,
    *,
    places: Places = NOWHERE,
    diagonal: bool = False,
) -> Tensor:
    """The same in plain torch."""
    reachable = grid.reachable
    chosen = torch.zeros_like(reachable) if keep is None else keep
    if n > 1:
        chosen = chosen.repeat_interleave(n, dim=-2).repeat_interleave(n, dim=-1)
        chosen = chosen[..., skipped : skipped + reachable.shape[-2], : reachable.shape[-1]]
    if places.near is not None:
        chosen = chosen | grid.within(places.near)
    if places.first is not None:
        chosen = chosen | grid.holding_first(places.first)
    if places.stride is not None:
        chosen = chosen | every(*places.stride, grid)
    return (chosen | grid.diagonal if diagonal else chosen) & reachable


def every(eta: int, seed: int, grid: BlockGrid) -> Tensor:
    """One of every `eta` blocks of a row, from an offset drawn for the row, `[1, 1, rows, cols]` bool."""
    eta, rows, cols = min(eta, FAR), grid.q_first.shape[2], grid.k_first.shape[3]
    i = torch.arange(grid.first_row, grid.first_row + rows, device=grid.q_first.device)
    j = torch.arange(cols, device=i.device)
    # Their sum is a multiple of eta; reduced before they meet, they meet once.
    return (j % eta == -counter_hash(seed, i).unsqueeze(1) % eta)[None, None]
