"""What kernels over blocks know of the grid: the first and the last original position of every block."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
