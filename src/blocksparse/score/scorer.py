"""The role of a scorer, q, k, Permutation -> BlockScores, and the values that scorers give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import lcm
from typing import Any, Generic, TypeVar, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.per_head import PerHead
from blocksparse.check.stage import Stage
from blocksparse.check.validators import block_size, maybe_whole, multiple, optional, whole
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.score.key_history import History
from blocksparse.spec import AttentionSpec


@frozen(eq=False)
class BlockScores:
    """The score of each block, one number per block and query head.

    Blocks that are `forced` are kept whatever their values are. A rule that keeps a share of the mass may count
    them first. Then fewer other blocks are kept than if forced blocks were added after the selection.

    Raises:
        TypeError: `values` is not fp32 (or float64), or `forced` is not bool.
        ValueError: one of them does not have an entry for each block of the grid.
    """

    values: Tensor  # [B, Hq, rows, cols] fp32, or float64
    grid: Grid
    forced: Tensor | None = None  # [B|1, Hq|1, rows, cols] bool; None forces nothing

    def __attrs_post_init__(self) -> None:
        shape = self.grid.batch, self.grid.q_heads, self.grid.rows, self.grid.cols
        if self.values.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"'values' must be float32: {self.values.dtype}. Convert them with .float().")
        if self.values.shape != shape:
            its = tuple(self.values.shape)
            raise ValueError(f"'values' must have the shape [B, Hq, rows, cols] = {shape}: {its}")
        if self.forced is None:
            return
        if self.forced.dtype != torch.bool:
            raise TypeError(f"'forced' must be bool: {self.forced.dtype}. Convert it with .bool().")
        its = tuple(self.forced.shape)
        if its[2:] != shape[2:] or len(its) != 4 or its[0] not in (1, shape[0]) or its[1] not in (1, shape[1]):
            raise ValueError(f"'forced' must have the shape [B|1, Hq|1, rows, cols] of {shape}: {its}. Expand it.")


@frozen(eq=False)
class BlockMass(BlockScores):
    """Non-negative scores whose sums along a row have a meaning, as cumulative rules need."""


@frozen(eq=False)
class BlockLogits(BlockScores):
    """Scores that are logits: any real numbers; their differences within a row count.

    Raises:
        TypeError, ValueError: `variance` is not of the dtype of `values`, or does not have an entry for each row.
    """

    variance: Tensor | None = field(
        default=None, kw_only=True
    )  # [B, Hq, rows], of a row's logits; None: their own

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.variance is None:
            return
        if self.variance.dtype != self.values.dtype:
            raise TypeError(f"'variance' must be {self.values.dtype}, as 'values' are: {self.variance.dtype}")
        if self.variance.shape != self.values.shape[:3]:
            its = tuple(self.variance.shape)
            raise ValueError(
                f"'variance' must have the shape [B, Hq, rows] = {tuple(self.values.shape[:3])}: {its}. "
                "Give one per row."
            )


PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
ScoresT_co = TypeVar("ScoresT_co", bound=BlockScores, covariant=True)


@final
@frozen
class ScorerTraits:
    """What a scorer can do besides scoring. With the defaults it is right, and only slower.

    Args:
        history: its `__call__` takes `history` too, a `KeyHistory` or None: what earlier calls found of the first
            keys, which learns of the others. The scores are the same without, to the bit.
        values_below: only heads whose divergence is below it have values. None if all heads have.
    """

    history: bool = False
    values_below: PerHead | None = None


class Scorer(Stage, ABC, Generic[PermutationT_contra, ScoresT_co]):
    """Role: gives the score of each block, the pairs of one row of queries and one column of keys.

    It makes the grid, which defines the pairs that may be attended to: those that causality and a sliding window
    allow. Selectors, executors and traces take both from the grid.
    """

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, permutation: PermutationT_contra, spec: AttentionSpec) -> ScoresT_co:
        """Score `q` `[B, Hq, M, D]` against `k` `[B, Hkv, N, D]`, both in original order."""

    @property
    def traits(self) -> ScorerTraits:
        """What it can do besides scoring."""
        return ScorerTraits()


class ValueScorer(Scorer[PermutationT_contra, ScoresT_co]):
    """A scorer that also needs the values `v`, as Stem does (arXiv 2603.06274).

    Pipelines call `with_values` in place of the scorer itself, and `Pipeline.choose` then needs `v`. It keeps no
    history, and cannot be used inside another scorer.
    """

    @abstractmethod
    def with_values(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: PermutationT_contra, spec: AttentionSpec
    ) -> ScoresT_co:
        """Score blocks of `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]`, `v` `[B, Hkv, N, Dv]`, in original order."""

    def __call__(self, q: Tensor, k: Tensor, permutation: PermutationT_contra, spec: AttentionSpec) -> ScoresT_co:
        """Refuse a call without values.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{type(self).__name__} scores blocks by values, and was called without them. Pass them, as in "
            "pipeline.choose(q, k, v). Inside another scorer it gets none."
        )


@frozen
class InBlocks:
    """What scorers share that have the fields `block` and `k_block`; `k_block` is as long as `block` if None."""

    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)

    def grid(self, q: Tensor, k: Tensor, permutation: Permutation, spec: AttentionSpec) -> Grid:
        """The blocks of a call of `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`."""
        return Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.k_block or self.block)

    def check_holds(self, name: str, size: int) -> None:
        """Require that blocks are multiples of the argument `name`."""
        multiple("block", self.block, name, size)
        multiple("k_block", self.k_block, name, size)

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)


def scored(
    scorer: Scorer[PermutationT_contra, ScoresT_co],
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    permutation: PermutationT_contra,
    spec: AttentionSpec,
    history: History = None,
) -> ScoresT_co:
    """Scores from a scorer of any kind, which gets the values and the history if it takes them."""
    if v is not None and isinstance(scorer, ValueScorer):
        found: ScoresT_co = scorer.with_values(q, k, v, permutation, spec)
        return found
    if history is None or not scorer.traits.history:
        return scorer(q, k, permutation, spec)
    remembering: Any = scorer
    scores: ScoresT_co = remembering(q, k, permutation, spec, history)
    return scores


def segment_of(permutation: GlobalPermutation, grid: Grid) -> int | None:
    """The length of the segments that keys stay in; None unless causal and each block lies in one segment."""
    S = permutation.segment
    if S is None or not grid.causal or S % grid.q_block or S % grid.k_block:
        return None
    return min(S, FAR)


def own_segment(grid: Grid, segment: int | None) -> Tensor | None:
    """The blocks that PBS-Attn forces: those of the row's own segment; None without segments or if not causal."""
    return keep_visible(None, grid, segment=segment) if segment is not None and grid.causal else None


def visibility_of(cells: Grid) -> dict[str, Tensor]:
    """Fields of `StridedPooling` for a grid whose blocks are cells, or rows of blocks by groups of keys."""
    visible = {"q_last": cells.q_last.squeeze(3), "k_first": cells.k_first.squeeze(2)}
    if cells.window is not None:
        visible |= {"q_floor": cells.q_first.squeeze(3) - cells.window, "k_last": cells.k_last.squeeze(2)}
    return visible


@final
@frozen(cache_hash=True)
class NoScorer(InBlocks, Scorer[Permutation, BlockScores]):
    """Zeros that take no memory: blocks differ by position alone, and ties go to the lower column.

    If each query group has its own order of the keys (`GlobalIndexMap`), the blocks of the same segment are
    forced.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
    """

    def __call__(self, q: Tensor, k: Tensor, permutation: Permutation, spec: AttentionSpec) -> BlockScores:
        grid = self.grid(q, k, permutation, spec)
        zeros = q.new_empty((), dtype=torch.float32).zero_().expand(*q.shape[:2], grid.rows, grid.cols)
        return BlockScores(zeros, grid, own_segment(grid, permutation.group))
