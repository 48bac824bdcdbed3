"""Whole engines on a CPU, around a tiny random Llama."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EAGER, EVERYTHING, SOME, Run, mix

Prompt = Callable[[int], list[int]]


def densities(result: dict[str, Any]) -> list[float]:
    """The density of each layer in the table, which has sparse calls in all layers."""
    return [float(x) for x in re.findall(r"^ +\d+ +\d+ +([\d.]+)", result["table"], re.MULTILINE)]


@pytest.fixture(scope="session")
def mixes() -> list[dict[str, Any]]:
    return [mix(seed) for seed in range(50)]


@pytest.fixture(scope="session")
def stock(run: Run, mixes: list[Any]) -> dict[str, Any]:
    return run(mixes)


def test_the_same_tokens_in_the_dense_limit(run: Run, mixes: list[Any], stock: dict[str, Any]) -> None:
    """Chunks, mixed batches, hits of the prefix cache, preemption."""
    ours = run(mixes, EVERYTHING | EAGER)
    assert ours["tokens"] == stock["tokens"]
    for result in (stock, ours):
        assert result["preempted"] > 5
        assert result["cached"] > 1000
        assert result["mixed"] > 100
        assert result["chunks"] > 500
    assert densities(ours) == [1.0, 1.0]


def test_true_sparsity(run: Run, mixes: list[Any], stock: dict[str, Any]) -> None:
    ours = run(mixes, SOME | EAGER)
    assert ours["tokens"] != stock["tokens"]
    assert all(0.2 < density < 0.8 for density in densities(ours)), ours["table"]
