"""Requests to serve, and configurations to serve them with."""

from __future__ import annotations

import random
from typing import Any

from tiny_model import VOCABULARY

# Everything is kept, which sizes alone do not say, so that sparse attention is dense attention, by other means.
EVERYTHING: dict[str, Any] = {"preset": "sparge", "settings": {"theta": 1.0, "block": 32, "k_block": 32}}
SOME: dict[str, Any] = {"preset": "a_shape", "settings": {"sink": 32, "local": 64, "block": 32}}
EAGER: dict[str, Any] = {"min_tokens": 48, "min_queries": 16, "dense_below": 0, "record": True}


def alone(length: int, *, chunk: int = 512, tokens: int = 8) -> dict[str, Any]:
    """One request with a prompt of so many tokens, always the same ones."""
    prompt = random.Random(length).choices(range(3, VOCABULARY), k=length)
    return {"chunk": chunk, "requests": [{"arrives": 0, "prompt": prompt, "tokens": tokens}]}


def mix(seed: int) -> dict[str, Any]:
    """Two to seven requests that arrive one after another, some of which begin as an earlier one did.

    Every fifth mix is a crowd, which grows until no page is left, so that requests lose theirs and begin anew.
    """
    draw = random.Random(seed)
    shared = draw.choices(range(3, VOCABULARY), k=600)
    crowd = seed % 5 == 0
    requests = []
    for _ in range(7 if crowd else draw.randint(2, 7)):
        lengths = draw.randint(1, 40), draw.randint(41, 250), draw.randint(251, 600)
        length = draw.randint(110, 130) if crowd else draw.choice(lengths)
        begin = 0 if crowd else draw.choice((0, draw.randint(1, length)))
        own = draw.choices(range(3, VOCABULARY), k=length)
        requests.append(
            {
                "arrives": draw.randint(0, 3 if crowd else 15),
                "prompt": (shared[:begin] + own)[:length],
                "tokens": 60 if crowd else draw.randint(1, 12),
            }
        )
    return {"chunk": draw.choice((32, 48, 64, 100, 128, 256, 511, 512)), "requests": requests}
