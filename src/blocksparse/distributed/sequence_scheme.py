"""The base class of schemes in which queries stay on the rank that has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import a, flag
from blocksparse.distributed.alignment import aligned
from blocksparse.distributed.pieces import Piece, cut, head_tail, in_order, taken
from blocksparse.distributed.scheme import Scheme
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

    def _pieces(self, tokens: Sequence[int], before: int, at: int) -> list[list[Piece]]:
        """The pieces of each rank, which has so many tokens."""
        return head_tail(tokens, before, at) if self.head_tail else in_order(tokens, before)

    def shard(self, x: Tensor, dim: int = 2, *, before: int = 0, causal: bool = True) -> Tensor:
        at = aligned(self._pipeline, causal=causal)
        pieces = cut(x.shape[dim], self._ranks.size, before, at, both_ends=self.head_tail)[self._ranks.rank]
        return torch.cat(taken(x, pieces, dim, before=before), dim)
