"""Keep the end of the sequence for all queries (text behind a picture)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import size, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(cache_hash=True)
class LastKeys(PositionSelector):
    """Keep every block that holds one of the last `tokens` keys of the prompt, for every query that may see it.

    With text behind a picture, `LastKeys(text) | LastQueries(text)` lets the picture see all text, and the text
    everything. Where text stands in front, `Sink(text)` does the first.
    """

    tokens: int = field(converter=whole, validator=size)

    def where(self, grid: Grid) -> Tensor:
        return grid.k_last >= min(grid.prompt_keys - min(self.tokens, grid.prompt_keys), FAR)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= N

    @property
    def prompt_tail(self) -> int:
        return self.tokens

    def alignment(self, causal: bool) -> int:
        return 1
