"""What attends to what: white noise under random masks, and structured inputs at any length."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.tools.bench import QKV as QKV
from blocksparse.tools.bench import structured as structured


@frozen
class Case:
    """One shape and one random causal mask: diagonal and first block kept, the rest Bernoulli."""

    N: int
    Hq: int
    Hkv: int
    D: int
    q_block: int
    k_block: int
    density: float
    dtype: torch.dtype
    Dv: int | None = None  # as `D`

    def inputs(self, device: torch.device) -> QKV:
        """White noise: `q` `[1, Hq, N, D]`, `k` `[1, Hkv, N, D]` and `v` `[1, Hkv, N, Dv]`."""
        q, k, v = (
            torch.randn(1, H, self.N, D, device=device, dtype=self.dtype)
            for H, D in ((self.Hq, self.D), (self.Hkv, self.D), (self.Hkv, self.Dv or self.D))
        )
        return q, k, v

    def mask(self, q: Tensor, k: Tensor) -> bs.BlockMask:
        grid = bs.Grid.of(
            q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0), q_block=self.q_block, k_block=self.k_block
        )
        keep = torch.rand(1, self.Hq, grid.rows, grid.cols, device=q.device) < self.density
        return bs.BlockMask((keep | grid.diagonal | grid.holding_first(1)) & grid.visible, grid)


def everything(q: Tensor, k: Tensor, *, block: int = 128) -> bs.BlockMask:
    """Dense causal attention as a mask."""
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0), q_block=block, k_block=block)
    return bs.BlockMask(grid.visible.expand(q.shape[0], q.shape[1], -1, -1), grid)
