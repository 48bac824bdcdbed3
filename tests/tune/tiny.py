"""A random Llama whose attention matters, and prompts for it."""

from __future__ import annotations

from typing import Any

import torch

from blocksparse.presets.plan import AtLength, Evidence, Try
from blocksparse.tools.tune import Candidate, TunePrompt
from tests.tiny_model import tiny_llama

LAYERS, HEADS, KV_HEADS, VOCABULARY, TOKENS = 3, 4, 2, 260, 256


def network(seed: int = 0, **other: Any) -> Any:
    """Weights are drawn larger than usual, so that what attention sees changes what the model predicts."""
    model = tiny_llama(seed, **{"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS} | other)
    for name, weight in model.requires_grad_(False).named_parameters():
        weight.mul_(15 if "q_proj" in name or "k_proj" in name else 3 if "norm" not in name else 1)
    return model


def evidence() -> Evidence:
    """Of a plan that nobody measured."""
    short, long = (AtLength(n, 0.5, 0.01, 0.02, 4, 3, 3) for n in (128, 256))
    tried = Try(0.5, 0.01, 0.02, 6, 1.5, (short, long))
    return Evidence(
        "kl", "density", 0.03, 0.1, (256,), "abc", "def", 4, 3, 1e-4, 2e-4, 3.0, 1, tried, (tried,), 8,
        "float32", "cpu", {"blocksparse": "0"},
    )  # fmt: skip


def prompts(count: int, seed: int) -> list[TunePrompt]:
    """Random tokens with one answer of four tokens at the end."""
    draw = torch.Generator().manual_seed(seed)
    return [
        TunePrompt(torch.randint(VOCABULARY, (1, TOKENS), generator=draw), ((TOKENS - 4, TOKENS),))
        for _ in range(count)
    ]


def pooled(mass: float, band: int | None = None) -> Candidate:
    """Mean pooling in small blocks."""
    return Candidate("mean_pooling", {"mass": mass, "block": 16}, band)


CANDIDATES = (
    *(pooled(mass, band) for mass in (0.5, 0.8, 0.95) for band in (None, 32)),
    Candidate("a_shape", {"sink": 16, "local": 64, "block": 16}),
    Candidate("s2o", {"tau": 0.1, "S": 64, "block": 16}),
)
