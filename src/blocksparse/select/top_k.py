"""Rules that keep a number of the best blocks, or all that are worth more than a bound."""

from __future__ import annotations

import math
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.per_head import (
    PerHead,
    any_number,
    finite,
    least,
    maybe_per_head,
    over_blocks,
    per_head,
    share,
    written,
)
from blocksparse.check.stage import by_position
from blocksparse.check.validators import Rule, flag, maybe_whole, optional, positive, real, size
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.select.top_k import top_k
from blocksparse.score.scorer import BlockLogits, BlockScores
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.selector import Selector


@final
@frozen(cache_hash=True)
class TopK(Selector[BlockScores, BlockMask]):
    """Keep the `k` best blocks of each row, or the best `share` of its visible blocks (rounded up).

    Give either `k` or `share`. Forced blocks and the diagonal are kept in any case.

    Args:
        k: blocks per row, at least 1.
        share: share of the row's visible blocks, in (0, 1]. A number, or one per query head.
        forced_first: count forced blocks and the diagonal first. A row keeps more blocks than its number only if
            these alone are more. With `False` forced blocks are added to that number, and the diagonal is ranked
            by its value (SpargeAttn's top-k).
        of_all_keys: take the share of all key blocks, visible or not. Rounded down but at least 1, as SpargeAttn's
            released code does. Causal rows then keep more than that share of their visible blocks.
    """

    k: int | None = field(default=None, converter=maybe_whole, validator=optional(size))
    share: PerHead | None = field(default=None, kw_only=True, converter=maybe_per_head, validator=optional(share))
    forced_first: bool = field(default=True, validator=flag, kw_only=True)
    of_all_keys: bool = field(default=False, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if (self.k is None) == (self.share is None):
            raise ValueError(
                f"'TopK' takes either 'k' or 'share': k={self.k}, share={self.share}. Give one of them."
            )
        if self.of_all_keys and self.share is None:
            raise ValueError(
                "'of_all_keys' applies to 'share' alone. Give 'share' in place of 'k', or leave 'of_all_keys' out."
            )

    def __call__(self, scores: BlockScores) -> BlockMask:
        k = None if self.k is None else min(self.k, FAR)
        share = None if self.share is None else over_blocks(self.share, scores.values)
        values, forced, grid, first = scores.values, scores.forced, scores.grid, self.forced_first
        keep = top_k(values, forced, k, share, grid, forced_first=first, of_all_keys=self.of_all_keys)
        return BlockMask(keep, grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return (self.k or 0) >= N or (self.share is not None and least(self.share) >= 1)

    def alignment(self, causal: bool) -> int:
        if causal and self.of_all_keys:
            raise ValueError("'of_all_keys' counts all keys, and a part has only those up to its end")
        return 1


part = Rule("a number in (0, 1]", positive.is_kind, lambda x: 0 < x <= 1)
_ALL_BELOW, _LONG_FROM = 56, 160  # blocks of a prompt, as the other numbers of `_first_number`


@final
@frozen(cache_hash=True)
class DecayingTopK(Selector[BlockScores, BlockMask]):
    """Keep the `k` best blocks of a row that has just more than `k` behind it, and fewer of each later row.

    The number falls evenly to `decay * k` in the last row of the prompt, and is at least 1. Each number is cut to
    a whole one exactly as the floats of the released code are. Early rows keep more, because all later tokens
    depend on early ones. Rows with at most `k` blocks keep all. The diagonal is ranked by its value, and kept in
    any case. A call for a chunk needs `remaining`, by which it knows the last row. Source: Stem, arXiv 2603.06274.

    Args:
        k: blocks per row, at least 1. None is Stem's rule for `n` blocks of keys. All of them below 56, `0.2 n +
            30` below 160, and `0.1 n + 30` from there on.
        decay: share of `k` that the last row keeps. In (0, 1].
    """

    k: int | None = field(default=None, converter=maybe_whole, validator=optional(size))
    decay: float = field(default=0.7, converter=real, validator=part)

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        n, last = -(-grid.prompt_keys // grid.k_block), grid.first_row + grid.rows
        k = min(_first_number(n) if self.k is None else self.k, FAR)
        # The blocks of keys before each row, its own included, are one more than this.
        before = torch.arange(grid.first_row, last, device=scores.values.device) * grid.q_block // grid.k_block
        numbers = torch.full((n,), float(k), dtype=torch.float64, device=before.device)
        if k < n:
            numbers[k:] = torch.linspace(k, k * self.decay, n - k, dtype=torch.float64, device=before.device)
        count = numbers.floor().clamp_min(1)[before.clamp_max(n - 1)].unsqueeze(1)  # [rows, 1]
        keep = top_k(scores.values, scores.forced, count, None, grid, forced_first=False, of_all_keys=False)
        return BlockMask(keep, grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return (self.k or 0) >= N

    @property
    def prompt_tail(self) -> None:
        return None

    def alignment(self, causal: bool) -> int:
        return by_position(self, causal)


def _first_number(n: int) -> int:
    """Number of `n` blocks that a row keeps before the decay, as in Stem's released code."""
    if n < _ALL_BELOW:
        return n
    return int(0.2 * n + 30) if n < _LONG_FROM else int(0.1 * n) + 30


@final
@frozen(cache_hash=True)
class Threshold(Selector[BlockScores, BlockMask]):
    """Keep blocks whose score is greater than `value`, forced blocks, and the diagonal (BFLA, section 3.2).

    Args:
        value: the threshold, in the units of the scores. A number, or one per query head.
    """

    value: PerHead = field(converter=per_head, validator=any_number, repr=written)

    by_row = True

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        keep = scores.values > over_blocks(self.value, scores.values).float()
        keep = keep if scores.forced is None else keep | scores.forced
        return BlockMask(keep_visible(keep, grid, diagonal=True), grid)


@final
@frozen(cache_hash=True)
class MeanStd(Selector[BlockLogits, BlockMask]):
    """Keep blocks whose logit is greater than `mean + tau * std` of their row, forced blocks, and the diagonal.

    Mean and standard deviation are over the blocks that a row may see. The deviation is that of the logits
    themselves, or the estimate that the scorer gives with them (`BlockLogits.variance`). Nothing is sorted, and a
    row of equal logits keeps none of them: add a `Band`. Source: Sol-Attn, arXiv 2607.24027.

    Args:
        tau: how many standard deviations above the mean. Any finite number, or one per query head.
    """

    tau: PerHead = field(default=1.0, converter=per_head, validator=finite)

    by_row = True

    def __call__(self, scores: BlockLogits) -> BlockMask:
        grid, values, tau = scores.grid, scores.values, over_blocks(self.tau, scores.values)
        visible = grid.visible
        count = visible.sum(-1, keepdim=True).clamp_min(1)
        mean = _sum(values, visible) / count
        if scores.variance is None:
            variance = _sum((values - mean.to(values.dtype)).square(), visible) / count
        else:
            variance = scores.variance.unsqueeze(-1).double()
        least = 1e-6 * math.log(2) ** 2  # 1e-6 for logits in base 2, as in the authors' code
        bound = mean + tau * (variance + least).sqrt()
        keep = values > bound.to(values.dtype)
        keep = keep if scores.forced is None else keep | scores.forced
        return BlockMask(keep_visible(keep, grid, diagonal=True), grid)


def _sum(x: Tensor, where: Tensor) -> Tensor:
    """Sum of each row over the blocks `where`. In float64 its order hardly matters."""
    total: Tensor = x.where(where, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return total
