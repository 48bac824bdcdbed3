"""Keep a fixed number, or a fixed share, of the blocks of each row."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen, validators

from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.per_head import PerHead, check, optional_per_head, over_blocks
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class TopK(Selector[BlockScores, BlockMask]):
    """Keep the `k` best blocks of each row, or the best `share` of its reachable blocks (rounded up).

    Blocks that are kept in any case (forced ones and the diagonal) are counted first. Give one of the two.

    Args:
        k: blocks per row, at least 1.
        share: share of the row's reachable blocks, in (0, 1]; a number, or one per query head.
    """

    k: int | None = field(
        default=None, validator=validators.optional([validators.instance_of(int), validators.gt(0)])
    )
    share: PerHead | None = field(
        default=None,
        kw_only=True,
        converter=optional_per_head,
        validator=validators.optional(check("in (0, 1]", lambda x: (x > 0) & (x <= 1))),
    )

    def __attrs_post_init__(self) -> None:
        if (self.k is None) == (self.share is None):
            raise ValueError(f"'TopK' takes either 'k' or 'share': k={self.k}, share={self.share}")

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        reachable = grid.reachable
        always = grid.diagonal if scores.forced is None else (grid.diagonal | scores.forced) & reachable
        values = scores.values.nan_to_num(nan=float("-inf")).masked_fill(always, float("inf"))
        order = values.masked_fill(~reachable, float("-inf")).argsort(dim=-1, descending=True, stable=True)
        rank = torch.arange(grid.cols, device=values.device)
        if self.share is None:
            count = values.new_full((1, 1, 1, 1), self.k or 0)
        else:
            count = over_blocks(self.share, values) * reachable.sum(-1, keepdim=True)
        taken = rank < count.ceil()
        keep = torch.empty_like(values, dtype=torch.bool).scatter_(-1, order, taken.expand(values.shape))
        return BlockMask((keep | always) & reachable, grid)
