"""The base class of rules of position on the cells of a video."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import NamedTuple

from attrs import converters, field, frozen, validators
from torch import Tensor

from blocksparse.checks.validators import count, whole
from blocksparse.geometry import Grid
from blocksparse.permuters.grid_order import given, three, three_sizes
from blocksparse.selectors.position_selector import PositionSelector


class _Blocks(NamedTuple):
    """The first and the last cell of each row of blocks and of each column, counted over the whole video."""

    q_first: Tensor  # [B|1, H|1, rows, 1] int32
    q_last: Tensor
    k_first: Tensor  # [B|1, H|1, rows|1, cols]
    k_last: Tensor


@frozen(cache_hash=True)
class GridSelector(PositionSelector):
    """A rule on the cells of a video. Text is always kept: its keys for all queries, and all keys for its queries.

    Tokens must arrive as models flatten them: `prefix` tokens of text, then the cells frame by frame and row by
    row, then any number of tokens of text.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens, after patching. None leaves it to a host that knows
            it (`integrations.diffusers`), and the rule cannot be asked by itself.
        prefix: how many tokens of text stand before the cells.
    """

    grid: tuple[int, int, int] | None = field(
        default=None, converter=converters.optional(three), validator=validators.optional(three_sizes)
    )
    prefix: int = field(default=0, converter=whole, validator=count, kw_only=True)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The grid.

        Raises:
            ValueError: there is none.
        """
        return given(self.grid, self)

    @abstractmethod
    def among_cells(self, grid: Grid) -> Tensor:
        """Mask of the blocks to keep for their cells, broadcastable to `[B, Hq, rows, cols]` bool."""

    def where(self, grid: Grid) -> Tensor:
        """Blocks to keep, bool, broadcastable to `[B, Hq, rows, cols]`.

        Raises:
            ValueError: there are fewer keys than `prefix` and cells.
        """
        T, H, W = self.sizes
        start, end = self.prefix, self.prefix + T * H * W
        if grid.k_len < end:
            raise ValueError(
                f"{type(self).__name__} needs at least {end} keys (prefix {start} + grid {T} x {H} x {W} = "
                f"{end - start}): Nk={grid.k_len}; give the grid after patching as (T, H, W), text in front as "
                "prefix="
            )
        text = (grid.q_first < start) | (grid.q_last >= end) | (grid.k_first < start) | (grid.k_last >= end)
        return text | self.among_cells(grid)

    def blocks(self, grid: Grid) -> _Blocks:
        """The first and the last cell of every block, as far as it holds cells."""
        cells = prod(self.sizes)
        places = (grid.q_first, grid.q_last, grid.k_first, grid.k_last)
        return _Blocks(*((x - self.prefix).clamp(0, cells - 1) for x in places))

    def alignment(self, causal: bool) -> int:
        raise ValueError(f"'{type(self).__name__}' asks which cells queries are, which a part of a call forgets")
