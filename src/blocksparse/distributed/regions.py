"""The pairs of a piece of queries and a piece of keys, in rectangles of blocks that executors can attend to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from blocksparse.distributed.pieces import Piece
from blocksparse.grid import Grid
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec


class Region(NamedTuple):
    """Queries and keys, either all keys before all queries, or the same tokens and causal."""

    queries: Piece
    keys: Piece
    causal: bool


def regions(queries: Piece, keys: Piece, *, causal: bool) -> Iterator[Region]:
    """The regions that cover all pairs which queries may see, each pair once."""
    if not causal or keys.end <= queries.start:
        yield Region(queries, keys, False)
        return
    own = Piece(max(queries.start, keys.start), min(queries.end, keys.end))  # the tokens that both pieces have
    if own.length <= 0:
        return
    if keys.start < own.start:
        yield Region(queries, Piece(keys.start, own.start), False)
    yield Region(own, own, True)
    if own.end < queries.end:
        yield Region(Piece(own.end, queries.end), own, False)


class Choice(NamedTuple):
    """The blocks that a piece of queries keeps among all keys that it may see."""

    piece: Piece
    keep: Tensor  # [B, H, rows, cols] bool
    k_index: Tensor | None  # [B, H, 1, keys] int32
    q_index: Tensor | None  # [B, Hq, M] int32
    q_block: int
    k_block: int

    @classmethod
    def of(cls, piece: Piece, masks: list[tuple[GlobalPermutation, BlockMask]]) -> Choice:
        """What was chosen in each KV head, one after another."""
        k_index = _heads([permutation.k_index for permutation, _ in masks])
        q_index = _heads([permutation.q_index for permutation, _ in masks])
        keep, grid = torch.cat([mask.keep for _, mask in masks], dim=1), masks[0][1].grid
        return cls(piece, keep, k_index, q_index, grid.q_block, grid.k_block)

    def within(self, region: Region, q: Tensor, k: Tensor) -> BlockMask:
        """What is kept in a region of `q` `[B, Hq, m, D]` and `k` `[B, Hkv, n, D]`."""
        first = region.queries.start - self.piece.start
        rows = slice(first // self.q_block, -(-(first + region.queries.length) // self.q_block))
        cols = slice(region.keys.start // self.k_block, -(-region.keys.end // self.k_block))
        k_index, q_index = self.k_index, self.q_index
        permutation = GlobalPermutation(
            None if k_index is None else k_index[..., region.keys.start : region.keys.end] - region.keys.start,
            None if q_index is None else q_index[..., first : first + region.queries.length] - first,
        )
        spec = AttentionSpec(scale=1.0, causal=region.causal)  # a grid asks for no scale
        grid = Grid.of(q, k, permutation, spec, q_block=self.q_block, k_block=self.k_block)
        return BlockMask(self.keep[:, :, rows, cols], grid)


def _heads(index: list[Tensor | None]) -> Tensor | None:
    """The maps of all heads; None if tokens stay in place, which does not depend on the head."""
    return torch.cat([each for each in index if each is not None], dim=1) if index[0] is not None else None
