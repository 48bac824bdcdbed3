"""How `coarse_order` turns scores into steps, and how a step and a position share one int32.

    step[j] = floor(256 * (high - score[j]) / (high - low))      at least 0 and at most 255

A kept key is the int32 `step << 24 | position`: its step in the upper 8 bits, its position in the lower 24. A step of 128 or
more sets the sign bit, so a step is read back as `kept >> 24 & 255`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

STEPS = 256
SAMPLED = 8  # of every eight keys the last one has a part in the range of scores
MOST_KEYS = 1 << 24  # the positions that fit below a step


def check_keys(keys: int) -> None:
    """Raise a ValueError if there are more keys before a segment than positions have bits for."""
    if keys > MOST_KEYS:
        raise ValueError(f"a coarse order takes up to {MOST_KEYS} keys before a segment: {keys}; use coarse=False")


def score_steps(scores: Tensor, start: Tensor) -> Tensor:
    """Steps of `scores` `[B, H, G, N]`, int16, for the first `start` `[G, 1]` keys of each row; 256 for the others.

    NaN counts as the least score. If the range of a row's sampled scores is not finite and above 0, all keys have one step.
    """
    before, most = torch.arange(scores.shape[-1], device=scores.device) < start, torch.finfo(torch.float32).max
    sampled = scores[..., SAMPLED - 1 :: SAMPLED]
    counted = before[..., SAMPLED - 1 :: SAMPLED] & sampled.isfinite()
    high, minus_low = (
        pad(x.masked_fill(~counted, float("-inf")), (1, 0), value=float("-inf")).amax(-1, keepdim=True)
        for x in (sampled, -sampled)
    )
    width = high + minus_low
    spread = (width > 0) & (width <= most)
    factor = (STEPS / width).clamp_max(most).where(spread, 0.0)
    steps = (high.where(spread, 0.0) - scores.nan_to_num(nan=-most, posinf=most, neginf=-most)) * factor
    return steps.clamp(0, STEPS - 1).to(torch.int16).masked_fill(~before, STEPS)
