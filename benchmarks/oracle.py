"""The best that any choice of blocks could do: the true attention mass of every block."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs


@final
@frozen(eq=False)
class TrueMassScorer(bs.Scorer[bs.Permutation, bs.BlockMass]):
    """Softmax attention itself, averaged over the queries of a block and summed over its keys.

    As dear as dense attention. With `TopCdf(mass)` behind it, it keeps the fewest blocks that hold `mass`.
    """

    block: int = 128

    def __call__(self, q: Tensor, k: Tensor, permutation: bs.Permutation, spec: bs.AttentionSpec) -> bs.BlockMass:
        grid = bs.Grid.of(
            q,
            k,
            permutation,
            spec,
            q_block=self.block,
            k_block=self.block,
        )
        every = bs.BlockMask(grid.visible.expand(*q.shape[:2], -1, -1), grid)
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float()
        values = torch.zeros(every.keep.shape, device=q.device)
        for row in range(grid.rows):
            query, slots = every.queries(row), every.slots(row)
            rows = q.gather(2, query.unsqueeze(-1).expand(*query.shape, q.shape[-1])).float()
            logits = torch.matmul(rows, keys.transpose(-1, -2)) * spec.scale  # [B, Hq, m, N]
            logits = logits.masked_fill(~every.pairs(row), float("-inf"))
            weight = logits.softmax(-1).mean(-2)  # [B, Hq, N]
            in_slots = weight.gather(-1, slots.clamp_min(0).flatten(-2).long()).view(slots.shape)
            values[:, :, row] = in_slots.masked_fill(slots < 0, 0.0).sum(-1)
        return bs.BlockMass(values, grid)
