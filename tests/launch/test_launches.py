"""A launch finds the compiled kernel of an earlier one only where Triton would have taken the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from blocksparse.launch import launches
from blocksparse.launch.launches import Remembered, remembered
from tests.machine import python


class Compiled:
    """A compiled kernel that notes its launches."""

    function, packed_metadata = 5, (1,)

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
        self.by_triton = 0

    def run(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        assert (stream, function, packed) == (70, self.function, self.packed_metadata)
        assert rest[:3] == (None, None, None)  # what hooks are told, and the hooks
        self.launches.append(((x, y, z), rest[3:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.by_triton += 1
        return lambda *args: self.launches.append((grid, args))


class Jit:
    """A function of Triton that notes how it was asked for compiled kernels."""

    arg_names = ("x", "strides", "N", "scale", "ROWS", "WIDE")

    def __init__(self) -> None:
        self.made: list[Compiled] = []
        self.asked: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def compiled(*_: Any, **named: Any) -> Compiled:
            self.asked.append(named)
            self.made.append(Compiled())
            return self.made[-1]

        return compiled


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    on_device = SimpleNamespace(get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=on_device))
    return Jit()


MEMORY = torch.zeros(64)


def launch(
    kernel: Any, x: Any = MEMORY, strides: Any = (4, 1), N: Any = 7, scale: Any = 0.5, **named: Any
) -> None:
    kernel[(3, 2)](x, strides, N, scale, **{"WIDE": 8, "ROWS": 4, "num_warps": 1, **named})


def test_a_second_launch_is_of_the_compiled_kernel(jit: Jit) -> None:
    """With the arguments of its own, the constants in the order of the parameters, and no options."""
    kernel = Remembered(jit)
    launch(kernel)
    other = torch.ones(64)
    launch(kernel, other, scale=0.25)
    assert len(jit.made) == 1
    ((grid, args),) = jit.made[0].launches
    assert grid == (3, 2, 1)
    assert args[0] is other
    assert args[1:] == ((4, 1), 7, 0.25, 4, 8)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_launches(jit: Jit, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton, which then makes what it tells."""
    kernel, hooks = Remembered(jit), knobs.HookChain[Any]()
    monkeypatch.setattr(knobs.runtime, hook, hooks)
    for expected in (0, 0, 1, 2):
        launch(kernel)
        assert jit.made[0].by_triton == expected
        if len(jit.made[0].launches) == 1:
            hooks.add(print)
    assert len(jit.made[0].launches) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"x": MEMORY[1:]}, {"x": MEMORY.half()}, {"x": None}, {"strides": (4, 2)}, {"N": 16}, {"N": True},
        {"N": 1},
        {"strides": (True, 1)}, {"strides": (4.0, 1)}, {"strides": (None, MEMORY)}, {"WIDE": 8.0}, {"WIDE": True},
        {"scale": 1}, {"WIDE": 16}, {"num_warps": 2}, {"strides": (MEMORY, MEMORY)}, {"maxnreg": 1},
        {"x": TensorDescriptor(MEMORY, [4, 16], [16, 1], [4, 16])},
    ],
    ids=str,
)  # fmt: skip
def test_what_triton_specialises_on_is_not_mistaken(jit: Jit, changed: dict[str, Any]) -> None:
    kernel = Remembered(jit)
    for arguments in ({}, changed, {}, changed):
        launch(kernel, **arguments)
    assert [len(compiled.launches) for compiled in jit.made] == [1, 1]


@pytest.mark.parametrize("again", [lambda: MEMORY, lambda: (MEMORY, MEMORY[4:]), lambda: (None, (1, MEMORY))])
def test_no_tensor_is_kept_alive(jit: Jit, again: Callable[[], Any]) -> None:
    kernel = Remembered(jit)
    launch(kernel, again())
    assert not holds_tensors(list(kernel._compiled))


def holds_tensors(x: object) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (tuple, list)) and any(map(holds_tensors, x)))


def test_another_device_has_kernels_of_its_own(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Remembered(jit)
    launch(kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel)
    assert len(jit.made) == 2


def test_memory_is_bounded(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "REMEMBERED", 3)
    kernel = Remembered(jit)
    for N in range(2, 10):
        launch(kernel, N=N)
    assert len(kernel._compiled) <= 3


@pytest.mark.slow
def test_kernels_have_no_defaults() -> None:
    """A default would be missing from the arguments of a compiled kernel."""
    code = """
import os; os.environ.pop("TRITON_INTERPRET", None)
import importlib, pkgutil, blocksparse.kernels
from inspect import Parameter
from blocksparse.launch.launches import Remembered, remembered
found = 0
for module in pkgutil.walk_packages(blocksparse.kernels.__path__, "blocksparse.kernels."):
    if not module.name.endswith(("_triton", "_hopper")):
        continue
    for name, kernel in vars(importlib.import_module(module.name)).items():
        if isinstance(kernel, Remembered):
            found += 1
            assert all(p.default is Parameter.empty for p in kernel.jit.signature.parameters.values()), name
print(found)
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 30


def test_amd_gpus_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """There Triton also specialises on whether the memory under a tensor is larger than 2 GiB."""

    def nothing(x: Any) -> None:
        pass

    kernel = JITFunction(nothing)
    assert isinstance(remembered(kernel), Remembered)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    ran: list[dict[str, Any]] = []
    monkeypatch.setattr(kernel, "run", lambda *_, **named: ran.append(named))
    for _ in range(2):
        remembered(kernel)[(3,)](MEMORY, num_warps=1)
    assert ran == 2 * [{"grid": (3,), "warmup": False, "num_warps": 1, "enable_fp_fusion": True}]


def test_products_and_sums_in_one_instruction_are_asked_for(jit: Jit) -> None:
    """Triton 3.9 warns that its successor takes them apart where nobody asks."""
    launch(Remembered(jit))
    assert jit.asked == [{"WIDE": 8, "ROWS": 4, "num_warps": 1, "enable_fp_fusion": True}]
