"""A grid of blocks as kernels take it, and rules of position on it.

`sees`: Which keys a query sees: the rule for single pairs, which all definitions in plain torch use.
`BlockGrid`: The first and the last original position of every block, for kernels over blocks.
`TokenPositions`: Original positions of the tokens in every row and column of blocks, for attention kernels.
`AlwaysKept`: Blocks that are kept for their position, as numbers that one kernel launch applies together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.kernels.common.sizes import FAR


def sees(q_at: Tensor, k_at: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Whether queries at the positions `q_at` see keys at `k_at`, broadcast against each other; bool.

    A query at position `p` sees every key, or when causal those at `k <= p`. With a window it sees only those at `p - window
    < k <= p`, which are `window` tokens with its own. A position of -1 is an empty slot and never seen.
    """
    there = k_at >= 0
    if not causal:
        return there.expand(torch.broadcast_shapes(q_at.shape, k_at.shape))
    seen = there & (k_at <= q_at)
    return seen if window is None else seen & (k_at > q_at - window)


class BlockGrid(Protocol):
    """Positions of blocks, and what follows from them, as `blocksparse.Grid` has it.

    Every tensor has four axes, `[B|1, H|1, rows|1, cols|1]`; an axis of one entry holds for all. Kernels read the positions
    and work out the rest block by block; the functions in plain torch take the other properties.
    """

    @property
    def causal(self) -> bool: ...

    @property
    def window(self) -> int | None:
        """How many tokens a query sees at most, its own included; None unless causal, and if nothing is hidden."""

    @property
    def q_first(self) -> Tensor:
        """`[B|1, H|1, rows, 1]` int32."""

    @property
    def q_last(self) -> Tensor:
        """`[B|1, H|1, rows, 1]` int32."""

    @property
    def k_first(self) -> Tensor:
        """`[B|1, H|1, rows|1, cols]` int32."""

    @property
    def k_last(self) -> Tensor:
        """`[B|1, H|1, rows|1, cols]` int32, -1 for a block of empty slots."""

    @property
    def k_whole(self) -> Tensor:
        """`[B|1, H|1, rows|1, cols]` bool, whether the block has no empty slot."""

    @property
    def first_row(self) -> int:
        """Index of row 0 in the whole prompt."""

    @property
    def prompt_end(self) -> int:
        """The position after the last query of the prompt."""

    @property
    def reachable(self) -> Tensor:
        """Blocks in which some query may see some key: `k_last >= 0`, and when causal `k_first <= q_last`.

        With a window also `k_last > q_first - window`.
        """

    @property
    def full(self) -> Tensor:
        """Blocks in which every query may see every key: `k_whole`, and when causal `k_last <= q_first`.

        With a window also `k_first > q_last - window`.
        """

    @property
    def diagonal(self) -> Tensor:
        """When causal, reachable blocks with `k_last >= q_first`; when not, none."""

    def holding_first(self, tokens: int) -> Tensor:
        """Reachable blocks with `k_first < tokens`."""

    def within(self, tokens: int) -> Tensor:
        """Reachable blocks with `k_last >= q_first - tokens`, and when not causal `k_first <= q_last + tokens`."""

    def own_segment(self, S: int) -> Tensor:
        """Reachable blocks with `k_first // S == q_first // S`."""


@frozen(eq=False)
class TokenPositions:
    """Original positions by slot, those of the blocks of all rows one behind another, or of all columns."""

    q_position: Tensor  # [B|1, Hq|1, rows * q_block] int32, -1 where the slot is empty
    k_position: Tensor  # [B|1, H|1, G, cols * k_block] int32, for each key map
    group_of_row: Tensor | None  # [rows], the key map of each row; None if there is one map
    q_lead: int  # empty slots before the first query
    causal: bool  # whether keys after a query are masked
    q_in_order: bool  # queries stand in original order, so that their positions need not be read
    k_in_order: bool  # keys likewise
    window: int | None = None  # when causal, how many tokens a query sees at most, its own included; None: all

    def sees(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Whether queries at the positions `q_at` see keys at `k_at`, broadcast against each other."""
        return sees(q_at, k_at, causal=self.causal, window=self.window)

    def of_heads(self, cut: Callable[[Tensor], Tensor]) -> TokenPositions:
        """The positions of some heads. `cut` takes them from a tensor whose second axis counts heads."""
        return evolve(self, q_position=cut(self.q_position), k_position=cut(self.k_position))


class AlwaysKept(NamedTuple):
    """Blocks that are kept for their position; a field of None keeps none. All numbers may be of any size."""

    near: int | None = None  # tokens: the blocks of `BlockGrid.within(near)`
    first: int | None = None  # tokens: the blocks of `BlockGrid.holding_first(first)`
    stride: tuple[int, int] | None = None  # (eta, seed): one of every eta blocks of a row, as `Stride` draws them
    last: int | None = None  # queries: all blocks of the rows that hold one of the last so many of the prompt

    def joined(self, other: AlwaysKept) -> AlwaysKept | None:
        """What either keeps; None if both set the same field."""
        if any(mine is not None and its is not None for mine, its in zip(self, other, strict=True)):
            return None
        return self._replace(**{name: its for name, its in other._asdict().items() if its is not None})


NO_BLOCKS = AlwaysKept()


def last_from(queries: int, grid: BlockGrid) -> int:
    """The position from which on queries are the last so many of the prompt, as a number that int32 holds."""
    return min(grid.prompt_end - min(queries, FAR), FAR)
