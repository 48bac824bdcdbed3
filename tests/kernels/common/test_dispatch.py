"""Operations and their kernels: one signature, and who takes which call."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse.kernels
from blocksparse.kernels.common.dispatch import Dispatched, compiled, on_gpus

_ROOT = Path(blocksparse.kernels.__path__[0])
_MODULES = [
    f"blocksparse.kernels.{path.parent.name}.{path.stem}"
    for path in sorted(_ROOT.glob("*/*.py"))
    if "@on_gpus" in path.read_text() and path.stem != "dispatch"
]
_OPERATIONS = {
    f"{module}.{name}": value
    for module in _MODULES
    for name, value in vars(importlib.import_module(module)).items()
    if isinstance(value, Dispatched) and value.__module__ == module
}


def _parameters(function: Any) -> list[tuple[str, object, object]]:
    return [(name, x.kind, x.default) for name, x in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("name", _OPERATIONS)
def test_a_kernel_has_the_signature_of_its_operation(name: str) -> None:
    pytest.importorskip("triton")
    operation: Any = _OPERATIONS[name]
    while isinstance(operation, Dispatched):
        kernel, mine = _parameters(operation.kernel()), _parameters(operation.reference)
        assert kernel[: len(mine)] == mine
        assert all(default is not inspect.Parameter.empty for _, _, default in kernel[len(mine) :])
        operation = operation.otherwise


def _by_kernel(x: Tensor, n: int = 1) -> str:
    return f"compiled {n}"


@on_gpus(torch.float32, where=lambda x, n=1: n < 3)
@compiled(_by_kernel, lambda x, n=1: x.dtype == torch.float16)
def operation(x: Tensor, n: int = 1) -> str:
    """What it does."""
    return f"plain {n}"


def test_who_takes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1)
    assert operation.__doc__ == "What it does."
    assert (operation(x), operation(x.half()), operation.reference(x.half(), n=2)) == (
        "plain 1",
        "compiled 1",
        "plain 2",
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(operation, "kernel", lambda: lambda x, n=1: f"triton {n}")
    assert [operation(x), operation(x, 3), operation(x.double()), operation(x.half(), n=2)] == [
        "triton 1", "plain 3", "plain 1", "compiled 2",
    ]  # fmt: skip
