"""Sort keys by importance inside segments (PBS-Attn, sections 3.2 and 3.3)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen, validators
from einops import rearrange
from torch import Tensor

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter


@final
@frozen(eq=False)
class SegmentKeySort(Permuter[GlobalPermutation]):
    """Sort the keys inside each whole segment of `S` tokens, most important first (PBS-Attn, eq. 9 to 11).

    Importance is the mean softmax weight that the last `probe` queries give a key (eq. 10). The tail of
    `N mod S` keys keeps its order, and no key leaves its segment, so causality between segments is untouched.

    Args:
        S: tokens per segment.
        probe: how many of the last queries vote; PBS-Attn takes one block.
        per_query_head: one order per query head, as the paper; by default the query heads of a KV head share
            one order (their mean vote), which moves a quarter of the memory at the same sparsity.
        causal_probe: a probe query votes only on keys it may see. The released code lets it see later keys
            and leaves the tail out of the softmax; `False` reproduces that.
    """

    S: int = field(default=256, validator=[validators.instance_of(int), validators.gt(0)])
    probe: int = field(default=128, validator=[validators.instance_of(int), validators.gt(0)], kw_only=True)
    per_query_head: bool = field(default=False, kw_only=True)
    causal_probe: bool = field(default=True, kw_only=True)

    def __call__(self, q: Tensor, k: Tensor, *, causal: bool, scale: float) -> GlobalPermutation:
        N, segments = k.shape[2], k.shape[2] // self.S
        if segments == 0:
            return GlobalPermutation()
        importance = self._importance(q, k, causal=causal, scale=scale)  # [B, H, N]
        whole = importance[..., : segments * self.S].unflatten(-1, (segments, self.S))
        order = whole.argsort(dim=-1, descending=True, stable=True)
        order = order + self.S * torch.arange(segments, device=k.device)[:, None]
        tail = torch.arange(segments * self.S, N, device=k.device).expand(*order.shape[:2], -1)
        index = torch.cat((order.flatten(-2), tail), dim=-1).int()
        return GlobalPermutation(k_index=index.unsqueeze(2))

    def _importance(self, q: Tensor, k: Tensor, *, causal: bool, scale: float) -> Tensor:
        """Mean weight of every key over the probe queries, `[B, Hkv or Hq, N]` in fp32 or better."""
        _, Hkv, N, _ = k.shape
        P = min(self.probe, q.shape[2])
        # A group's queries are rows of one product, so that k is not copied per query head.
        voters = rearrange(q[:, :, -P:], "B (H G) P D -> B H (G P) D", H=Hkv)
        votes = rearrange(torch.matmul(voters, k.transpose(-1, -2)), "B H (G P) N -> B H G P N", P=P) * scale
        votes = votes.to(torch.promote_types(votes.dtype, torch.float32))
        position = torch.arange(N, device=k.device)
        if not self.causal_probe:
            votes = votes.masked_fill(position >= N // self.S * self.S, float("-inf"))
        elif causal:
            votes = votes.masked_fill(position > position[-P:, None], float("-inf"))
        weight = votes.softmax(dim=-1).mean(dim=-2)  # [B, Hkv, Hq/Hkv, N]
        return weight.flatten(1, 2) if self.per_query_head else weight.mean(dim=2)
