"""Chosen lines of a head: keys, or distances, in runs of equal length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Lines(NamedTuple):
    """Chosen keys, by slot, or chosen distances."""

    counts: Tensor  # [B, Hq, runs + 1] int32, how many runs are chosen before each, and in all
    run: int  # keys or distances in a run


def running_count(chosen: Tensor) -> Tensor:
    """How many entries of `chosen` `[B, Hq, n]` bool are chosen before each, and in all: `[B, Hq, n + 1]` int32."""
    return pad(chosen.cumsum(-1, dtype=torch.int32), (1, 0))
