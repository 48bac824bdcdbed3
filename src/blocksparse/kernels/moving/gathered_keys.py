"""Keys and values by their tokens, a few at a time, in memory that is used again.

The system hands out larger pieces of memory page by page and clears each page, which takes as long as the gather itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GatheredKeys:
    """The keys and values of all heads one behind another, for gathers in plain torch."""

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        """Take `k` `[B, H, N, D]` and `v` `[B, H, N, Dv]`, in `dtype` from here on."""
        self._all = [x.to(dtype).flatten(0, 2) for x in (k, v)]
        self._room = [x.new_empty(0, x.shape[1]) for x in self._all]
        self.width = k.shape[-1] + v.shape[-1]

    def at(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens `[...]`, `[..., D]` and `[..., Dv]`, until the next call overwrites them."""
        count = token.numel()
        if count > len(self._room[0]):
            self._room = [x.new_empty(count, x.shape[1]) for x in self._all]
        k, v = (
            torch.index_select(x, 0, token.flatten(), out=room[:count]).view(*token.shape, -1)
            for x, room in zip(self._all, self._room, strict=True)
        )
        return k, v
