"""What of `benchmarks.serving` needs no vLLM: loads, their latencies, and tables of results."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attrs import asdict
from benchmarks.serving.load import ANSWERS, LENGTHS, Arrival, Latency, percentile, poisson
from benchmarks.serving.report import tables
from benchmarks.serving.turns import Case


def test_cases() -> None:
    assert Case.read("16x1000x64") == (16, 1000, 64, 8192)
    assert Case.read("1x65536@2048*3") == (1, 65536, 1, 2048)


def test_arrivals_are_the_same_for_all_engines_and_mixed_as_stated() -> None:
    arrivals = poisson(20.0, 100.0)
    assert arrivals == poisson(20.0, 100.0)
    assert arrivals != poisson(20.0, 100.0, seed=1)
    assert len(arrivals) == pytest.approx(2000, rel=0.1)
    assert all(a.at < b.at for a, b in pairwise(arrivals))
    for share, least, most in LENGTHS:
        found = sum(least <= arrival.tokens <= most for arrival in arrivals) / len(arrivals)
        assert found == pytest.approx(share, abs=0.04)
    assert {min(ANSWERS), max(ANSWERS)} >= {min(a.answer for a in arrivals), max(a.answer for a in arrivals)}


@pytest.mark.parametrize("q", [50, 95, 99])
def test_percentiles_are_those_of_numpy(q: float) -> None:
    seconds = np.random.default_rng(0).random(37)
    assert percentile(list(seconds), q) == pytest.approx(1000 * float(np.percentile(seconds, q)))


def test_latencies() -> None:
    """The second request loses its last token, the third all of them."""
    arrivals = [Arrival(1.0, 100, 3), Arrival(2.0, 100, 3), Arrival(2.5, 100, 2)]
    found = Latency.of(arrivals, [[1.5, 1.6, 1.8], [3.0, 3.1], []])
    assert (found.requests, found.finished) == (3, 1)
    assert found.requests_per_s == pytest.approx(1 / 2.1)
    assert found.ttft_ms["p50"] == pytest.approx(750)
    assert found.itl_ms == pytest.approx({"p50": 100, "p99": 198})


def test_tables_of_a_run() -> None:
    def score(engine: str, task: str, *scores: float) -> dict[str, Any]:
        return {"kind": "task", "tokens": 16384, "task": task, "engine": engine, "scores": scores}

    latency = Latency.of([Arrival(0.0, 100, 2)], [[0.5, 0.51]])
    lines: list[dict[str, Any]] = [
        {"kind": "options", "compiled": True, "model": "qwen", "yarn": 0, "date": "2026-11-28"},
        {"kind": "engine", "engine": "stock", "versions": {"vllm": "0.32.0"}},
        {
            "kind": "case",
            "case": "1 x 8",
            "seconds": {"stock": [9.0, 2.0, 2.0, 4.0], "auto": [5.0, 1.0, 1.0, 1.0]},
        },
        score("stock", "single", 1.0, 1.0),
        score("auto", "single", 1.0, 0.0),
        score("stock", "tracking", 0.0, 0.0),  # which the others were not asked
        {"kind": "load", "rate": 4.0, "seconds": 9.0, "engine": "auto"} | asdict(latency),
    ]
    text = tables(lines)
    assert "### qwen, compiled with CUDA graphs, 2026-11-28" in text
    assert "| 1 x 8 | 2.000 | 1.000 | 2.00 | 4.50 / 5.00 |" in text
    assert "| 16384 | auto | 50.0 | -50.0 (" in text
    assert "| 16384 | left out: tracking |" in text
    assert "| 4 | auto | 1 of 1 | 1.96 | 500 | 500 | 500 | 10.00 | 10.00 |" in text
