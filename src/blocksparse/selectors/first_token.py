"""Keep the block that now holds token 0 (PBS-Attn's released code)."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.selectors.places import Places
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(eq=False)
class FirstToken(PositionSelector):
    """Keep the one block that holds original token 0, wherever the permuter put it.

    PBS-Attn's released code adds it after selection. `Sink(n)` keeps the blocks of the first `n` tokens.
    """

    def where(self, grid: Grid) -> Tensor:
        return grid.holding_first(1)

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return Places(first=1), ()
