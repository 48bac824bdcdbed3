"""Keep every reachable block, which gives dense attention."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(cache_hash=True)
class Everything(PositionSelector):
    """Keep every reachable block, whatever its score. The result is dense attention."""

    def where(self, grid: Grid) -> Tensor:
        return grid.reachable

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return True

    def alignment(self, causal: bool) -> int:
        return 1
