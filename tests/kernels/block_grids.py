"""Grids of every kind for tests of kernels over blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests.specs import grid_of

KINDS = [
    "chunk",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "sorted",
            "wide",
            "in order",
            "per query head",
            "per segment",
            "not causal",
            "padded",
            "one block",
            "window",
            "window, sorted",
        )
    ),
]


def make_grid(kind: str, device: str) -> bs.Grid:
    """Two batches, three query heads on one KV head; blocks of few tokens, so that tests stay small."""
    sizes: dict[str, Any] = {"N": 70, "B": 2, "Hq": 3, "Hkv": 1, "D": 4, "device": device}
    generator = torch.Generator().manual_seed(0)
    if kind == "one block":
        sizes |= {"N": 1}
    elif kind == "wide":
        sizes |= {"N": 400, "M": 22, "B": 1}
    elif kind in ("chunk", "per segment"):
        sizes |= {"M": 37}
    q, k, _ = make_qkv(**sizes)
    permuter: bs.Permuter[Any] = bs.Identity()
    if kind in ("sorted", "padded", "window, sorted"):
        permuter = bs.SegmentKeySort(S=48 if kind == "padded" else 32)
    elif kind == "per segment":
        permuter = bs.GlobalIndexMap(32)
    causal = kind != "not causal"
    permutation = permuter(q, k, bs.AttentionSpec(scale=0.5, causal=causal))
    if kind == "per query head":
        permutation = bs.GlobalPermutation(
            torch.rand(2, 3, 1, 70, generator=generator).argsort(-1).int().to(device)
        )
    q_block, k_block = (8, 4) if kind == "wide" else (16, 16) if kind == "padded" else (8, 16)
    window = 21 if "window" in kind else None
    return grid_of(q, k, q_block, k_block, permutation=permutation, causal=causal, window=window)


def heads_of(grid: bs.Grid) -> tuple[int, int, int, int]:
    """Shape of scores on the grid."""
    return grid.batch, grid.q_heads, grid.rows, grid.cols
