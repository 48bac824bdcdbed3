"""The heaviest columns and diagonals of each head (MInference, FlexPrefill)."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.per_head import (
    PerHead,
    at_least_0,
    budget,
    least,
    over_blocks,
    per_head,
    probability,
    written,
)
from blocksparse.check.stage import Declared, check_takes, declared, parts_of
from blocksparse.check.validators import a, count, flag, maybe_whole, optional, size, whole
from blocksparse.kernels.common.sizes import FAR, HeadMask, Heads, cdiv
from blocksparse.kernels.gemm.products import run_sums
from blocksparse.kernels.masks.grid import AlwaysKept
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.select.top_cdf import running_share
from blocksparse.kernels.select.top_k import routed
from blocksparse.kernels.select.vertical_slash import (
    ChosenRuns,
    fewest,
    heaviest,
    heaviest_of_both,
    running_count,
    vertical_slash_blocks,
)
from blocksparse.score.vertical_slash import VerticalSlashScores
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.positions import block_indices
from blocksparse.select.selector import Selector, SelectorTraits, select

_LEAST_VERTICAL, _LEAST_SLASH = 30, 50  # the least budgets in the released code
_BY_LAST_QUERIES = "chooses lines of a whole call, by the scores of its last queries"


@final
@frozen(cache_hash=True)
class VerticalSlashTopK(Selector[VerticalSlashScores, BlockMask]):
    """Choose the `vertical` heaviest keys and the `slash` heaviest distances, and keep the blocks that hold them.

    Every block that holds a pair on a chosen line is kept whole; the diagonal is kept too. Budgets count keys and
    distances, and forced ones are taken out of them first. Source: MInference, arXiv 2407.02490.

    Args:
        vertical: how many keys. A number, or one per query head.
        slash: how many distances. A number, or one per query head.
        sink: how many of the first keys are forced. If the budget is smaller, the lowest ones are.
        recent: how many of the nearest distances are forced. If the budget is smaller, the nearest ones are. Every
            causal query that sees one of the last `recent` keys then keeps it. These keys are not chosen as
            columns.
        released: choose by the rule of the authors' code, which is for keys in original order. The budgets are at
            least 30 keys and 50 distances, and keys near the end may use up the vertical budget. The keys at a
            row's distances are covered with tiles that may start at any key and end up to one tile late.
    """

    vertical: PerHead = field(default=1000, converter=per_head, validator=budget)
    slash: PerHead = field(default=6096, converter=per_head, validator=budget)
    sink: int = field(default=30, kw_only=True, converter=whole, validator=count)
    recent: int = field(default=100, kw_only=True, converter=whole, validator=count)
    released: bool = field(default=False, kw_only=True, validator=flag)

    traits = SelectorTraits(reads_values=False)
    by_row = _BY_LAST_QUERIES

    def __call__(self, scores: VerticalSlashScores) -> BlockMask:
        grid = scores.grid
        if grid.permutation.k_index is None:
            budgets, firsts = (self._columns(scores), self._distances(scores)), (self.sink, self.recent)
            lines = scores.vertical, scores.slash
            counts, distances = heaviest_of_both(*lines, budgets, firsts, self._spared(scores))
            columns = ChosenRuns(counts, grid.k_block)
        else:
            columns = ChosenRuns(running_count(scores.columns_holding(self.keys(scores)).squeeze(2)), 1)
            distances = running_count(self.distances(scores))
        keep = vertical_slash_blocks(columns, ChosenRuns(distances, 1), grid)
        if self.released:
            keep = keep_visible(keep | _tiles(scores, self.distances(scores)), grid)
        return BlockMask(keep, grid)

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


_TOKENS_PER_BUDGET = 128  # the released code divides by this number for every block size


@final
@frozen(cache_hash=True)
class VerticalSlashCdf(Selector[VerticalSlashScores, BlockMask]):
    """Keep the heaviest columns of blocks until they hold `mass`, and the heaviest bands of distances likewise.

    A band is as many distances as a block has tokens. The columns alone hold the share `mass` of the last queries'
    weight, and so do the bands alone. So their union holds at least as much, unless `max_budget` cuts it short.
    Earlier rows are assumed to have the same pattern. The block that holds token 0 and the diagonal are kept in
    addition and not counted. Source: FlexPrefill, arXiv 2502.20766.

    Args:
        mass: share of these queries' mass, in [0, 1]. A number, or one per query head. With 0 only `min_budget` is
            kept, with 1 every visible block.
        min_budget: the least number of tokens in the columns, and in the bands. Rounded up to blocks.
        max_budget: the greatest number of tokens in each. None for no limit.
        released: choose by the rule of the authors' code, which is for keys in original order. It counts the
            *tokens* that hold `mass` and keeps one block for every 128 of them. Block 0 and the main diagonal are
            taken out of that budget. Of the two diagonals of blocks that a band crosses, one is kept.
    """

    mass: PerHead = field(default=0.95, converter=per_head, validator=probability)
    min_budget: int = field(default=0, kw_only=True, converter=whole, validator=count)
    max_budget: int | None = field(default=None, kw_only=True, converter=maybe_whole, validator=optional(size))
    released: bool = field(default=False, kw_only=True, validator=flag)

    @max_budget.validator
    def _budgets_are_in_order(self, _: object, most: int | None) -> None:
        if most is not None and most < self.min_budget:
            raise ValueError(
                f"'max_budget' must be at least 'min_budget' ({self.min_budget}): {most}. "
                "Raise it, or leave it out."
            )

    traits = SelectorTraits(heads=True, mask=True, reads_values=False)
    by_row = _BY_LAST_QUERIES

    def __call__(
        self, scores: VerticalSlashScores, *, heads: Heads = None, mask: BlockMask | None = None
    ) -> BlockMask:
        grid, mass = scores.grid, over_blocks(self.mass, scores.values)[..., 0]
        if self.released:
            mine = BlockMask(self._as_released(scores, mass.float()), grid)
        elif mask is None or (mask.grid is grid and mask.keep.shape[1] == grid.q_heads):
            return BlockMask(self._covering(scores, mass, heads, None if mask is None else mask.keep), grid)
        else:
            mine = BlockMask(self._covering(scores, mass, heads), grid)
        return mine if mask is None else mask | mine

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return least(self.mass) >= 1 or self.min_budget >= N

    def _covering(
        self, scores: VerticalSlashScores, mass: Tensor, heads: Heads, also: Tensor | None = None
    ) -> Tensor:
        block = scores.grid.k_block
        columns, bands = fewest(scores.mass_of_columns(), scores.mass_of_bands(), mass, *self._blocks(block))
        lines = ChosenRuns(columns, 1), ChosenRuns(bands, block)
        return vertical_slash_blocks(*lines, scores.grid, whole=mass, first=1, also=also, heads=heads)

    def _as_released(self, scores: VerticalSlashScores, mass: Tensor) -> Tensor:
        grid, block = scores.grid, scores.grid.k_block
        columns = scores.mass_of_columns().clone()
        columns[..., 0] = float("inf")
        # The released code bins distances from the far end, so a short bin holds the nearest distances.
        diagonals = run_sums(scores.slash.flip(-1), block).flip(-1)
        diagonals[..., 0] = float("inf")
        kept = []
        for lines, tokens in ((columns, scores.vertical), (diagonals, scores.slash.flip(-1))):
            count = (running_share(tokens).after <= mass).sum(-1, keepdim=True) + 1
            count = (count // _TOKENS_PER_BUDGET + 1).clamp(*self._blocks(block))
            rank = lines.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
            kept.append(rank < count)
        i, j = block_indices(grid)
        lag = (i - j).abs()  # [rows, cols]
        on_diagonal = kept[1].gather(-1, lag.flatten().expand(*columns.shape[:2], -1))
        keep = kept[0].unsqueeze(2) | on_diagonal.view(*columns.shape[:2], *lag.shape)
        return keep_visible(keep | (mass >= 1).unsqueeze(-1), grid, always=AlwaysKept(first=1), diagonal=True)

    def _blocks(self, block: int) -> tuple[int, int | None]:
        """Both budgets in blocks, rounded up. None for no limit."""
        least, most = (None if x is None else cdiv(min(x, FAR), block) for x in (self.min_budget, self.max_budget))
        return least or 0, most


@final
@frozen(cache_hash=True)
class RoutedByDivergence(Selector[VerticalSlashScores, BlockMask]):
    """Choose by `similar` in heads whose pooled block weights are near the true ones, else by `otherwise`.

    FlexPrefill calls heads of the first kind query-aware and heads of the second kind vertical-slash. The weights
    are near if their divergence is below `tau`; a NaN is not. Source: FlexPrefill, arXiv 2502.20766.

    Args:
        tau: bound of the divergence, which is at most sqrt(ln 2) = 0.833. A number, or one per query head. With 0
            every head chooses by `otherwise`.

    Raises:
        ValueError: in a call, if a rule changes the grid or shares masks between heads. Put `Refined` and
            `SharedByGroup` around this selector instead; or if the scorer left heads out by another `tau`.
    """

    tau: PerHead = field(converter=per_head, validator=at_least_0, repr=written)
    similar: Selector[VerticalSlashScores, BlockMask] = field(validator=a(Selector))
    otherwise: Selector[VerticalSlashScores, BlockMask] = field(validator=a(Selector))

    by_row = "decides by the last queries of a call, which only its last part has"

    def __attrs_post_init__(self) -> None:
        for rule in (self.similar, self.otherwise):
            check_takes(declared(rule, Selector, 0), (Declared(type(self), VerticalSlashScores),))

    def __call__(self, scores: VerticalSlashScores) -> BlockMask:
        if scores.tau not in (None, self.tau):
            raise ValueError(
                f"the scorer's 'tau' is {scores.tau!r}, so that it left out heads which this rule, whose 'tau' is "
                f"{self.tau!r}, may ask for. Give both the same."
            )
        heads = HeadMask(scores.divergence, over_blocks(self.tau, scores.values))
        similar = select(self.similar, scores, heads=heads).keep
        otherwise = select(self.otherwise, scores, heads=heads.rest()).keep
        for keep in (similar, otherwise):
            if keep.shape != scores.values.shape:
                raise ValueError(
                    "both rules of 'RoutedByDivergence' must give masks of the shape of the scores, "
                    f"{tuple(scores.values.shape)}: {tuple(keep.shape)}. Put 'Refined' and 'SharedByGroup' "
                    "around it."
                )
        return BlockMask(routed(heads, similar, otherwise), scores.grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return all(rule.keeps_everything(M, N, causal=causal) for rule in (self.similar, self.otherwise))


def reads_beyond(selector: Selector[Any, Any], tau: PerHead) -> bool:
    """Whether it reads scores of heads whose divergence is not below `tau`, which a scorer may leave out."""
    if isinstance(selector, RoutedByDivergence) and selector.tau == tau:
        return reads_beyond(selector.otherwise, tau)
    return selector.traits.reads_values or any(reads_beyond(part, tau) for part in parts_of(selector, Selector))
