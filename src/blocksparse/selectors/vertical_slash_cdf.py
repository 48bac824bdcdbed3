"""The fewest columns and diagonals of blocks that hold a share of the mass (FlexPrefill, arXiv 2502.20766)."""

from __future__ import annotations

from typing import final

import torch
from attrs import converters, field, frozen
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.sizes import FAR, cdiv
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.kernels.selecting.running_share import running_share
from blocksparse.per_head import PerHead, over_blocks, per_head, probability
from blocksparse.scorers.vertical_slash import VerticalSlashScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.counter_hash import block_indices
from blocksparse.selectors.selector import Selector
from blocksparse.validators import count, flag, optional, size, whole

_TOKENS_PER_BUDGET = 128  # the released code divides by this whatever the block


@final
@frozen(eq=False)
class VerticalSlashCdf(Selector[VerticalSlashScores, BlockMask]):
    """Keep vertical blocks, and bands of distances as wide as a block, heaviest first, until each reach `mass`.

    The block that holds token 0 and the diagonal are kept on top and not counted. The columns alone hold `mass`
    of the probe's weight, and so do the bands alone, so their union holds no less; rows before the probe are
    taken to look alike. `max_budget` may cut that short.

    Args:
        mass: share of the probe's mass, in [0, 1]; a number, or one per query head. 0 keeps what the least budget
            says, 1 every reachable block.
        min_budget: tokens that the columns, and the bands, come to at least; rounded up to blocks.
        max_budget: tokens that they come to at most; None for no limit.
        released: the rule of the authors' code, for keys in their place. It counts the *tokens* that hold `mass`
            and keeps one block for every 128 of them; block 0 and the main diagonal use up that budget; a band of
            distances keeps one diagonal of the two that it crosses.
    """

    mass: PerHead = field(default=0.95, converter=per_head, validator=probability)
    min_budget: int = field(default=0, kw_only=True, converter=whole, validator=count)
    max_budget: int | None = field(
        default=None, kw_only=True, converter=converters.optional(whole), validator=optional(size)
    )
    released: bool = field(default=False, kw_only=True, validator=flag)

    @max_budget.validator
    def _budgets_are_in_order(self, _: object, most: int | None) -> None:
        if most is not None and most < self.min_budget:
            raise ValueError(f"'max_budget' must be at least 'min_budget' ({self.min_budget}): {most}")

    def __call__(self, scores: VerticalSlashScores) -> BlockMask:
        grid = scores.grid
        mass = over_blocks(self.mass, scores.values).float()
        chosen = self._as_released(scores, mass[..., 0]) if self.released else self._covering(scores, mass[..., 0])
        return BlockMask(within_reach(chosen | (mass >= 1), grid, first=1, diagonal=True), grid)

    def _covering(self, scores: VerticalSlashScores, mass: Tensor) -> Tensor:
        block = scores.grid.k_block
        columns = self._fewest(scores.mass_of_columns(), mass, block).unsqueeze(2)
        bands = self._fewest(_in_runs(scores.slash, block), mass, block)
        distances = bands.repeat_interleave(block, dim=-1)[..., : scores.slash.shape[-1]]
        return columns | scores.blocks_at(distances)

    def _fewest(self, lines: Tensor, mass: Tensor, block: int) -> Tensor:
        """The heaviest of `lines` `[B, Hq, n]` up to the one with which they reach `mass`, within the budgets."""
        share = running_share(lines)
        rank = torch.arange(lines.shape[-1], device=lines.device)
        least, most = self._blocks(block)
        taken = (share.before < mass) | (rank < least)
        if most is not None:
            taken = taken & (rank < most)
        return share.put_back(taken)

    def _as_released(self, scores: VerticalSlashScores, mass: Tensor) -> Tensor:
        grid, block = scores.grid, scores.grid.k_block
        columns = scores.mass_of_columns()
        columns[..., 0] = float("inf")
        # Their bins count from the far end, so the short one, if there is one, holds the nearest distances.
        diagonals = _in_runs(scores.slash.flip(-1), block).flip(-1)
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
        return kept[0].unsqueeze(2) | on_diagonal.view(*columns.shape[:2], *lag.shape)

    def _blocks(self, block: int) -> tuple[int, int | None]:
        """The least and the greatest budget in blocks."""
        least, most = (None if x is None else cdiv(min(x, FAR), block) for x in (self.min_budget, self.max_budget))
        return least or 0, most


def _in_runs(x: Tensor, run: int) -> Tensor:
    """Sums of `run` entries each along the last axis; the last may be short."""
    return rearrange(pad(x, (0, -x.shape[-1] % run)), "B H (runs each) -> B H runs each", each=run).sum(-1)
