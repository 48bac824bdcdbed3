"""Antidiagonals of small cells, a softmax over cells, sums per block (XAttention, arXiv 2503.16428)."""

from __future__ import annotations

from typing import Literal, final

import torch
from attrs import Attribute, evolve, field, frozen, validators
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.grid import Grid
from blocksparse.scorers.scorer import Scorer

Pattern = Literal["antidiagonal", "slash", "sum"]

_WORKSPACE = 2**28  # bytes of logits at a time; their softmax takes as much again


@final
@frozen(eq=False)
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
            of them ("sum": cells are pooled, which takes fewer multiplications, in fp32).
        forced: force the block of token 0 and the diagonal, and count their mass, as XAttention does; `False`
            leaves both to the selector. Not causal: nothing is forced, as in the released code.
        segment: where a permuter sorts inside segments, the same `S`: the row's own segment is then forced
            and takes no part in the softmax, as PBS-Attn has it; keys that an order moves beyond it are not
            looked at. `None` scores every reachable cell of any order.
        padded_tail: leave the empty slots of a short cell at zero, as the released code does.
    """

    stride: int = field(default=8, validator=pooling.size)
    block: int = field(default=128, validator=pooling.size, kw_only=True)
    k_block: int | None = field(default=None, validator=validators.optional(pooling.size), kw_only=True)
    pattern: Pattern = field(
        default="antidiagonal", validator=validators.in_(("antidiagonal", "slash", "sum")), kw_only=True
    )
    forced: bool = field(default=True, kw_only=True)
    segment: int | None = field(default=None, validator=validators.optional(pooling.size), kw_only=True)
    padded_tail: bool = field(default=False, kw_only=True)

    @block.validator
    @k_block.validator
    def _blocks_hold_cells(self, attribute: Attribute[int], size: int | None) -> None:
        if size is not None and size % self.stride:
            raise ValueError(f"'{attribute.name}' must be a multiple of 'stride' ({self.stride}): {size}")

    @segment.validator
    def _segment_holds_blocks(self, _: object, segment: int | None) -> None:
        for block in (self.block, self.k_block or self.block):
            if segment is not None and segment % block:
                raise ValueError(f"'segment' must be a multiple of 'block' ({block}): {segment}")

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, *, causal: bool, scale: float
    ) -> BlockMass:
        k_block = self.k_block or self.block
        grid = Grid.of(q, k, permutation, q_block=self.block, k_block=k_block, causal=causal)
        cells = Grid.of(q, k, permutation, q_block=self.stride, k_block=self.stride, causal=causal)
        q_cells = self._cells(permutation.gather_queries(q), lead=cells.q_lead)  # [B, Hq, cells, stride, D]
        keys = self._factors(self._cells(permutation.gather_keys(k), lead=0))  # [B, H, cells, E]
        if permutation.q_index is None and keys.shape[1] == k.shape[1]:
            cells = cells.shared()  # query heads of a group reach the same cells
        in_order = permutation.q_index is None and permutation.k_index is None
        weight = scale if self.pattern == "sum" else scale / self.stride
        high, wide = self.block // self.stride, k_block // self.stride  # cells per block
        empty = grid.q_lead // self.stride  # cells before the first one in row 0

        masses = []
        step = max(1, _WORKSPACE // (q.shape[0] * q.shape[1] * high * cells.cols * _wide(q).itemsize))
        for top in range(0, grid.rows, step):
            bottom = min(top + step, grid.rows)
            first, last = max(top * high - empty, 0), min(bottom * high - empty, cells.rows)
            end = self._end(cells, last, in_order=in_order)
            queries = self._factors(q_cells[:, :, first:last], against=True)
            logits = pooling.products(queries, keys[:, :, :end]).mul_(weight)  # [B, Hq, last - first, end]
            eligible = self._eligible(cells, first, last, end)
            mass = _softmax(logits, eligible, may_be_none=self.segment is not None)
            above, below = first - (top * high - empty), bottom * high - empty - last
            if above or below:
                mass = pad(mass, (0, 0, above, below))
            mass = _sums(mass.unflatten(2, (-1, high)).sum(3), wide)
            masses.append(pad(mass, (0, grid.cols - mass.shape[-1])))
        return BlockMass(torch.cat(masses, dim=2), grid, self._force(grid))  # [B, Hq, rows, cols]

    def _cells(self, x: Tensor, *, lead: int) -> Tensor:
        """Slots `[B, H, N, D]` in cells, `[B, H, cells, stride, D]`; `lead` empty slots come first."""
        missing = -(lead + x.shape[2]) % self.stride
        ends = ((x[:, :, : self.stride - lead], lead), (x[:, :, -(self.stride - missing) :], missing))
        before, after = (
            (x.new_zeros(1) if self.padded_tail else tokens.mean(2, keepdim=True, dtype=_wide(x)).to(x.dtype))
            .expand(*x.shape[:2], count, x.shape[3])
            for tokens, count in ends
        )  # fmt: skip
        whole = torch.cat((before, x, after), dim=2) if lead or missing else x
        return rearrange(whole, "B H (cells stride) D -> B H cells stride D", stride=self.stride)

    def _factors(self, cells: Tensor, *, against: bool = False) -> Tensor:
        """One vector per cell, `[B, H, cells, E]`, whose products are sums over the pairs of the pattern.

        Args:
            against: the side that runs against the order of slots.
        """
        if self.pattern == "sum":
            return cells.mean(3, dtype=_wide(cells))
        if self.pattern == "antidiagonal" and against:
            cells = cells.flip(3)
        return cells.flatten(3)

    def _end(self, cells: Grid, last: int, *, in_order: bool) -> int:
        """Key cells that query cells before `last` may reach: later ones need not be looked at."""
        end = (cells.k_len - cells.q_len) // self.stride + last
        if not cells.causal:
            return cells.cols
        if self.segment is not None:
            return (end - 1) * self.stride // self.segment * self.segment // self.stride
        return min(end, cells.cols) if in_order else cells.cols

    def _eligible(self, cells: Grid, first: int, last: int, end: int) -> Tensor:
        """Key cells up to `end` that take part in the softmax of query cells `first` to `last`."""
        part = evolve(
            cells,
            q_first=cells.q_first[:, :, first:last],
            q_last=cells.q_last[:, :, first:last],
            k_first=cells.k_first[..., :end],
            k_last=cells.k_last[..., :end],
        )
        own = pooling.own_segment(part, self.segment)
        return part.reachable if own is None else part.reachable & ~own

    def _force(self, grid: Grid) -> Tensor | None:
        own = pooling.own_segment(grid, self.segment)
        if not (self.forced and grid.causal):
            return own
        counted = grid.holding_first(1) | grid.diagonal
        return counted if own is None else counted | own


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _softmax(logits: Tensor, eligible: Tensor, *, may_be_none: bool) -> Tensor:
    """Softmax over the eligible cells of each row, `[B, Hq, rows, cols]`; overwrites `logits`.

    Args:
        eligible: may have fewer heads, which query heads then share.
        may_be_none: a row may have nothing eligible; it then holds no mass.
    """
    grouped, eligible = logits.unflatten(1, (eligible.shape[1], -1)), eligible.unsqueeze(2)
    mass: Tensor = grouped.masked_fill_(~eligible, float("-inf")).softmax(-1)
    if may_be_none:
        mass = mass.masked_fill_(~eligible.any(-1, keepdim=True), 0.0)
    return mass.flatten(1, 2)


def _sums(x: Tensor, run: int) -> Tensor:
    """Sums of `run` entries each along the last axis; the last may be short."""
    whole = x.shape[-1] // run * run
    sums: Tensor = x[..., :whole].unflatten(-1, (-1, run)).sum(-1)
    if whole == x.shape[-1]:
        return sums
    return torch.cat((sums, x[..., whole:].sum(-1, keepdim=True)), dim=-1)
