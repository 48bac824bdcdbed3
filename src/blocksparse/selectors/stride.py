"""Keep every eta-th block of a row (BFLA, eq. 18)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.positions.within_reach import every
from blocksparse.selectors.counter_hash import block_indices
from blocksparse.selectors.places import Places
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.validators import flag, hash_seed, size, whole


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

    eta: int = field(converter=whole, validator=size)
    seed: int = field(default=0, converter=whole, validator=hash_seed)
    released: bool = field(default=False, validator=flag, kw_only=True)

    def where(self, grid: Grid) -> Tensor:
        if not self.released:
            return every(self.eta, self.seed, grid)
        eta, (i, j) = min(self.eta, FAR), block_indices(grid, of_chunk=True)
        # The sum is a multiple of eta; reduced before they meet, both terms meet once.
        return (17 * j % eta == -(131 * i + self.seed) % eta)[None, None]

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return super().parts() if self.released else (Places(stride=(self.eta, self.seed)), ())
