"""The base class of schemes in which queries stay on the rank that has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.class_line import of_parts
from blocksparse.check.validators import a, flag
from blocksparse.distributed.heads import refuse_apart
from blocksparse.distributed.pieces import Piece, cut, head_tail, in_order, taken
from blocksparse.distributed.scheme import Scheme
from blocksparse.distributed.shares import shares
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.pipeline import Pipeline


@frozen(eq=False)
class SequenceScheme(Scheme):
    """Every rank attends in all heads with its own queries. It takes a pipeline, not another scheme."""

    head_tail: bool = field(default=False, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        a(Pipeline).check(attention=self.attention)

    @property
    def _pipeline(self) -> AnyPipeline:
        assert isinstance(self.attention, Pipeline)
        return self.attention

    def _aligned(self, causal: bool, heads: tuple[int, int] | None = None) -> int:
        """By how many tokens queries may be cut, for each rank to choose as one process would.

        Args:
            heads: the query heads and KV heads of the call, where they are known.

        Raises:
            ValueError: a stage may choose otherwise for a part of the queries.
        """
        pipeline = self._pipeline
        try:
            return of_parts(causal, pipeline.permuter, pipeline.scorer, pipeline.selector)
        except ValueError as error:
            raise ValueError(f"{error}; {self._way_out(heads)}") from error

    def _way_out(self, heads: tuple[int, int] | None) -> str:
        by_rows = "give a pipeline that chooses in each row of blocks by itself, as auto() does"
        if heads is None:
            return f"use Ulysses, whose ranks divide the heads, or {by_rows}"
        try:
            shares(*heads, self._ranks.size, [1.0] * heads[0], 1)
            refuse_apart(self._pipeline, split=self._ranks.size > heads[1])
        except ValueError:  # Ulysses would refuse these heads
            return by_rows
        return "use Ulysses, which runs this pipeline on whole sequences"

    def _pieces(self, tokens: Sequence[int], before: int, at: int) -> list[list[Piece]]:
        """The pieces of each rank, which has so many tokens."""
        return head_tail(tokens, before, at) if self.head_tail else in_order(tokens, before)

    def shard(self, x: Tensor, dim: int = 2, *, before: int = 0, causal: bool = True) -> Tensor:
        at = self._aligned(causal)
        pieces = cut(x.shape[dim], self._ranks.size, before, at, both_ends=self.head_tail)[self._ranks.rank]
        return torch.cat(taken(x, pieces, dim, before=before), dim)
