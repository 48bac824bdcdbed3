"""How queries and keys become int8."""

from __future__ import annotations

from typing import Literal, NamedTuple, final

import torch
from attrs import field, frozen
from attrs.validators import in_, instance_of
from torch import Tensor

from blocksparse.kernels.quantize import SMOOTHED_BY, int8_per_block, int8_per_token, smoothing_mean
from blocksparse.scorers.grid import Grid


class Int8Operands(NamedTuple):
    """What the kernel multiplies, and what smoothing took from every logit of a query."""

    q: Tensor  # [B, Hq, M, D] int8
    k: Tensor  # [B, copies * Hk, N, D] int8
    q_scale: Tensor  # [B, Hq, M] fp32
    k_scale: Tensor  # [B, copies * Hk, N] fp32
    k_copy: Tensor | None  # [B|1, Hq|1, rows] int32, the copy of k that a row reads; None when there is one
    taken: Tensor | None  # [B, Hq, M] fp32


@final
@frozen
class Int8QK:
    """Logits from int8 queries and keys (SageAttention; SpargeAttn 3.5).

    Args:
        scales: `"token"`: one scale for each query and each key, so that later tokens change no bit of
            earlier rows. `"block"`: one for each block of the mask, as SageAttention and SpargeAttn have it; a row
            then feels later tokens of its own block in how it is rounded, though not in what it attends to.
        smooth_k: subtract the mean key first. It shifts all logits of a row alike, which softmax ignores, and
            `lse` is corrected. When causal, the mean is that of the first 128 tokens, and rows of blocks that
            do not see all of those read keys that are not smoothed.
    """

    scales: Literal["token", "block"] = field(default="token", validator=in_(("token", "block")))
    smooth_k: bool = field(default=True, validator=instance_of(bool))

    def operands(self, q: Tensor, k: Tensor, k_in_order: Tensor, grid: Grid, scale: float) -> Int8Operands:
        """Round `q` `[B, Hq, M, D]` and `k` `[B, Hk, N, D]`, both in slot order.

        `k_in_order` `[B, Hkv, N, D]` is k in original order.
        """
        k_copy = taken = None
        k = k.float()
        if self.smooth_k:
            mean = smoothing_mean(k_in_order, grid.causal)
            mean = mean.repeat_interleave(k.shape[1] // mean.shape[1], 1)  # [B, Hk, 1, D]
            by_key = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hk, G, M, D]
            taken = scale * (by_key @ mean.transpose(-1, -2).unsqueeze(2)).squeeze(-1).flatten(1, 2)
            smooth = k - mean
            if grid.causal and grid.k_len - grid.q_len < SMOOTHED_BY - 1:
                plain = grid.q_first[..., 0] < SMOOTHED_BY - 1  # [B|1, Hq|1, rows]
                by_place = plain.repeat_interleave(grid.q_block, -1)
                taken = taken.masked_fill(by_place[..., grid.q_lead : grid.q_lead + grid.q_len], 0.0)
                k_copy = plain.int()
                smooth = torch.cat((smooth, k), 1)
            k = smooth
        if self.scales == "token":
            (q, q_scale), (k, k_scale) = int8_per_token(q), int8_per_token(k)
        else:
            q, q_scale = int8_per_block(q, grid.q_block, grid.q_lead)
            k, k_scale = int8_per_block(k, grid.k_block)
        return Int8Operands(q, k, q_scale, k_scale, k_copy, taken)
