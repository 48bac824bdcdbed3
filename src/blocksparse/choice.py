"""`Choice`: the blocks that a pipeline chose for a call, and what it chose them for."""

from __future__ import annotations

from typing import Generic, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.trace import MaskT


@final
@frozen(eq=False)
class Choice(Generic[MaskT]):
    """What the first three stages of a pipeline give for a call; `Pipeline.attend` takes it to the fourth.

    It may be attended to again: with other values, in a later denoising step, or in another layer. Then the blocks
    are those that were chosen here, and attention over them is exact.
    """

    mask: MaskT
    spec: AttentionSpec  # as the caller asked for it
    head_dim: int
    dtype: torch.dtype

    def check_fits(self, q: Tensor, k: Tensor) -> None:
        """Refuse a choice that was made for other tensors than `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`.

        Raises:
            ValueError: sizes or devices differ, or the dtypes are not both of half, single or double precision.
        """
        grid, device = self.mask.grid, self.mask.keep.device
        mine = grid.batch, grid.q_heads, grid.kv_heads, grid.q_len, grid.k_len, self.head_dim
        its = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]
        if mine != its:
            raise ValueError(
                f"this choice was made for (B, Hq, Hkv, M, N, D) = {mine}, and q and k have {its}: choose anew"
            )
        if device != q.device:
            raise ValueError(f"this choice lies on {device}, and q and k are on {q.device}: choose anew")
        if self.dtype.itemsize != q.dtype.itemsize:
            raise ValueError(f"this choice was made for {self.dtype}, and q and k are {q.dtype}: choose anew")
