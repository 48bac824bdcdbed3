"""Keep every eta-th block of a row (BFLA, eq. 18)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.alignment import by_position
from blocksparse.checks.validators import flag, hash_seed, size, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.positions.places import Places
from blocksparse.kernels.positions.within_reach import every
from blocksparse.selectors.counter_hash import block_indices
from blocksparse.selectors.position_selector import PositionSelector


@final
@frozen(cache_hash=True)
class Stride(PositionSelector):
    """Keep one block of every `eta` consecutive ones in a row, for all heads alike (BFLA, eq. 18).

    The kept blocks of a row start at an offset that is drawn for the row, so that each column, too, is kept in one
    of `eta` rows on average, without a regular pattern. The draw is by the row's index in the whole prompt. The
    paper applies the rule only to blocks that another rule dropped; `a | Stride(eta)` keeps the same set.

    Args:
        eta: distance between the kept blocks of a row.
        seed: seed of the offsets, in [0, 2^32).
        released: use the linear rule of the authors' code, by which `131 i + 17 j + seed` must be a multiple of
            `eta`, with rows counted from the start of the chunk. If `eta` is a multiple of 17, most rows keep
            nothing, and the others keep one block of every `eta / 17`.
    """

    eta: int = field(converter=whole, validator=size)
    seed: int = field(default=0, converter=whole, validator=hash_seed)
    released: bool = field(default=False, validator=flag, kw_only=True)

    def where(self, grid: Grid) -> Tensor:
        if not self.released:
            return every(self.eta, self.seed, grid)
        eta, (i, j) = min(self.eta, FAR), block_indices(grid, of_chunk=True)
        # Both terms are reduced modulo eta before they are broadcast against each other, so that the only
        # operation over all blocks is one comparison.
        return (17 * j % eta == -(131 * i + self.seed) % eta)[None, None]

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.eta == 1 and not self.released

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return super().parts() if self.released else (Places(stride=(self.eta, self.seed)), ())

    def alignment(self, causal: bool) -> int:
        if self.released:
            raise ValueError("'Stride' with 'released' counts rows from the start of the part")
        return by_position(self, causal)
