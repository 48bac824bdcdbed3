"""`Workspace`: memory that an engine reserves for the keys and values of its longest request in one layer."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor


@final
class Workspace:
    """All layers use it in turn, for one request after another. It is taken once, while memory is measured.

    Args:
        tokens: of the longest request.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._rooms: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def room(self, keys: Tensor, values: Tensor) -> Tensor:
        """Memory for the keys and values of the longest request.

        Args:
            keys, values: caches `[pages, Hkv, page_size, D]`, or any `[..., Hkv, tokens, D]`.
        """
        numbers = self.tokens * sum(x.shape[-3] * x.shape[-1] for x in (keys, values))
        room = self._rooms.get((keys.dtype, keys.device))
        if room is None or room.numel() < numbers:  # of the layers with most heads
            room = self._rooms[keys.dtype, keys.device] = keys.new_empty(numbers)
        return room

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return sum(math.prod(room.shape) * room.dtype.itemsize for room in self._rooms.values())
