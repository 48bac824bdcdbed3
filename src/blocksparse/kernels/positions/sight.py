"""Which keys a query sees: the rule for single pairs, which all definitions in plain torch ask."""

from __future__ import annotations

import torch
from torch import Tensor


def sees(q_at: Tensor, k_at: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Whether queries at the positions `q_at` see keys at `k_at`, broadcast against each other; bool.

    A query at position `p` sees every key; when causal those at `k <= p`; and with a window only those at
    `p - window < k <= p`, which are `window` tokens with its own. A position of -1 is an empty slot and never seen.
    """
    there = k_at >= 0
    if not causal:
        return there.expand(torch.broadcast_shapes(q_at.shape, k_at.shape))
    seen = there & (k_at <= q_at)
    return seen if window is None else seen & (k_at > q_at - window)
