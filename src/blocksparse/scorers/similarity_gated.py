"""Scores only for blocks whose tokens are alike; all other blocks are forced (SpargeAttn, section 3.2)."""

from __future__ import annotations

from functools import partial
from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.class_line import Declared, check_takes, declared
from blocksparse.checks.per_head import PerHead, cosine, number_or_blocks, per_head
from blocksparse.checks.validators import a, flag, optional
from blocksparse.kernels.scoring.block_mean import block_similarity
from blocksparse.kernels.scoring.gate_blocks import gate_blocks
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer


@final
@frozen(cache_hash=True)
class SimilarityGatedScorer(Scorer[GlobalPermutation, BlockMass]):
    """The mass that `inner` gives, except for blocks whose tokens are too unlike for one number; those are forced.

    The self-similarity of a block is the mean cosine of all pairs of its tokens, including each token with itself;
    it lies in [0, 1]. A block is similar if its self-similarity is greater than `theta`. A key block that is not
    similar is forced for every row and holds no mass; a query block that is not similar forces its whole row
    (SpargeAttn, eq. 5). Each share of a row's remaining mass is then the paper's softmax over similar key blocks.
    If the blocks that are not similar outweigh all others by more than e^87, the mass of the others is 0 in fp32,
    and the row keeps only forced blocks.

    Args:
        inner: any scorer that gives a `BlockMass`, on any grid.
        theta: in [-1, 1]; a number, or one per query head. Below 0 every block is similar, at 1 none is. A number
            below 0 costs nothing: no similarity is measured, and the scores are those of `inner`.
        smooth_k: subtract the mean of all keys before the similarity of key blocks is measured (K smoothing of
            SageAttention). None does so only if the call is not causal, because in a causal call later keys would
            change the choice of earlier rows.
        padded_tail: never take a block with an empty place as similar, as the released code does. By default the
            tokens that exist decide.
    """

    inner: Scorer[GlobalPermutation, BlockMass] = field(validator=a(Scorer))
    theta: PerHead = field(converter=per_head, validator=cosine)
    smooth_k: bool | None = field(default=None, kw_only=True, validator=optional(flag))
    padded_tail: bool = field(default=False, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_takes((Declared(type(self), BlockMass),), declared(self.inner, Scorer, 1))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: GlobalPermutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> BlockMass:
        scores = self.inner(q, k, permutation, spec, history)
        if isinstance(self.theta, int | float) and self.theta < 0 and not self.padded_tail:
            return scores
        block, centred = scores.grid.k_block, self._centred(spec.causal)
        if history is None or centred:  # with K smoothing the similarity of a block follows from all keys
            of_k = block_similarity(k, block, centred=centred, index=permutation.key_slots)
        else:
            of_k = history.blocks("similarity", k, permutation, block, partial(block_similarity, block=block))
        return self._gated(scores, q, of_k, permutation)

    @property
    def keeps_history(self) -> bool:
        return self.inner.keeps_history and not self._centred(causal=True)

    @property
    def takes_paged_keys(self) -> bool:
        return self.inner.takes_paged_keys and not self._centred(causal=True)

    def _centred(self, causal: bool) -> bool:
        return not causal if self.smooth_k is None else self.smooth_k

    def _gated(self, scores: BlockMass, q: Tensor, of_k: Tensor, permutation: GlobalPermutation) -> BlockMass:
        """The scores after the gate; `of_k` `[B, H, cols]` are the similarities of key blocks, H is Hkv or Hq."""
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
