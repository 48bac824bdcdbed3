"""The fewest columns and diagonals of blocks that hold a share of the mass (FlexPrefill, arXiv 2502.20766)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.per_head import PerHead, least, over_blocks, per_head, probability
from blocksparse.checks.validators import count, flag, maybe_whole, optional, size, whole
from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.sizes import FAR, cdiv
from blocksparse.kernels.multiplying.run_sums import run_sums
from blocksparse.kernels.positions.places import Places
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.kernels.selecting.heaviest_lines import fewest
from blocksparse.kernels.selecting.line_blocks import line_blocks
from blocksparse.kernels.selecting.lines import Lines
from blocksparse.kernels.selecting.running_share import running_share
from blocksparse.scorers.vertical_slash import VerticalSlashScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.counter_hash import block_indices
from blocksparse.selectors.selector import InHeads, Selector

_TOKENS_PER_BUDGET = 128  # the released code divides by this number for every block size


@final
@frozen(cache_hash=True)
class VerticalSlashCdf(Selector[VerticalSlashScores, BlockMask]):
    """Keep the heaviest columns of blocks until they hold `mass`, and the heaviest bands of distances likewise.

    A band is as many distances as a block has tokens. The columns alone hold the share `mass` of the probe's
    weight, and so do the bands alone, so their union holds at least as much, unless `max_budget` cuts it short.
    Rows before the probe are assumed to have the same pattern. The block that holds token 0 and the diagonal are
    kept in addition and not counted.

    Args:
        mass: share of the probe's mass, in [0, 1]; a number, or one per query head. 0 keeps only as much as
            `min_budget` says, 1 every reachable block.
        min_budget: the least number of tokens in the columns, and in the bands; rounded up to blocks.
        max_budget: the greatest number of tokens in each; None for no limit.
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
            raise ValueError(f"'max_budget' must be at least 'min_budget' ({self.min_budget}): {most}")

    def __call__(self, scores: VerticalSlashScores) -> BlockMask:
        return self._chosen(scores, None)

    def in_heads(self, scores: VerticalSlashScores, heads: Below) -> BlockMask:
        return self._chosen(scores, heads)

    def _chosen(self, scores: VerticalSlashScores, heads: Below | None) -> BlockMask:
        mass = over_blocks(self.mass, scores.values)[..., 0]
        if self.released:
            return BlockMask(self._as_released(scores, mass.float()), scores.grid)
        return BlockMask(self._covering(scores, mass, heads), scores.grid)

    def added_to(self, first: Selector[VerticalSlashScores, BlockMask], scores: VerticalSlashScores) -> BlockMask:
        mask = first(scores)
        if self.released or mask.grid is not scores.grid or mask.keep.shape[1] != scores.grid.q_heads:
            return mask | self(scores)
        mass = over_blocks(self.mass, scores.values)[..., 0]
        heads = first.heads if isinstance(first, InHeads) else None
        return BlockMask(self._covering(scores, mass, heads, mask.keep), scores.grid)

    def reads_beyond(self, tau: PerHead) -> bool:
        return False

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return least(self.mass) >= 1 or self.min_budget >= N

    def _covering(
        self, scores: VerticalSlashScores, mass: Tensor, heads: Below | None, also: Tensor | None = None
    ) -> Tensor:
        block = scores.grid.k_block
        columns, bands = fewest(scores.mass_of_columns(), scores.mass_of_bands(), mass, *self._blocks(block))
        lines = Lines(columns, 1), Lines(bands, block)
        return line_blocks(*lines, scores.grid, whole=mass, first=1, also=also, heads=heads)

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
        return within_reach(keep | (mass >= 1).unsqueeze(-1), grid, places=Places(first=1), diagonal=True)

    def _blocks(self, block: int) -> tuple[int, int | None]:
        """`min_budget` and `max_budget` in blocks, rounded up; None for no limit."""
        least, most = (None if x is None else cdiv(min(x, FAR), block) for x in (self.min_budget, self.max_budget))
        return least or 0, most

    def alignment(self, causal: bool) -> int:
        raise ValueError(
            f"'{type(self).__name__}' chooses lines of a whole call, by the scores of its last queries"
        )
