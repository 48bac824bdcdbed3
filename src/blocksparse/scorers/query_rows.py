"""Every query of a row against the mean key of each block (FlashPrefill, arXiv 2603.06199, section 3.2)."""

from __future__ import annotations

from functools import partial
from math import lcm
from typing import Any, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, maybe_whole, optional, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.cell_products import Cells
from blocksparse.kernels.scoring.cell_mass import cell_mass
from blocksparse.kernels.scoring.cell_means import cell_mean
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer


@final
@frozen(cache_hash=True)
class QueryRowsScorer(Scorer[GlobalPermutation, BlockMass]):
    """Sums over the queries of a row of blocks of `exp(q . mean key)`, as shares of the row's total.

    A query counts for a block if it may see the block's last token, so that no mean holds keys of its future. In
    original order a row's own block thus counts for its last query alone, and a row that sees no other block may
    hold no mass at all: also keep the diagonal or a `Band`. Mean keys are rounded to the dtype
    of the keys, as in the authors' code. This takes M N D / k_block multiplications per query head, `block` times
    as many as `MeanPoolScorer`, and no memory for the logits of single queries but some rows' at a time.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)

    keeps_history = True
    takes_paged_keys = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: GlobalPermutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> BlockMass:
        k_block = self.k_block or self.block
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=k_block)
        if history is None:
            keys = cell_mean(k, k_block, index=permutation.key_slots)  # [B, H, cols, D]
        else:
            keys = history.blocks("cell", k, permutation, k_block, partial(cell_mean, slots=k_block))
        mass = cell_mass(
            permutation.gather_queries(q),
            keys,
            Cells(1, 0, self.block, 1, spec.causal, padded_tail=False, **_reach(grid)),
            first_cell=grid.first_position,
            segment=None,
            weight=spec.scale,
            flipped=False,
            joint=True,
        )
        return BlockMass(mass, grid)  # [B, Hq, rows, cols]

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)


def _reach(grid: Grid) -> dict[str, Any]:
    """Fields of `Cells` by which a query reaches the blocks whose last token it may see."""
    if not grid.causal:
        return {}
    position = grid.q_position[..., grid.q_lead : grid.q_lead + grid.q_len]  # [B|1, H|1, M]
    last = grid.k_last.squeeze(2)  # [B|1, H|1, cols]
    reach = {"q_last": position.contiguous(), "k_first": last}
    if grid.window is not None:
        reach |= {"q_floor": position - grid.window, "k_last": last}
    return reach
