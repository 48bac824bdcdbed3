"""Block scores from the products by which S2O orders single keys (S2O, eq. 2)."""

from __future__ import annotations

from math import lcm
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import block_size, maybe_whole, optional, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.scoring.block_mean import block_mean
from blocksparse.kernels.scoring.block_softmax import prefix_softmax
from blocksparse.permuters.permutation import Permutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer

_SCORES_AT_ONCE = 1 << 24


@final
@frozen(cache_hash=True)
class PrefixOrderScorer(Scorer[Permutation, BlockMass]):
    """Softmax of `<mean query of the group, key>` over the keys before the group, summed by block.

    `GlobalIndexMap` sorts single keys by the same products (S2O, eq. 2). Here they are scaled and get a softmax,
    so that a selector can keep a share of the mass, as an alternative to the early stop. The group's own keys are
    forced and take no part in the softmax. If the permutation has no query groups, each row of blocks is a group:
    its softmax runs over all keys that its last query may see, and nothing is forced.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
    """

    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: Permutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> BlockMass:
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.k_block or self.block)
        N, group = k.shape[2], permutation.group
        if group is not None:
            offset = N - q.shape[2] if spec.causal else 0
            mean = block_mean(q, group, lead=offset % group)  # [B, Hq, G, D]
            seen = (offset // group + torch.arange(mean.shape[2], device=q.device)).view(1, 1, -1, 1) * group
            first = seen.clamp_min(offset)
        else:
            mean = block_mean(_in_slots(q, permutation.q_index), self.block, lead=grid.q_lead)
            seen, first = grid.q_last + 1, grid.q_first  # [B|1, H|1, rows, 1]
        if not spec.causal:
            seen = torch.full_like(seen, N)

        hidden = None if grid.window is None else first - grid.window  # keys up to there are
        values = self._mass(mean * spec.scale, k, grid, seen, hidden)  # [B, Hq, G, cols]
        if grid.group_of_row is not None:
            values = values[:, :, grid.group_of_row]
        return BlockMass(values, grid, pooling.own_segment(grid, group))

    def _mass(self, mean: Tensor, k: Tensor, grid: Grid, seen: Tensor, hidden: Tensor | None) -> Tensor:
        """The mass of every block for every mean query, of keys before `seen` and behind `hidden`."""
        B, Hq, G, _ = mean.shape
        keys = k.to(mean.dtype)
        slots = grid.k_position  # [B|1, H|1, G|1, cols * k_block]
        parts = []
        # Some groups at a time, because scores of single keys take more memory than scores of blocks.
        step = max(1, _SCORES_AT_ONCE // (B * Hq * max(k.shape[2], slots.shape[-1])))
        for g in range(0, G, step):
            rows = slice(g, min(g + step, G))
            logits = products(mean[:, :, rows], keys)
            if hidden is not None:
                logits.masked_fill_(torch.arange(k.shape[2], device=k.device) <= hidden[:, :, rows], float("-inf"))
            mass = prefix_softmax(logits, seen[:, :, rows])
            part = slots[:, :, rows] if slots.shape[2] > 1 else slots
            if part.shape[1] not in (1, Hq):
                part = part.repeat_interleave(Hq // part.shape[1], dim=1)
            part = part.expand(B, Hq, rows.stop - g, -1).long()
            mass = mass.gather(-1, part.clamp_min(0)).masked_fill(part < 0, 0.0)
            parts.append(mass.unflatten(-1, (-1, grid.k_block)).sum(-1))
        return torch.cat(parts, dim=2)

    def alignment(self, causal: bool) -> int:
        return lcm(self.block, self.k_block or 1)


def _in_slots(q: Tensor, q_index: Tensor | None) -> Tensor:
    return q if q_index is None else q.gather(2, q_index.long().unsqueeze(-1).expand(q.shape))
