"""Inputs at any length, with structure as real heads have it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

QKV = tuple[Tensor, Tensor, Tensor]


def structured(
    N: int,
    Hq: int,
    Hkv: int,
    D: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    topics: int = 8,
    stretch: int = 384,
    opening: int = 512,
) -> QKV:
    """`q` `[1, Hq, N, D]`, `k`, `v` `[1, Hkv, N, D]` with structure as real heads have it, at any length.

    Stretches of about `stretch` tokens have one of a few topics, which come back, and a query is drawn to its
    topic: weakly in the first query head, sharply in the last. Every query is drawn to the first tokens, to the
    opening (a system prompt), and to one key in 256. Drawn one head after another from the device's generator.

    As logits: 6 to 8 for the own topic, 7 for the opening, 8 for a heavy key, 10 for the sink, a few tenths of
    noise. `pbs_attn(0.9)` keeps about a tenth of the blocks at 32K and 128K tokens.
    """
    q, k, v = (torch.empty(1, H, N, D, device=device, dtype=dtype) for H in (Hq, Hkv, Hkv))
    group, key_size, common_size = Hq // Hkv, 6**0.5, 2.0

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    for h in range(Hkv):
        turn = (torch.rand(N, device=device) < 1 / stretch).cumsum(0)
        topic_of = torch.randint(topics, (N,), device=device)[turn]
        directions = normalize(randn(topics + 1, D), dim=-1) * D**0.25  # products are logits
        topic, common = directions[topic_of], directions[-1]
        drawn = torch.zeros(N, 1, device=device)
        drawn[torch.randint(N, (max(1, N // 256),), device=device)] = 8.0
        drawn[:opening] = 7.0
        drawn[:4] = 10.0
        k[0, h] = key_size * topic + drawn / common_size * common + 0.5 * randn(N, D)
        v[0, h] = randn(N, D)
        for i in range(h * group, (h + 1) * group):
            sharpness = 6.0 + 2.0 * i / max(1, Hq - 1)
            q[0, i] = sharpness / key_size * topic + common_size * common + 0.5 * randn(N, D)
    return q, k, v
