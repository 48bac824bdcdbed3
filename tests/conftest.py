"""Kernels run compiled where a GPU is, interpreted elsewhere; uninitialised memory is poisoned."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.interpreter import interpret_faster, note_launches

# Where ATEN_CPU_CAPABILITY hides AVX-512, PyTorch's flash kernel asks oneDNN alone whether to pack bf16 for AMX.
# The keys of Inductor's cache lack the vector length, and code for another one gives wrong results.
if (capability := os.environ.get("ATEN_CPU_CAPABILITY")) in ("avx2", "default"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{capability}")

# Triton decides when a kernel is defined, so this precedes every import of one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


if os.environ.get("TRITON_INTERPRET") == "1":
    interpret_faster()
    note_launches()

# Tensors here are tiny: threads would only wait for one another.
torch.set_num_threads(1)

gc.disable()  # until all tests are collected


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process that starts the others compiles the kernels for CPUs, unless that is done or cannot be."""
    if not hasattr(session.config, "workerinput"):
        from blocksparse.kernels.attention.cpu_attention import cpu_kernel
        from blocksparse.kernels.score.cpu_scores import scores_kernel

        cpu_kernel()
        scores_kernel()


def pytest_collection_finish() -> None:
    """Thousands of tests and PyTorch stay until the end; to search them for garbage took a fourth of the time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from tests.tiny_model import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands quieten the log."""
    logger = logging.getLogger("blocksparse")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers alone, in any order and beside others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Neither what torch.compile knows of other tests is used, nor are they told of what it learns here."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def two_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `tune` knows no others, which would take a minute."""
    from blocksparse.tools.tune import tune
    from tests.tune.tiny import CANDIDATES

    monkeypatch.setattr(tune, "__kwdefaults__", {**(tune.__kwdefaults__ or {}), "candidates": CANDIDATES[:2]})


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where the kernel for CPUs cannot be compiled."""
    from blocksparse.kernels.attention import cpu_attention
    from blocksparse.kernels.common.compiled import Loaded

    monkeypatch.setattr(cpu_attention, "cpu_kernel", lambda: Loaded(None, None, "no C++ compiler is found"))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        if torch.compiler.is_compiling() or x.device.type == "meta" or type(x) is not torch.Tensor:
            return x
        with torch.no_grad(), _disable_current_modes():
            if x.is_floating_point():
                return x.fill_(float("nan"))
            return x if x.dtype == torch.bool or x.is_complex() else x.fill_(torch.iinfo(x.dtype).max)

    return call


# Made once, since torch.compile knows functions of PyTorch by their identity when it is first used.
_POISONED = [
    (owner, name, _poisoned(getattr(owner, name)))
    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",)))
    for name in names
]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes reads as NaN, or as a huge index, also in calls that repeat a recorded one.

    There one allocation is filled for numbers of all types: int16 read as -1 and as their largest number in turn.
    """
    for owner, name, poisoned in _POISONED:
        monkeypatch.setattr(owner, name, poisoned)
