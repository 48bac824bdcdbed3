"""Kernels run compiled where a GPU is, interpreted elsewhere; uninitialised memory is poisoned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

# Triton decides when a kernel is defined, so this precedes every import of one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _interpret_faster() -> None:
    """Leave out what Triton's interpreter spends half of its time on.

    It prepares `triton.language` again for every function that a kernel calls, though it is prepared already.
    """
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):  # another Triton than 3.7, and no public names for this
        return
    prepare = interpreter._patch_lang

    def unless_done(fn: Any) -> Any:
        modules = [x for x in fn.__globals__.values() if x is language or x is language.core]
        if any(language.core.is_builtin(module.load) for module in modules):
            return prepare(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = unless_done
    # Another quarter of it goes into asking whether sums of int32 overflow, which those of so few tokens cannot.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1":
    _interpret_faster()

# Tensors here are tiny: threads would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers alone, in any order and beside others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes reads as NaN, or as a huge index."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = allocate(*args, **kwargs)
            if torch.compiler.is_compiling() or x.device.type == "meta" or type(x) is not torch.Tensor:
                return x
            if x.is_floating_point():
                return x.fill_(float("nan"))
            return x if x.dtype == torch.bool or x.is_complex() else x.fill_(torch.iinfo(x.dtype).max)

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
