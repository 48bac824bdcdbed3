"""Rules of position as numbers, which one kernel launch applies together."""

from __future__ import annotations

from typing import NamedTuple

from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.positions.block_grid import BlockGrid


class Places(NamedTuple):
    """Blocks that are chosen by position; a field of None chooses none. All numbers may be of any size."""

    near: int | None = None  # tokens: the blocks of `BlockGrid.within(near)`
    first: int | None = None  # tokens: the blocks of `BlockGrid.holding_first(first)`
    stride: tuple[int, int] | None = None  # (eta, seed): one of every eta blocks of a row, as `Stride` draws them
    last: int | None = None  # queries: all blocks of the rows that hold one of the last so many of the prompt

    def joined(self, other: Places) -> Places | None:
        """The places that either chooses; None if both set the same field."""
        if any(mine is not None and its is not None for mine, its in zip(self, other, strict=True)):
            return None
        return self._replace(**{name: its for name, its in other._asdict().items() if its is not None})


NOWHERE = Places()


def last_from(queries: int, grid: BlockGrid) -> int:
    """The position from which on queries are the last so many of the prompt, as a number that int32 holds."""
    return min(grid.prompt_end - min(queries, FAR), FAR)
