"""Engines in processes of their own, because vLLM keeps much in its process; `make test-vllm` runs these tests."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_model import VOCABULARY, llama

HERE = Path(__file__).parent
Run = Callable[..., dict[str, Any]]
# Everything is kept, so that sparse attention is dense attention, by other means.
EVERYTHING: dict[str, Any] = {"preset": "a_shape", "settings": {"sink": 32, "local": 4096, "block": 32}}
SOME: dict[str, Any] = {"preset": "a_shape", "settings": {"sink": 32, "local": 64, "block": 32}}
EAGER: dict[str, Any] = {"min_tokens": 48, "min_queries": 16, "record": True}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Serve mixes in an engine of its own."""

    def serve(
        mixes: list[Any],
        blocksparse: object = None,
        *,
        backend: str = "",
        plugins: str | None = None,
        **engine: Any,
    ) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("served") / "result.json"
        options = {"model": str(model), "enforce_eager": True, "num_gpu_blocks_override": 34, **engine}
        if blocksparse is not None:
            options["additional_config"] = {"blocksparse": blocksparse}
        done = subprocess.run(
            [sys.executable, HERE / "serving.py", out],
            input=json.dumps({"engine": options, "mixes": mixes, "backend": backend}),
            env=os.environ | ({} if plugins is None else {"VLLM_PLUGINS": plugins}),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        result: dict[str, Any] = json.loads(out.read_text())
        return result | {"log": done.stdout + done.stderr}

    return serve


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
