"""Arguments of the attention kernels, as a few frozen objects.

Others are `TokenPositions` of `grid.py`, the tiles of `common/tiles.py`, and `TileOperands` of `quantize/tile_operands.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen
from torch import Tensor

from blocksparse.kernels.masks.grid import BlockGrid


@frozen(eq=False)
class Lists:
    """Which key blocks each row of blocks visits; `BlockPlan` makes them of a mask."""

    full_count: Tensor  # [B|1, Hm, rows] int32; Hm divides Hq
    partial_count: Tensor  # [B|1, Hm, rows] int32
    index: Tensor  # [B|1, Hm, rows, cols] int16 or int32, a row's full blocks, then its partial blocks
    q_block: int
    k_block: int


@frozen(eq=False)
class RankedLists:
    """Which key blocks each row visits, in order; it visits the first `opened` in any case and `count` at most."""

    index: Tensor  # [B, Hq, rows, cols] int32, blocks in visiting order
    opened: Tensor  # [B, Hq, rows] int32
    count: Tensor  # [B, Hq, rows] int32
    q_block: int
    k_block: int


@frozen(eq=False)
class Approximation:
    """Approximations of the portable kernel; an entry of None is exact and costs nothing.

    With scales, token `i` is `x[i] * scale[i]`. Row `r` of the mask reads the keys of head `k_copy[r] * Hk + h`, where `h`
    is its KV head. So rows may differ in how their keys were rounded. Weights of fp8 values become fp8, too.
    """

    pv_skip: Tensor | None = None  # [Hq] fp32, negative
    q_scale: Tensor | None = None  # [B, Hq, M] fp32; q and k are then int8
    k_scale: Tensor | None = None  # [B, copies * Hk, N] fp32
    k_copy: Tensor | None = None  # [B|1, Hq|1, rows] int32; k is then [B, copies * Hk, N, D]
    v_scale: Tensor | None = None  # [B, Hk, N] fp32; v is then fp8 (e4m3)

    def of_heads(self, cut: Callable[[Tensor], Tensor]) -> Approximation:
        """That of some heads, as `TokenPositions.of_heads` has them; 8-bit operands are in slot order and never cut."""
        return self if self.pv_skip is None else evolve(self, pv_skip=cut(self.pv_skip[None])[0])


@frozen(eq=False)
class LogitChange:
    """Exact changes of logits in the portable kernel; an entry of None costs nothing."""

    softcap: float | None = None  # a logit x, after the scale, becomes softcap * tanh(x / softcap)
    sinks: Tensor | None = None  # [Hq] fp32, one more logit, neither scaled nor capped, that has no value

    def of_heads(self, cut: Callable[[Tensor], Tensor]) -> LogitChange:
        """That of some heads, as `TokenPositions.of_heads` has them."""
        return self if self.sinks is None else evolve(self, sinks=cut(self.sinks[None])[0])


@frozen(eq=False)
class KeptBlocks:
    """Which blocks a call kept, and which queries and keys stand in them."""

    keep: Tensor  # [B|1, H|1, rows, cols] bool
    grid: BlockGrid
    q_index: Tensor | None = None  # [B, Hq, M] int32, the query in each slot; None if queries stay in place
    key_slots: Tensor | None = None  # [B, H, N] int32, the key in each slot; None if keys stay in place


@frozen(eq=False)
class StopRule:
    """When a row of blocks stops early (S2O, algorithm 3)."""

    tau: Tensor  # [Hq] fp32
    patience: int  # after how many satisfied blocks in succession
    commit: bool  # whether the block after which a row stops is part of the result
    mean: bool  # whether the mean of its queries' gains decides; else every query must be satisfied
