"""How `coarse_order` counts scores in steps, and how a step and a position share one int32.

    step[j] = floor(256 * (high - score[j]) / (high - low))      at least 0 and at most 255

A kept key is the number `step << 24 | position`: 8 bits of step over 24 bits of position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

STEPS = 256
SAMPLED = 8  # the range of scores is that of every such key
MOST_KEYS = 1 << 24  # the positions that fit below a step


def score_steps(scores: Tensor, start: Tensor) -> Tensor:
    """Steps of `scores` `[B, H, G, N]` among the first `start` `[G, 1]` of each row; 256 for the others, int16.

    NaN counts as the least score. Where no range of the sampled scores is finite and above 0, all are of one step.
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
