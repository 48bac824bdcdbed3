"""Keep a fixed number, or a fixed share, of the blocks of each row."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen, validators
from torch import Tensor

from blocksparse.per_head import PerHead, check, optional_per_head, over_blocks
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class TopK(Selector[BlockScores, BlockMask]):
    """Keep the `k` best blocks of each row, or the best `share` of its reachable blocks (rounded up).

    Give one of the two. Forced blocks and the diagonal are kept in any case.

    Args:
        k: blocks per row, at least 1.
        share: share of the row's reachable blocks, in (0, 1]; a number, or one per query head.
        forced_first: count forced blocks and the diagonal first: a row keeps more than its number only where these
            are more. Otherwise forced blocks come on top, and the diagonal ranks by its value (SpargeAttn's
            top-k).
        of_all_keys: take the share of all key blocks, reachable or not, rounded down but at least 1, as
            SpargeAttn's released code does. Causal rows then keep more than the share of what they reach.
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
    forced_first: bool = field(default=True, kw_only=True)
    of_all_keys: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if (self.k is None) == (self.share is None):
            raise ValueError(f"'TopK' takes either 'k' or 'share': k={self.k}, share={self.share}")
        if self.of_all_keys and self.share is None:
            raise ValueError("'of_all_keys' needs 'share'; 'k' is a number of blocks by itself")

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        reachable = grid.reachable
        always = grid.diagonal if scores.forced is None else (grid.diagonal | scores.forced) & reachable
        values = scores.values.nan_to_num(nan=float("-inf"))
        if self.forced_first:
            values = values.masked_fill(always, float("inf"))
        elif scores.forced is not None:
            values = values.masked_fill(scores.forced, float("-inf"))
        order = values.masked_fill(~reachable, float("-inf")).argsort(dim=-1, descending=True, stable=True)
        rank = torch.arange(grid.cols, device=values.device)
        taken = rank < self._count(values, reachable)
        keep = torch.empty_like(values, dtype=torch.bool).scatter_(-1, order, taken.expand(values.shape))
        return BlockMask((keep | always) & reachable, grid)

    def _count(self, values: Tensor, reachable: Tensor) -> Tensor:
        """Blocks to keep, broadcastable to `[B, Hq, rows, 1]`. Products are rounded to fp32: .07 of 100 is 7."""
        if self.share is None:
            return values.new_full((1, 1, 1, 1), self.k or 0)
        share = over_blocks(self.share, values)
        if self.of_all_keys:
            return (share * values.shape[-1]).float().floor().clamp_min(1)
        return (share * reachable.sum(-1, keepdim=True)).float().ceil()
