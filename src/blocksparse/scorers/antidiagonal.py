"""Antidiagonals of small cells, a softmax over cells, sums per block (XAttention, arXiv 2503.16428)."""

from __future__ import annotations

from functools import partial
from math import lcm
from typing import Any, Literal, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, flag, maybe_whole, multiple, one_of, optional, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.cell_products import Cells, cells_behind
from blocksparse.kernels.positions.places import Places
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.kernels.scoring.cell_mass import cell_mass
from blocksparse.kernels.scoring.cell_means import cell_mean, cell_means
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.pooling import reach_of
from blocksparse.scorers.scorer import Scorer

Pattern = Literal["antidiagonal", "slash", "sum"]


@final
@frozen(cache_hash=True)
class AntidiagonalScorer(Scorer[GlobalPermutation, BlockMass]):
    """Mass of a block: what its cells of `stride` x `stride` pairs hold in a softmax over cells (XAttention).

    The logit of a cell is the mean logit of the pairs on its antidiagonal, query slot `stride - 1 - r` with key
    slot `r`: every query and every key of the cell is looked at once, and each vertical or slash line that runs
    through whole cells meets the antidiagonal. Positions say which cells a query cell reaches, as they do for
    blocks, and it spreads a mass of 1 over them; a row of blocks thus holds `block / stride` in all.

    The empty slots of a short cell, at the tail or where a chunk starts, are filled with the mean of its tokens.
    This takes M N D / stride multiplications per query head, half of them when causal and in original order.

    Args:
        stride: side of a cell.
        block: slots per block, a multiple of `stride`; on both sides unless `k_block` is given.
        k_block: slots per key block, a multiple of `stride`.
        pattern: the pairs of a cell that are looked at: its "antidiagonal", its main diagonal ("slash"), or all
            of them ("sum": the mean query and the mean key of each cell are rounded to the dtype of `q` and
            multiplied, which takes a `stride`-th of the multiplications).
        forced: force the block of token 0 and the diagonal, and count their mass, as XAttention does; `False`
            leaves both to the selector, and after a permuter that keeps keys inside segments of whole blocks, as
            `SegmentKeySort` does, forces the segment that a causal row lies in and leaves it out of the softmax,
            as PBS-Attn has it. Not causal: nothing is forced, as in the released code.
        padded_tail: leave the empty slots of a short cell at zero, as the released code does.
        normalize: take a softmax for each query cell, as XAttention does. `False` takes one for all query cells of
            a row of blocks together, so that a cell counts by the size of its weights: the sum of `exp(logit)`
            over a block's pairs of cells, as a share of the row's (SubBlock of SGLang). A row holds a mass of 1.
    """

    stride: int = field(default=8, converter=whole, validator=block_size)
    block: int = field(default=128, converter=whole, validator=block_size, kw_only=True)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    pattern: Pattern = field(
        default="antidiagonal", validator=one_of("antidiagonal", "slash", "sum"), kw_only=True
    )
    forced: bool = field(default=True, validator=flag, kw_only=True)
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)
    normalize: bool = field(default=True, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        multiple("block", self.block, "stride", self.stride)
        multiple("k_block", self.k_block, "stride", self.stride)

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
        offset = k.shape[2] - q.shape[2] if spec.causal else 0
        lead, slots, weight = offset % self.stride, self.stride, spec.scale / self.stride
        segment = None if self.forced else pooling.segment_of(permutation, grid)
        reach = _reach(q, k, permutation, spec, grid, self.stride)
        if self.pattern == "sum":
            queries, keys = self._means(q, k, permutation, lead, history)
            lead, slots, weight = 0, 1, spec.scale
        else:
            queries, keys = permutation.gather_queries(q), permutation.gather_keys(k)
        high, wide = self.block // self.stride, k_block // self.stride
        mass = cell_mass(
            queries,
            keys,
            Cells(slots, lead, high, wide, spec.causal, self.padded_tail, **reach),
            first_cell=offset // self.stride,
            segment=None if segment is None else segment // self.stride,
            weight=weight,
            flipped=self.pattern == "antidiagonal",
            joint=not self.normalize,
        )
        return BlockMass(mass, grid, self._force(grid, segment))  # [B, Hq, rows, cols]

    def _means(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, lead: int, history: KeyHistory | None
    ) -> tuple[Tensor, Tensor]:
        """Mean queries `[B, Hq, q cells, D]` and mean keys `[B, H, k cells, D]` of cells, in slot order."""
        paged = None if history is None else history.paged(k)
        if history is not None and paged is None:
            mean = partial(cell_mean, slots=self.stride, padded_tail=self.padded_tail)
            keys = history.blocks("cell", k, permutation, self.stride, mean)
            return mean(q, lead=lead, index=permutation.q_index), keys
        return cell_means(
            q,
            k if paged is None else paged.keys,
            self.stride,
            lead=lead,
            padded_tail=self.padded_tail,
            q_index=permutation.q_index,
            k_index=permutation.key_slots if paged is None else paged.key_slots,
        )

    @property
    def keeps_history(self) -> bool:
        return self.pattern == "sum"

    @property
    def takes_paged_keys(self) -> bool:
        return self.pattern == "sum"

    def _force(self, grid: Grid, segment: int | None) -> Tensor | None:
        if not (self.forced and grid.causal):
            return pooling.own_segment(grid, segment)
        counted: Tensor = within_reach(None, grid, places=Places(first=1), diagonal=True)
        return counted

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)


def _reach(
    q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, grid: Grid, stride: int
) -> dict[str, Any]:
    """Fields of `Cells` that say by positions which cells may meet; none where their indices say as much."""
    if not grid.causal:
        return {}
    if permutation.q_index is None and permutation.k_index is None:
        return {} if grid.window is None else {"behind": cells_behind(grid.window, stride)}
    cells = Grid.of(q, k, permutation, spec, q_block=stride, k_block=stride)
    if permutation.q_index is None and permutation.k_index is not None:
        cells = cells.shared() if permutation.k_index.shape[1] == k.shape[1] else cells
    return reach_of(cells)
