"""Products of groups of queries with groups of keys; a block gets its greatest one (BFLA, section 3.2)."""

from __future__ import annotations

from math import lcm
from typing import Any, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, flag, maybe_whole, multiple, optional, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.cell_products import Cells, cells_behind
from blocksparse.kernels.scoring.block_softmax import block_softmax
from blocksparse.kernels.scoring.group_max import group_max
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.pooling import reach_of
from blocksparse.scorers.scorer import Scorer


@final
@frozen(cache_hash=True)
class FlattenMaxPoolScorer(Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of the best product of two token groups (BFLA, eq. 3 to 9).

    A group is `g` consecutive slots. The product of two groups is `q[t] . k[t]` summed over their places `t`: the
    sum of the main diagonal of their `g x g` logits. The score of a block is the greatest product of a query group
    and a key group in it. A pair of groups takes part if some query of the row of blocks may see some key of the
    key group, and if some place has a token in both groups; short groups are compared over these places only.

    The paper does not divide the sum by `g`. The spread of the sums grows with `g`, so that the softmax over
    blocks is close to one-hot and a target for the mass has little effect. `per_token` divides the sums.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        g: slots per group; divides the blocks.
        k_block: slots per key block.
        per_token: divide each product by the number of places that have a token in both groups, which makes it a
            mean logit.
        padded_tail: let pairs that take no part score 0, as zero padding does in the released code. A 0 wins where
            all real products of a block are below 0.
    """

    block: int = field(default=256, converter=whole, validator=block_size)
    g: int = field(default=64, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    per_token: bool = field(default=False, validator=flag, kw_only=True)
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        multiple("block", self.block, "g", self.g)
        multiple("k_block", self.k_block, "g", self.g)

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
        reach: dict[str, Any] = {}
        if spec.causal and (permutation.q_index is not None or permutation.k_index is not None):
            reach = reach_of(Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.g))
        elif grid.window is not None:
            reach["behind"] = cells_behind(grid.window, self.g)
        high, wide = self.block // self.g, k_block // self.g
        best = group_max(
            permutation.gather_queries(q),
            permutation.gather_keys(k),
            Cells(self.g, grid.q_lead, high, wide, spec.causal, self.padded_tail, **reach),
            first_row=grid.first_row,
            per_token=self.per_token,
        )
        mass, _ = block_softmax(best, grid, scale=spec.scale)
        return BlockMass(mass, grid)  # [B, Hq, rows, cols]

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)
