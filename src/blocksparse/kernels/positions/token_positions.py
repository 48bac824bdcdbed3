"""Original positions of the tokens in every row and column of blocks, as attention kernels read them."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen
from torch import Tensor

from blocksparse.kernels.positions.sight import sees


@frozen(eq=False)
class TokenPositions:
    """Original positions by place: a place is where a token stands among the blocks of all rows, or of all columns."""

    q_position: Tensor  # [B|1, Hq|1, rows * q_block] int32, -1 where the place is empty
    k_position: Tensor  # [B|1, H|1, G, cols * k_block] int32, for each key map
    group_of_row: Tensor | None  # [rows], the key map of each row; None if there is one map
    q_lead: int  # empty places before the first query
    causal: bool  # whether keys after a query are masked
    q_in_order: bool  # queries stand in original order, so that their positions need not be read
    k_in_order: bool  # keys likewise
    window: int | None = None  # when causal, how many tokens a query sees at most, its own included; None: all

    def sees(self, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Whether queries at the positions `q_at` see keys at `k_at`, broadcast against each other."""
        return sees(q_at, k_at, causal=self.causal, window=self.window)

    def of_heads(self, cut: Callable[[Tensor], Tensor]) -> TokenPositions:
        """The positions of some heads. `cut` takes them from a tensor whose second axis counts heads."""
        return evolve(self, q_position=cut(self.q_position), k_position=cut(self.k_position))
