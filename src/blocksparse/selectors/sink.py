"""Keep the start of the prompt (BFLA, eq. 16; the attention sink)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import size, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.positions.places import Places
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(cache_hash=True)
class Sink(PositionSelector):
    """Keep every block that holds one of the first `tokens` original positions (BFLA, eq. 16)."""

    tokens: int = field(default=1, converter=whole, validator=size)

    def where(self, grid: Grid) -> Tensor:
        return grid.holding_first(self.tokens)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= N

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return Places(first=self.tokens), ()

    def alignment(self, causal: bool) -> int:
        return 1
