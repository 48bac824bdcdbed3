"""A fixed number of columns and diagonals (MInference, arXiv 2407.02490)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.per_head import PerHead, budget, least, over_blocks, per_head
from blocksparse.checks.validators import count, flag, whole
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.kernels.selecting.heaviest_lines import heaviest, heaviest_of_both
from blocksparse.kernels.selecting.line_blocks import line_blocks
from blocksparse.kernels.selecting.lines import Lines, running_count
from blocksparse.scorers.vertical_slash import VerticalSlashScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.counter_hash import block_indices
from blocksparse.selectors.selector import Selector

_LEAST_VERTICAL, _LEAST_SLASH = 30, 50  # the least budgets in the released code


@final
@frozen(cache_hash=True)
class VerticalSlashTopK(Selector[VerticalSlashScores, BlockMask]):
    """Choose the `vertical` heaviest keys and the `slash` heaviest distances, and keep the blocks that hold them.

    Every block that holds a pair on a chosen line is kept whole; the diagonal is kept too. Budgets count keys and
    distances, and forced ones are taken out of them first.

    Args:
        vertical: how many keys; a number, or one per query head.
        slash: how many distances; a number, or one per query head.
        sink: how many of the first keys are forced. If the budget is smaller, the lowest ones are.
        recent: how many of the nearest distances are forced. If the budget is smaller, the nearest ones are. Every
            causal query that sees one of the last `recent` keys then keeps it, so these keys are not chosen as
            columns.
        released: choose by the rule of the authors' code, which is for keys in original order: the budgets are at
            least 30 keys and 50 distances, keys near the end may use up the vertical budget, and the keys at a
            row's distances are covered with tiles that may start at any key and end up to one tile late.
    """

    vertical: PerHead = field(default=1000, converter=per_head, validator=budget)
    slash: PerHead = field(default=6096, converter=per_head, validator=budget)
    sink: int = field(default=30, kw_only=True, converter=whole, validator=count)
    recent: int = field(default=100, kw_only=True, converter=whole, validator=count)
    released: bool = field(default=False, kw_only=True, validator=flag)

    def __call__(self, scores: VerticalSlashScores) -> BlockMask:
        grid = scores.grid
        if grid.permutation.k_index is None:
            counts, distances = heaviest_of_both(
                scores.vertical,
                scores.slash,
                (self._columns(scores), self._distances(scores)),
                firsts=(self.sink, self.recent),
                spared=self._spared(scores),
            )
            columns = Lines(counts, grid.k_block)
        else:
            columns = Lines(running_count(scores.columns_holding(self.keys(scores)).squeeze(2)), 1)
            distances = running_count(self.distances(scores))
        keep = line_blocks(columns, Lines(distances, 1), grid)
        if self.released:
            keep = within_reach(keep | _tiles(scores, self.distances(scores)), grid)
        return BlockMask(keep, grid)

    def reads_beyond(self, tau: PerHead) -> bool:
        return False

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return least(self.slash) >= (N if causal else max(M, N))  # all distances

    def keys(self, scores: VerticalSlashScores) -> Tensor:
        """The chosen columns, `[B, Hq, N]` bool."""
        return heaviest(scores.vertical, self._columns(scores), first=self.sink, spared=self._spared(scores))

    def distances(self, scores: VerticalSlashScores) -> Tensor:
        """The chosen distances, `[B, Hq, L]` bool."""
        return heaviest(scores.slash, self._distances(scores), first=self.recent)

    def _spared(self, scores: VerticalSlashScores) -> tuple[Tensor, int] | None:
        """Number of last keys that are not columns, since the nearest distances hold them anyway."""
        if not scores.grid.causal or self.released:
            return None
        return self._distances(scores), self.recent

    def _columns(self, scores: VerticalSlashScores) -> Tensor:
        """Number of columns, `[1, Hq|1, 1]` float64."""
        return self._count(self.vertical, _LEAST_VERTICAL, scores)

    def _distances(self, scores: VerticalSlashScores) -> Tensor:
        """Number of distances, `[1, Hq|1, 1]` float64."""
        return self._count(self.slash, _LEAST_SLASH, scores)

    def _count(self, budget: PerHead, least: int, scores: VerticalSlashScores) -> Tensor:
        count = over_blocks(budget, scores.values)[..., 0]  # [1, Hq|1, 1]
        return count.clamp_min(least) if self.released else count

    def alignment(self, causal: bool) -> int:
        raise ValueError(
            f"'{type(self).__name__}' chooses lines of a whole call, by the scores of its last queries"
        )


def _tiles(scores: VerticalSlashScores, distances: Tensor) -> Tensor:
    """The blocks that the tiles of the released code touch, `[B, Hq, rows, cols]` bool.

    Each chosen distance `d` asks for the tile of keys that ends `d` before the row's end. The tiles are taken from
    the first key on. If a tile touches or overlaps the tile before it, it is moved to start where that one ends.
    """
    grid, L, b = scores.grid, distances.shape[-1], scores.grid.k_block
    each = torch.arange(L, device=distances.device)
    below = each.where(distances, -1).cummax(-1).values  # the greatest chosen distance up to each, or -1
    row_end = ((block_indices(grid)[0].flatten() + 1) * b).expand(*distances.shape[:2], -1)
    touched = torch.zeros(*row_end.shape, grid.cols + 1, dtype=torch.bool, device=distances.device)
    end = torch.full_like(row_end, -b - 1)  # where the last tile ends; far before the first key, as there is none
    for _ in range(grid.cols):
        farthest = torch.minimum(row_end - 1 - end, (row_end - 1).clamp_max(L - 1))
        distance = below.gather(-1, farthest.clamp_min(0))
        wanted = (row_end - distance).clamp_min(b)  # where the tile of this distance ends
        start = torch.where(wanted > end + b, wanted - b, end)
        more = (farthest >= 0) & (distance >= 0)
        for key in (start, start + b - 1):
            column = torch.where(more, key // b, grid.cols).clamp_max(grid.cols)
            touched.scatter_(-1, column.unsqueeze(-1), True)
        end = torch.where(more, start + b, end)
    return touched[..., : grid.cols]
