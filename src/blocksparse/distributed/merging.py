"""Outputs over disjoint sets of keys, merged by their lse."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class Merged:
    """Attention of queries over all the keys that were added so far, in fp32 or better."""

    def __init__(self, q: Tensor, Dv: int) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:3], Dv), dtype=dtype)  # [B, Hq, M, Dv]
        # Differences of lse become weights: what fp32 rounds off a large lse would be an error of all weights.
        self._lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float64)  # [B, Hq, M]

    @property
    def lse(self) -> Tensor:
        """The log of the softmax denominators, `[B, Hq, M]` fp32."""
        return self._lse.float()

    def add(self, some: slice, out: Tensor, lse: Tensor) -> None:
        """Add attention of the queries `some` over keys that were not added before."""
        before, lse = self._lse[:, :, some], lse.double()
        both = torch.logaddexp(before, lse)
        # A query that saw no key yet has an lse of -inf on both sides, and must not become NaN.
        finite = both.masked_fill(both == float("-inf"), 0.0)
        old, new = ((x - finite).exp().to(self.out.dtype).unsqueeze(-1) for x in (before, lse))
        self.out[:, :, some] = self.out[:, :, some] * old + out.to(self.out.dtype) * new
        self._lse[:, :, some] = both
