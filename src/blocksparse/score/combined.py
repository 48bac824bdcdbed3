"""Scorers that are made of other scorers."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.check.per_head import PerHead, cosine, number_or_blocks, per_head
from blocksparse.check.stage import Declared, check_takes, declared, of_parts
from blocksparse.check.validators import a, block_size, flag, multiple, optional, positive, real, whole
from blocksparse.grid import Grid
from blocksparse.kernels.gemm.products import StridedPooling
from blocksparse.kernels.score.block_mean import block_similarity
from blocksparse.kernels.score.block_softmax import gate_blocks
from blocksparse.kernels.score.strided_mass import strided_mass
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.score.key_history import History, of_key_blocks
from blocksparse.score.scorer import (
    BlockMass,
    BlockScores,
    PermutationT_contra,
    Scorer,
    ScorerTraits,
    ScoresT_co,
    scored,
)
from blocksparse.spec import AttentionSpec


@final
@frozen(cache_hash=True)
class ScorerByCausality(Scorer[PermutationT_contra, ScoresT_co]):
    """Score by `causal` in a causal call, as for text, and by `otherwise` in another, as for images and video.

    Only the chosen scorer runs. The two may use different block sizes; `SelectorByCausality` chooses among them.
    Histories are those of `causal`, since prompts are prefilled in chunks where calls are causal.
    """

    causal: Scorer[PermutationT_contra, ScoresT_co] = field(validator=a(Scorer))
    otherwise: Scorer[PermutationT_contra, ScoresT_co] = field(validator=a(Scorer))

    def __call__(
        self, q: Tensor, k: Tensor, permutation: PermutationT_contra, spec: AttentionSpec, history: History = None
    ) -> ScoresT_co:
        return scored(self.causal if spec.causal else self.otherwise, q, k, None, permutation, spec, history)

    @property
    def traits(self) -> ScorerTraits:
        return ScorerTraits(self.causal.traits.history, _values_below(self.causal, self.otherwise))

    def alignment(self, causal: bool) -> int:
        return (self.causal if causal else self.otherwise).alignment(causal)


def _values_below(*scorers: Scorer[Any, Any]) -> PerHead | None:
    """Of the first scorer that leaves out heads."""
    return next((tau for each in scorers if (tau := each.traits.values_below) is not None), None)


FirstT_co = TypeVar("FirstT_co", bound=BlockScores, covariant=True)
SecondT_co = TypeVar("SecondT_co", bound=BlockScores, covariant=True)


@final
@frozen(eq=False)
class ScoresPair(BlockScores, Generic[FirstT_co, SecondT_co]):
    """The scores of two scorers of the same blocks; read as one, they are the first scorer's.

    Source: Prism, arXiv 2602.08426.
    """

    first: FirstT_co = field(kw_only=True)
    second: SecondT_co = field(kw_only=True)


@final
@frozen(cache_hash=True)
class ScorerPair(
    Scorer[PermutationT_contra, ScoresPair[FirstT_co, SecondT_co]],
    Generic[PermutationT_contra, FirstT_co, SecondT_co],
):
    """Score by `first` and by `second`, which cut the call into the same blocks; `SelectorPair` chooses by both.

    Raises:
        ValueError: in a call, if the scorers cut it into different blocks.
    """

    first: Scorer[PermutationT_contra, FirstT_co] = field(validator=a(Scorer))
    second: Scorer[PermutationT_contra, SecondT_co] = field(validator=a(Scorer))

    def __call__(
        self, q: Tensor, k: Tensor, permutation: PermutationT_contra, spec: AttentionSpec, history: History = None
    ) -> ScoresPair[FirstT_co, SecondT_co]:
        first = scored(self.first, q, k, None, permutation, spec, history)
        second = scored(self.second, q, k, None, permutation, spec, history)
        if not first.grid.same_blocks(second.grid):
            mine, its = ((grid.q_block, grid.k_block) for grid in (first.grid, second.grid))
            raise ValueError(
                f"both scorers of 'ScorerPair' must score the same blocks: {mine} and {its}. "
                "Give both one block size."
            )
        return ScoresPair(first.values, first.grid, first.forced, first=first, second=second)

    @property
    def traits(self) -> ScorerTraits:
        history = self.first.traits.history and self.second.traits.history
        return ScorerTraits(history, _values_below(self.first, self.second))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)


@frozen
class _OfAnother(Scorer[GlobalPermutation, BlockMass]):
    """A scorer that changes the mass of `inner`."""

    inner: Scorer[GlobalPermutation, BlockMass] = field(validator=a(Scorer))

    def __attrs_post_init__(self) -> None:
        check_takes((Declared(type(self), BlockMass),), declared(self.inner, Scorer, 1))

    @property
    def traits(self) -> ScorerTraits:
        return self.inner.traits

    def alignment(self, causal: bool) -> int:
        return self.inner.alignment(causal)


@final
@frozen(cache_hash=True)
class SampledQueriesScorer(_OfAnother):
    """Of each block the greater mass: that by `inner`, or `weight` times that by samples of the queries.

    A sample is one query of `every`, with its true attention weights on all keys. Means of keys hide single keys
    that get much attention, as those far away in Gemma 3; samples see them. They miss what other queries look for,
    which `inner` sees. The mass is `[B, Hq, rows, cols]` on the blocks of `inner`. No paper has this; the evidence
    page on trained models measures it.

    A sample holds a mass of 1, so a row of blocks holds `block / every` by samples; as much as by `inner` where
    `weight` makes up for the difference. A row that ends before its first sample, as at the end of a prompt, has
    the mass by `inner`. This takes M N D / every multiplications per query head, half of them when causal. Chunks
    of a prompt sample the same queries as the whole prompt.

    Args:
        inner: a scorer that gives a `BlockMass`.
        every: slots from one sample to the next, a divisor of the block of `inner`. The last of each such run of
            slots is sampled.
        weight: a finite number greater than 0.

    Raises:
        ValueError: in a call, if `every` does not divide the blocks of queries of `inner`.
    """

    every: int = field(default=64, converter=whole, validator=block_size)
    weight: float = field(default=1.0, converter=real, validator=positive)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, history: History = None
    ) -> BlockMass:
        scores = scored(self.inner, q, k, None, permutation, spec, history)
        grid = scores.grid
        multiple("block", grid.q_block, "every", self.every)
        sampled = slice(-(grid.q_lead + 1) % self.every, None, self.every)
        queries = permutation.gather_queries(q)[:, :, sampled]
        if not queries.shape[2]:
            return scores
        first = (grid.first_position + sampled.start) // self.every
        cells, visible = (grid.q_block // self.every, grid.k_block), _token_visibility(grid, permutation, sampled)
        of = StridedPooling(1, 0, *cells, spec.causal, padded_tail=False, first_cell=first, **visible)
        keys, floor = permutation.gather_keys(k), scores.values
        mass = strided_mass(queries, keys, of, weight=spec.scale, floor=floor, factor=self.weight)
        return BlockMass(mass, grid, scores.forced)


def _token_visibility(grid: Grid, permutation: GlobalPermutation, sampled: slice) -> dict[str, Any]:
    """Fields of `StridedPooling` for single tokens: which of them the sampled queries see."""
    if not grid.causal:
        return {}
    if permutation.q_index is None and permutation.k_index is None:
        behind = {} if grid.window is None else {"behind": grid.window - 1}
        return {"every": sampled.step, **behind}
    position = grid.q_position[..., grid.q_lead : grid.q_lead + grid.q_len][..., sampled].contiguous()
    keys = grid.k_position[:, :, 0, : grid.k_len].contiguous()  # [B|1, H|1, N]
    if 1 < keys.shape[1] < position.shape[1]:
        keys = keys.repeat_interleave(position.shape[1] // keys.shape[1], 1)
    visible = {"q_last": position, "k_first": keys}
    if grid.window is not None:
        visible |= {"q_floor": position - grid.window, "k_last": keys}
    return visible


@final
@frozen(cache_hash=True)
class SimilarityGatedScorer(_OfAnother):
    """The mass that `inner` gives, except for blocks whose tokens are too unlike for one number; those are forced.

    The self-similarity of a block is the mean cosine of all pairs of its tokens, including each token with itself;
    it lies in [0, 1]. A block is similar if its self-similarity is greater than `theta`. A key block that is not
    similar is forced for every row and holds no mass. A query block that is not similar forces its whole row
    (SpargeAttn, eq. 5). Each share of a row's remaining mass is then the paper's softmax over similar key blocks.
    If the blocks that are not similar outweigh all others by more than e^87, the mass of the others is 0 in fp32.
    The row then keeps only forced blocks. Source: SpargeAttn, section 3.2.

    Args:
        inner: any scorer that gives a `BlockMass`, on any grid.
        theta: in [-1, 1]. A number, or one per query head. Below 0 every block is similar, at 1 none is. Below 0
            no similarity is measured, and the scores are those of `inner`.
        smooth_k: subtract the mean of all keys before similarity is measured (K smoothing of SageAttention). None
            does so only if the call is not causal: later keys would change the choice of earlier rows.
        padded_tail: no block with an empty slot is similar. The released code does this. By default the tokens
            that exist decide.
    """

    theta: PerHead = field(converter=per_head, validator=cosine)
    smooth_k: bool | None = field(default=None, kw_only=True, validator=optional(flag))
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec, history: History = None
    ) -> BlockMass:
        scores = scored(self.inner, q, k, None, permutation, spec, history)
        if isinstance(self.theta, int | float) and self.theta < 0 and not self.padded_tail:
            return scores
        block, centred = scores.grid.k_block, self._centred(spec.causal)
        alike = partial(block_similarity, centred=centred)
        # With K smoothing the similarity of a block follows from all keys.
        of_k = of_key_blocks("similarity", k, permutation, block, alike, None if centred else history)
        return self._gated(scores, q, of_k, permutation)

    @property
    def traits(self) -> ScorerTraits:
        inner = self.inner.traits
        return ScorerTraits(inner.history and not self._centred(causal=True), inner.values_below)

    def _centred(self, causal: bool) -> bool:
        return not causal if self.smooth_k is None else self.smooth_k

    def _gated(self, scores: BlockMass, q: Tensor, of_k: Tensor, permutation: GlobalPermutation) -> BlockMass:
        """Scores after the gate. `of_k` `[B, H, cols]` are similarities of key blocks, H is Hkv or Hq."""
        grid = scores.grid
        of_q = block_similarity(q, grid.q_block, lead=grid.q_lead, index=permutation.q_index)  # [B, Hq, rows]
        if self.padded_tail:  # a block whose similarity is NaN is not similar
            short = (grid.q_position.unflatten(-1, (-1, grid.q_block)) < 0).any(-1)
            of_q = of_q.masked_fill(short, float("nan"))
            of_k = of_k.masked_fill(~grid.k_whole[:, :, 0], float("nan"))
        theta = number_or_blocks(self.theta, scores.values)
        values, forced = gate_blocks(scores.values, of_q, of_k, theta, scores.forced, grid)
        return BlockMass(values, grid, forced)

    def alignment(self, causal: bool) -> int:
        if causal and self.smooth_k:
            raise ValueError("'smooth_k' subtracts the mean of all keys, and a part has only those up to its end")
        return self.inner.alignment(causal)
