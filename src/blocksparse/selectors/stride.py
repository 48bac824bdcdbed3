"""Keep every eta-th block of a row (BFLA, eq. 18)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen, validators
from torch import Tensor

from blocksparse.kernels.within_reach import Places, every
from blocksparse.scorers.grid import Grid
from blocksparse.selectors import counter_hash
from blocksparse.selectors.counter_hash import block_indices
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(eq=False)
class Stride(PositionSelector):
    """Keep one block of every `eta` consecutive ones in a row, for all heads alike (BFLA, eq. 18).

    The blocks kept in a row start at an offset drawn for that row, so that each column, too, is kept in one
    row of `eta` on average, without a pattern. Indices are those of the whole prompt. The paper rescues
    dropped blocks only; `a | Stride(eta)` is the same set.

    Args:
        eta: distance between the blocks kept in a row.
        seed: of the offsets, in [0, 2^32).
        released: the linear rule of the authors' code, `131 i + 17 j + seed`, with rows counted from the start of
            the chunk. Where `eta` shares a factor with 17, it keeps whole rows and leaves others out.
    """

    eta: int = field(validator=[validators.instance_of(int), validators.gt(0)])
    seed: int = field(default=0, validator=counter_hash.seed)
    released: bool = field(default=False, kw_only=True)

    def where(self, grid: Grid) -> Tensor:
        if not self.released:
            return every(self.eta, self.seed, grid)
        i, j = block_indices(grid, of_chunk=True)
        # The sum is a multiple of eta; reduced before they meet, both terms meet once.
        return (17 * j % self.eta == -(131 * i + self.seed) % self.eta)[None, None]

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return super().parts() if self.released else (Places(stride=(self.eta, self.seed)), ())
