"""`Unit` gets a choice of its own: a layer, or some KV heads of one. `Probe` is what a candidate does there."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.layers.head_groups import AnyPipeline, HeadGroups, Heads
from blocksparse.layers.schedule import LayerPipeline

DENSE = "dense"  # the name of dense attention beside those of candidates


@final
@frozen
class Unit:
    """Some consecutive KV heads of a layer, with the query heads that belong to them."""

    layer: int
    heads: Heads
    kv_heads: int  # of the whole layer

    def __str__(self) -> str:
        return (
            f"{self.layer}"
            if len(self.heads) == self.kv_heads
            else f"{self.layer}:{self.heads[0]}-{self.heads[-1]}"
        )

    @classmethod
    def of_layer(cls, layer: int, kv_heads: int, groups: int) -> list[Unit]:
        """A layer in so many groups of KV heads, as equal as can be."""
        cuts = [kv_heads * group // groups for group in range(groups + 1)]
        return [cls(layer, tuple(range(a, b)), kv_heads) for a, b in pairwise(cuts)]

    def part(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its heads of q `[B, Hq, M, D]`, k and v `[B, Hkv, N, D]`; views."""
        first, last, size = self.heads[0], self.heads[-1] + 1, q.shape[1] // k.shape[1]
        return q[:, first * size : last * size], k[:, first:last], v[:, first:last]

    def alone(self, pipeline: AnyPipeline) -> LayerPipeline:
        """What attends in the layer if only this unit is sparse."""
        others = tuple(head for head in range(self.kv_heads) if head not in self.heads)
        return HeadGroups({self.heads: pipeline, others: None}) if others else pipeline


Key = tuple[Unit, str]
"""A unit, and the name of what attends there."""


@final
@frozen
class Probe:
    """One candidate on the q, k and v of one unit."""

    density: float
    error: float  # relative L1 distance of the output from dense attention's
