"""Keep a fixed number, or a fixed share, of the blocks of each row."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead, least, maybe_per_head, over_blocks, share
from blocksparse.checks.validators import flag, maybe_whole, optional, size
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.selecting.top_k import top_k
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(cache_hash=True)
class TopK(Selector[BlockScores, BlockMask]):
    """Keep the `k` best blocks of each row, or the best `share` of its reachable blocks (rounded up).

    Give either `k` or `share`. Forced blocks and the diagonal are kept in any case.

    Args:
        k: blocks per row, at least 1.
        share: share of the row's reachable blocks, in (0, 1]; a number, or one per query head.
        forced_first: count forced blocks and the diagonal first, so that a row keeps more blocks than its number
            only if these alone are more. With `False` forced blocks are added to that number, and the diagonal is
            ranked by its value (SpargeAttn's top-k).
        of_all_keys: take the share of all key blocks, reachable or not, rounded down but at least 1, as
            SpargeAttn's released code does. Causal rows then keep more than that share of their reachable blocks.
    """

    k: int | None = field(default=None, converter=maybe_whole, validator=optional(size))
    share: PerHead | None = field(default=None, kw_only=True, converter=maybe_per_head, validator=optional(share))
    forced_first: bool = field(default=True, validator=flag, kw_only=True)
    of_all_keys: bool = field(default=False, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if (self.k is None) == (self.share is None):
            raise ValueError(f"'TopK' takes either 'k' or 'share': k={self.k}, share={self.share}")
        if self.of_all_keys and self.share is None:
            raise ValueError(
                "'of_all_keys' applies to 'share' alone: give 'share' in place of 'k', or leave 'of_all_keys' out"
            )

    def __call__(self, scores: BlockScores) -> BlockMask:
        keep = top_k(
            scores.values,
            scores.forced,
            None if self.k is None else min(self.k, FAR),
            None if self.share is None else over_blocks(self.share, scores.values),
            scores.grid,
            forced_first=self.forced_first,
            of_all_keys=self.of_all_keys,
        )
        return BlockMask(keep, scores.grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return (self.k or 0) >= N or (self.share is not None and least(self.share) >= 1)

    def alignment(self, causal: bool) -> int:
        if causal and self.of_all_keys:
            raise ValueError("'of_all_keys' counts all keys, and a part has only those up to its end")
        return 1
