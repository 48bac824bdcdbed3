"""Pooled queries against pooled keys (PBS-Attn, appendix B.1; also its MeanPooling baseline)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen, validators
from einops import rearrange
from torch import Tensor

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.grid import Grid
from blocksparse.scorers.scorer import Scorer

_size = [validators.instance_of(int), validators.gt(0)]


@final
@frozen(eq=False)
class MeanPoolScorer(Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of mean query . mean key (PBS-Attn, appendix B.1).

    Args:
        block: slots per block, on both sides.
        segment: where a permuter sorts inside segments, the same `S`: the row's own segment is then forced
            and takes no part in the softmax, as PBS-Attn has it. `None` scores every reachable block.
        padded_tail: divide a short tail block by the whole block, as the released PBS-Attn code does; by
            default a mean is over the tokens that are there.
    """

    block: int = field(default=128, validator=_size)
    segment: int | None = field(default=None, validator=validators.optional(_size), kw_only=True)
    padded_tail: bool = field(default=False, kw_only=True)

    @segment.validator
    def _segment_holds_blocks(self, _: object, segment: int | None) -> None:
        if segment is not None and segment % self.block:
            raise ValueError(f"'segment' must be a multiple of 'block' ({self.block}): {segment}")

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, *, causal: bool, scale: float
    ) -> BlockMass:
        grid = Grid.of(q, k, permutation, q_block=self.block, k_block=self.block, causal=causal)
        forced = grid.own_segment(self.segment) if self.segment is not None and causal else None
        eligible = grid.reachable if forced is None else grid.reachable & ~forced

        pooled_q = self._block_mean(permutation.gather_queries(q), lead=grid.q_lead)  # [B, Hq, rows, D]
        pooled_k = self._block_mean(permutation.gather_keys(k), lead=0)  # [B, H, cols, D]
        H, rows = pooled_k.shape[1], pooled_q.shape[2]
        grouped_q = rearrange(pooled_q, "B (H G) rows D -> B H (G rows) D", H=H)
        products = torch.matmul(grouped_q, pooled_k.transpose(-1, -2))
        logits = rearrange(products, "B H (G rows) cols -> B (H G) rows cols", rows=rows) * scale
        logits = logits.float().masked_fill(~eligible, float("-inf"))
        # A row with nothing eligible has a softmax of NaN; it holds no mass.
        mass = logits.softmax(dim=-1).masked_fill(~eligible, 0.0)  # [B, Hq, rows, cols]
        return BlockMass(mass, grid, forced)

    def _block_mean(self, x: Tensor, *, lead: int) -> Tensor:
        """Mean over the tokens of each block, `[B, H, N, D] -> [B, H, blocks, D]`, summed in fp32 or better."""
        N, dtype = x.shape[2], torch.promote_types(x.dtype, torch.float32)
        whole_from = min(-lead % self.block, N)
        whole_to = whole_from + (N - whole_from) // self.block * self.block
        whole = x[:, :, whole_from:whole_to].unflatten(2, (-1, self.block)).mean(3, dtype=dtype)
        parts = [whole]
        for rest, first in ((x[:, :, :whole_from], True), (x[:, :, whole_to:], False)):
            if rest.shape[2]:
                count = self.block if self.padded_tail else rest.shape[2]
                mean = rest.sum(2, keepdim=True, dtype=dtype) / count
                parts = [mean, *parts] if first else [*parts, mean]
        return torch.cat(parts, dim=2)
