"""A grid of blocks as kernels take it, and rules of position on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.kernels.common.sizes import FAR


def is_visible(q_at: Tensor, k_at: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Whether queries at the positions `q_at` see keys at `k_at`, broadcast against each other; bool.

    A query at position `p` sees every key, or when causal those at `k <= p`. With a window it sees only those at `p - window
    < k <= p`, which are `window` tokens with its own. A position of -1 is an empty slot and never seen.
    """
    there = k_at >= 0
    if not causal:
        return there.expand(torch.broadcast_shapes(q_at.shape, k_at.shape))
    seen = there & (k_at <= q_at)
    return seen if window is None else seen & (k_at > q_at - window)


@frozen(eq=False, kw_only=True)
class BlockGrid:
    """Rows of `q_block` query slots by columns of `k_block` key slots, and the positions that each block holds.

    Tensors have four axes, `[B|1, H|1, rows|1, cols|1]`; an axis of one entry holds for all. Kernels read the positions
    and work out the rest block by block; reference implementations take the properties.
    """

    causal: bool
    q_len: int
    k_len: int
    q_block: int
    k_block: int
    q_first: Tensor  # [B|1, H|1, rows, 1] int32
    q_last: Tensor  # [B|1, H|1, rows, 1] int32
    k_first: Tensor  # [B|1, H|1, rows|1, cols] int32
    k_last: Tensor  # [B|1, H|1, rows|1, cols] int32; -1 for a block of empty slots
    k_whole: Tensor  # [B|1, H|1, rows|1, cols] bool, whether the block has no empty slot
    # How many tokens a query sees at most, its own included. None unless causal, and where it would hide nothing.
    window: int | None = None
    remaining: int = 0  # tokens of the prompt after the last query

    @property
    def rows(self) -> int:
        return self.q_first.shape[2]

    @property
    def cols(self) -> int:
        return self.k_first.shape[3]

    @property
    def first_position(self) -> int:
        """The position of the first query; 0 when not causal."""
        return self.k_len - self.q_len if self.causal else 0

    @property
    def end(self) -> int:
        """The position after the last query's."""
        return self.first_position + self.q_len

    @property
    def prompt_end(self) -> int:
        """The position after the last query of the prompt, which a later call may have."""
        return self.end + self.remaining

    @property
    def prompt_keys(self) -> int:
        """Number of keys of the prompt. A call that is not causal has all of them."""
        return self.k_len + self.remaining if self.causal else self.k_len

    @property
    def first_row(self) -> int:
        """The index of row 0 among the rows of the whole prompt."""
        return self.first_position // self.q_block

    @property
    def q_lead(self) -> int:
        """Number of empty slots in row 0 before its first query."""
        return self.first_position % self.q_block

    @property
    def visible(self) -> Tensor:
        """The blocks in which some query may see some key, `[B|1, H|1, rows, cols]`."""
        there = self.k_last >= 0
        if not self.causal:
            return there.expand(self._shape)
        seen = there & (self.k_first <= self.q_last)
        return seen if self.window is None else seen & (self.k_last > self.q_first - self.window)

    @property
    def full(self) -> Tensor:
        """The blocks in which every query may see every key, so that an executor need not mask them."""
        if not self.causal:
            return self.k_whole.expand(self._shape)
        full = self.k_whole & (self.k_last <= self.q_first)
        return full if self.window is None else full & (self.k_first > self.q_last - self.window)

    def is_visible(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Whether queries at the original positions `q_at` see keys at `k_at`, broadcast against each other."""
        return is_visible(q_at, k_at, causal=self.causal, window=self.window)

    @property
    def diagonal(self) -> Tensor:
        """The visible blocks whose keys may be the row's own tokens.

        If they are kept, no causal query is left without a key. When not causal, queries need not be the same
        tokens as the keys, and all entries are False.
        """
        if not self.causal:
            return torch.zeros(self._shape, dtype=torch.bool, device=self.k_last.device)
        return self.visible & (self.k_last >= self.q_first)

    def holding_first(self, tokens: int) -> Tensor:
        """The visible blocks that hold any of the first `tokens` original positions."""
        return self.visible & (self.k_first < min(tokens, FAR))

    def within(self, tokens: int) -> Tensor:
        """The visible blocks that may hold a key at most `tokens` before some query of the row.

        When not causal, keys at most `tokens` after a query count as well.
        """
        tokens = min(tokens, FAR)
        near = self.visible & (self.k_last >= self.q_first - tokens)
        return near if self.causal else near & (self.k_first <= self.q_last + tokens)

    def own_segment(self, S: int) -> Tensor:
        """The visible blocks that lie in the same segment of `S` original positions as the row."""
        S = min(S, FAR)
        return self.visible & (self.k_first // S == self.q_first // S)

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        B, H, rows, _ = torch.broadcast_shapes(self.q_last.shape, (*self.k_last.shape[:2], 1, 1))
        return B, H, rows, self.cols


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

    def is_visible(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Whether queries at the positions `q_at` see keys at `k_at`, broadcast against each other."""
        return is_visible(q_at, k_at, causal=self.causal, window=self.window)

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
