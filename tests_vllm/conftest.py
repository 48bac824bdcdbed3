"""Engines in processes of their own, because vLLM keeps much in its process; `make test-vllm` runs these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_model import llama

HERE = Path(__file__).parent
Run = Callable[..., dict[str, Any]]


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
