"""Keep the keys near the query (BFLA, eq. 15)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.alignment import by_position
from blocksparse.checks.validators import count, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.positions.places import Places
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(cache_hash=True)
class Band(PositionSelector):
    """Keep every block that may hold a key at most `tokens` away from some query of the row (BFLA, eq. 15).

    Distances are between original positions, to keys before the query when causal, to keys on both sides
    otherwise. To keep `w` whole blocks before the row's own, use `Band(w * block)`.
    """

    tokens: int = field(converter=whole, validator=count)

    def where(self, grid: Grid) -> Tensor:
        return grid.within(self.tokens)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= (N if causal else max(M, N)) - 1  # the greatest distance

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return Places(near=self.tokens), ()

    def alignment(self, causal: bool) -> int:
        return by_position(self, causal)
