"""Keep everything for the last queries (tri-shape of MInference's released code)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import size, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.positions.places import Places, last_from
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(cache_hash=True)
class LastQueries(PositionSelector):
    """Keep every block of the rows that hold one of the last `tokens` queries of the prompt.

    A call ends its prompt unless it says how much follows: `pipeline(q, k, v, remaining=tokens)`.
    """

    tokens: int = field(converter=whole, validator=size)

    def where(self, grid: Grid) -> Tensor:
        return grid.q_last >= last_from(self.tokens, grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= M

    @property
    def prompt_tail(self) -> int:
        return self.tokens

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return Places(last=self.tokens), ()

    def alignment(self, causal: bool) -> int:
        return 1
