"""A number of blocks per row that falls toward the end of a prompt (Stem, arXiv 2603.06274)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen

from blocksparse.checks.alignment import by_position
from blocksparse.checks.validators import Rule, maybe_whole, optional, positive, real, size
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.selecting.top_k import top_k
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector

part = Rule("a number in (0, 1]", positive.is_kind, lambda x: 0 < x <= 1)
_ALL_BELOW, _LONG_FROM = 56, 160  # blocks of a prompt, as the other numbers of `_first_number`


@final
@frozen(cache_hash=True)
class DecayingTopK(Selector[BlockScores, BlockMask]):
    """Keep the `k` best blocks of a row that has just more than `k` behind it, and fewer of each later row.

    The number falls evenly to `decay * k` in the last row of the prompt, each cut to a whole number as the floats
    of the released code come out, and is at least 1: what early tokens see is handed on through all later ones.
    Rows with at most `k` blocks keep all. The diagonal is ranked by its value, and kept in any case. A call for a
    chunk needs `remaining`, by which it knows the last row.

    Args:
        k: blocks per row, at least 1; None for Stem's rule: of `n` blocks of keys, all below 56 blocks,
            `.2 n + 30` below 160, and `.1 n + 30` from there on.
        decay: the share of `k` that the last row keeps, in (0, 1].
    """

    k: int | None = field(default=None, converter=maybe_whole, validator=optional(size))
    decay: float = field(default=0.7, converter=real, validator=part)

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        n, last = -(-grid.prompt_keys // grid.k_block), grid.first_row + grid.rows
        k = min(_first_number(n) if self.k is None else self.k, FAR)
        # The blocks of keys before each row, its own included, are one more than this.
        place = torch.arange(grid.first_row, last, device=scores.values.device) * grid.q_block // grid.k_block
        numbers = torch.full((n,), float(k), dtype=torch.float64, device=place.device)
        if k < n:
            numbers[k:] = torch.linspace(k, k * self.decay, n - k, dtype=torch.float64, device=place.device)
        count = numbers.floor().clamp_min(1)[place.clamp_max(n - 1)].unsqueeze(1)  # [rows, 1]
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
