"""The values that selectors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.validators import is_whole, shown
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import for_heads
from blocksparse.kernels.masks.visibility import any_head, keep_visible


@frozen(eq=False)
class BlockMask:
    """Block mask: the set of blocks that are kept.

    Only visible blocks may be in it.

    Together with the permutation of its grid, a mask means a set of (query, key) pairs. These are all pairs of
    slots in kept blocks, with each slot replaced by the token that the index maps put there. Pairs that causality
    or a sliding window forbids by original position are not in it.

    Raises:
        TypeError: `keep` is not bool.
        ValueError: `keep` does not have an entry for each block of the grid, on query heads or on KV heads.
    """

    keep: Tensor  # [B, H, rows, cols] bool; H is Hq, or Hkv where query heads share one mask
    grid: Grid

    def __attrs_post_init__(self) -> None:
        grid, its = self.grid, self.keep.shape
        if self.keep.dtype != torch.bool:
            raise TypeError(f"'keep' must be bool: {self.keep.dtype}. Use .bool().")
        shape = grid.batch, grid.q_heads, grid.rows, grid.cols
        if its != shape and its != (shape[0], grid.kv_heads, *shape[2:]):
            raise ValueError(
                f"'keep' must have the shape [B, H, rows, cols] = {shape}, or Hkv={grid.kv_heads} heads where "
                f"query heads share a mask: {tuple(its)}"
            )
        if its[1] != grid.q_heads:
            object.__setattr__(self, "grid", grid.shared())  # positions that hold for all heads of a group

    def __or__(self, other: BlockMask) -> BlockMask:
        """The blocks that are in either mask; the masks must share a grid."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_same_grid(other)
        mine, its = self.keep, other.keep
        if mine.is_cuda and mine.shape == its.shape and mine.is_contiguous() and its.is_contiguous():
            from blocksparse.kernels.select.top_k_triton import either_triton

            return BlockMask(either_triton(mine, its), self.grid)
        return BlockMask(_joined(torch.bitwise_or, mine, its), self.grid)

    def __and__(self, other: BlockMask) -> BlockMask:
        """The blocks that are in both masks; the masks must share a grid."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_same_grid(other)
        return BlockMask(_joined(torch.bitwise_and, self.keep, other.keep), self.grid)

    def refine(self, n: int) -> BlockMask:
        """The mask of the same pairs on a grid whose blocks are `n` times smaller on both sides."""
        fine = self.grid.refined(n)
        if self.keep.shape[1] != fine.q_heads:
            fine = fine.shared()
        skipped = self.grid.q_lead // fine.q_block  # the finer grid leaves out rows that hold empty slots only
        keep: Tensor = keep_visible(self.keep, fine, n, skipped)
        return BlockMask(keep.expand(*self.keep.shape[:2], -1, -1), fine)

    def share_heads(self) -> BlockMask:
        """The mask with one entry per KV head, the union of those of its query heads (BFLA, eq. 14)."""
        if self.keep.shape[1] != self.grid.q_heads:
            return self
        if self.keep.stride(1):
            keep = any_head(self.keep, self.grid.kv_heads)
        else:  # stride 0: all heads have one choice
            keep = self.keep[:, : self.grid.kv_heads]
        return BlockMask(keep, self.grid.shared())

    def per_query_head(self) -> Tensor:
        """`keep` with one entry per query head, `[B, Hq, rows, cols]`."""
        heads = self.keep.shape[1]
        return (
            self.keep if heads == self.grid.q_heads else self.keep.repeat_interleave(self.grid.q_heads // heads, 1)
        )

    def density(self) -> Tensor:
        """The work as a share of the work of dense attention, `[B, H]`.

        It is the number of pairs in kept blocks over the number of pairs in the blocks that dense attention
        visits. Those are the blocks that are visible in original order, within the window if there is one. Empty
        slots do not count. A permuted order may reach more blocks, and then the share may exceed 1. H is Hq where
        each query head has an order of keys.
        """
        grid, keep = self.grid, self.keep
        # Only the first and the last row hold fewer queries than others, and in every head.
        q_size = (grid.q_position[0, 0].unflatten(-1, (-1, grid.q_block)) >= 0).sum(-1)  # [rows]
        k_size = (grid.k_position.unflatten(-1, (-1, grid.k_block)) >= 0).sum(-1)  # [B|1, H|1, G, cols]
        if grid.group_of_row is not None:
            k_size = k_size[:, :, grid.group_of_row]
        heads = max(keep.shape[1], k_size.shape[1])
        keep, k_size = for_heads(keep, heads), for_heads(k_size, heads)  # what query heads share is theirs
        kept_keys = (keep * k_size.int()).sum(-1, dtype=torch.int32)  # [B, H, rows]
        kept = (kept_keys * q_size).sum(-1)
        if grid.causal:
            row_end = grid.k_len - grid.q_len + q_size.cumsum(0)
        else:
            row_end = torch.full((), grid.k_len, device=kept.device)
        visited = (-(-row_end // grid.k_block) * grid.k_block).clamp_max(grid.k_len)
        if grid.window is not None:
            first_seen = (row_end - q_size - grid.window + 1).clamp_min(0)
            visited = visited - first_seen // grid.k_block * grid.k_block
        density: Tensor = kept.double() / (q_size * visited).sum()
        return density

    def queries(self, row: int) -> Tensor:
        """The indices into q of the queries in one row of blocks, `[B, Hq, m]` int64.

        Raises:
            TypeError, ValueError: `row` is not from 0 to `grid.rows - 1`. `slots` and `pairs` raise the same.
        """
        grid = self.grid
        self._check_row(row)
        position = grid.q_position[..., row * grid.q_block : (row + 1) * grid.q_block]
        position = position[..., (position >= 0).flatten(0, -2).all(0)]
        return (position.long() - grid.first_position).expand(self.keep.shape[0], grid.q_heads, -1)

    def slots(self, row: int) -> Tensor:
        """The key in every slot of every block of one row, `[B, Hq, cols, k_block]` int32; -1 is an empty slot."""
        grid = self.grid
        self._check_row(row)
        group = 0 if grid.group_of_row is None else grid.group_of_row[row]
        slots: Tensor = grid.k_position[:, :, group].unflatten(-1, (-1, grid.k_block))
        return for_heads(slots, grid.q_heads).expand(self.keep.shape[0], grid.q_heads, -1, -1)

    def pairs(self, row: int) -> Tensor:
        """Mask of the keys that each query of one row attends to, `[B, Hq, m, N]` bool.

        Queries come in the order of `queries(row)`, keys in original order. This is slow and takes memory for all
        pairs of the row. It is meant for tests, measurements and pictures.
        """
        grid, slots, query = self.grid, self.slots(row), self.queries(row)
        taken = slots.masked_fill(~self.per_query_head()[:, :, row].unsqueeze(-1), -1).flatten(-2).long()
        kept = torch.zeros(*taken.shape[:2], grid.k_len + 1, dtype=torch.bool, device=taken.device)
        kept = kept.scatter_(-1, taken.where(taken >= 0, grid.k_len), True)[..., : grid.k_len]
        key = torch.arange(grid.k_len, device=kept.device)
        return kept.unsqueeze(-2) & grid.is_visible((query + grid.first_position).unsqueeze(-1), key)

    def _check_row(self, row: int) -> None:
        if not is_whole(row):
            raise TypeError(f"'row' must be a whole number: {shown(row)}. Rows count from 0.")
        if not 0 <= row < self.grid.rows:
            raise ValueError(f"'row' must be from 0 to {self.grid.rows - 1}, the rows of this mask: {shown(row)}")

    def _check_same_grid(self, other: BlockMask) -> None:
        mine, its = (
            (m.grid.q_block, m.grid.k_block, m.grid.causal, m.grid.window, tuple(m.keep.shape))
            for m in (self, other)
        )
        if mine != its:
            raise ValueError(
                f"masks must share a grid: {mine} and {its} as (q_block, k_block, causal, window, shape of keep). "
                "Call refine() of the coarser one, or share_heads() of the other, first."
            )
        if not self.grid.same_blocks(other.grid):
            raise ValueError(
                "masks must share a grid: these were cut from different permutations. One block "
                "means other tokens in each. Score both with one permutation."
            )


def _joined(join: Callable[[Tensor, Tensor], Tensor], mine: Tensor, its: Tensor) -> Tensor:
    """Two choices joined by `join`. If all heads have one choice (stride 0) in both, so they do in the result."""
    heads = mine.shape[1]
    if not (mine.stride(1) or its.stride(1)):
        mine, its = mine[:, :1], its[:, :1]
    if all(
        x.stride(-1) == 1 and not any(n % 8 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in (mine, its)
    ):
        # Eight blocks are joined as one int64, because a GPU joins expanded bytes one by one, which is slow.
        joined = join(mine.view(torch.int64), its.view(torch.int64)).view(torch.bool)
    else:
        joined = join(mine, its)
    return joined.expand(-1, heads, -1, -1)


@final
@frozen(eq=False)
class RankedBlockMask(BlockMask):
    """A mask with the order in which each row visits its blocks; `Ranked(a, first=b)` makes one of `a | b`.

    Blocks of a negative rank are visited first and in any case: the row may stop only after them.
    """

    rank: Tensor  # [B, H, rows, cols] int32, the smallest is visited first; ranks of dropped blocks mean nothing

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.rank.dtype != torch.int32:
            raise TypeError(f"'rank' must be int32: {self.rank.dtype}. Convert it with .int().")
        if self.rank.shape != self.keep.shape:
            mine, its = tuple(self.keep.shape), tuple(self.rank.shape)
            raise ValueError(f"'rank' must have the shape of 'keep' {mine}: {its}")
