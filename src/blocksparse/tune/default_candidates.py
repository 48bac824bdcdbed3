"""`DEFAULT_CANDIDATES`: what tuning tries unless it is told."""

from __future__ import annotations

from typing import Any

from blocksparse.plans.candidate import Candidate


def _grid(
    preset: str, argument: str, *values: Any, band: int | None = None, last: int | None = None, **rest: Any
) -> list[Candidate]:
    return [Candidate(preset, {argument: value, **rest}, band, last=last) for value in values]


DEFAULT_CANDIDATES: tuple[Candidate, ...] = (
    *_grid("s2o", "tau", 0.03, 0.1, 0.3, S=128),
    Candidate("s2o", {"tau": 0.1, "S": 64}),
    Candidate("s2o", {"tau": 0.03, "S": 64, "band": 64}),
    Candidate("s2o", {"tau": 0.03, "S": 512, "block": 128}),
    Candidate("s2o", {"tau": 0.01, "S": 1024, "block": 128, "band": 128}),
    *_grid("xattention", "mass", 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, band=64, block=64),
    *_grid("xattention", "mass", 0.85, 0.9, 0.95, 0.97, band=128, stride=8, block=128, pattern="sum"),
    # What `auto` does in causal calls, with dense rows for the question at the end of a prompt.
    *_grid(
        "xattention",
        "mass",
        0.8,
        0.85,
        0.9,
        0.93,
        0.95,
        0.97,
        band=128,
        last=128,
        stride=16,
        block=128,
        pattern="sum",
    ),
    *_grid("mean_pooling", "mass", 0.8, 0.9, 0.94, 0.97, 0.985, 0.995, band=128, block=64),
    *_grid("mean_pooling", "mass", 0.9, 0.94, 0.97, 0.98, 0.99, band=128, block=128),
    *_grid("pbs_attn", "mass", 0.75, 0.9, band=128, block=64),
    *_grid("a_shape", "local", 256, 1024, 2048, 4096, sink=64),
)
"""What is tried unless the caller names candidates: few families, many settings; docs/start/tune.md explains."""
