"""Launches that find their compiled kernel at once if there was one with such arguments before.

`kernel[grid](...)` of Triton works out in every launch what the arguments specialise the kernel on, and looks the
compiled kernel up by that. A call of a pipeline launches some ten kernels, and this took the host a third of the
call's time. So the compiled kernel is remembered here, by all that Triton specialises on. These are the device,
each constant, each integer, and for tensors their dtype and whether they are aligned to 16 bytes. Switches of
Triton (TRITON_DEBUG) that are set after a kernel's first launch do not reach it. On AMD's GPUs Triton also
specialises on how large the memory under a tensor is; there it launches kernels by itself. A kernel runs on the
device of its first tensor, whichever device is current.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from blocksparse.launch.driver_graph import Launch, is_watched
from blocksparse.launch.failures import LaunchError, launches
from blocksparse.launch.launch_graph import current_capture, device_of, refuse_capture

REMEMBERED = 4096  # compiled kernels of one function
# What every launch asks for: a product and a sum in one instruction. Triton 3.6 to 3.9 do so unasked, but 3.9 says
# that its successor will not.
OPTIONS = {"enable_fp_fusion": True}


@final
class Remembered:
    """A kernel, launched as a `triton.jit` function is, `kernel[grid](...)`, constants and options by name.

    No parameter has a default.
    """

    def __init__(self, jit: JITFunction[Any]) -> None:
        self.jit = jit
        self._compiled: dict[tuple[object, ...], tuple[Any, list[str]]] = {}
        self._failed: dict[tuple[object, ...], str] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        x, y, z = (*grid, 1, 1)[:3]
        return partial(self._launch, (x, y, z))

    def _launch(self, grid: tuple[int, int, int], *args: Any, **named: Any) -> None:
        with _where(args):
            self._launch_here(grid, args, named)

    def _launch_here(self, grid: tuple[int, int, int], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = named.values()
        device = torch.cuda.current_device()
        parts = [device, *named, *values, *map(type, values)]
        _add_kinds(parts, args)
        key = tuple(parts)
        known = self._compiled.get(key)
        if (found := known or self._first(key, grid, args, named)) is None:
            return
        compiled, constants = found
        run, arguments = Launch(_start, compiled, grid, device), (*args, *map(named.__getitem__, constants))
        if known is not None:
            run(*arguments)
        if (capture := current_capture.get()) is not None:
            capture.launched(run, arguments)

    def _first(
        self, key: tuple[object, ...], grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, list[str]] | None:
        """Launch the kernel by Triton, and remember what was compiled and the names of its constants."""
        if key in self._failed:
            raise LaunchError(self._failed[key])
        try:
            compiled = _started(self.jit, grid, args, named)
        except LaunchError as error:
            if len(self._failed) >= REMEMBERED:
                self._failed.clear()
            self._failed[key] = str(error)
            raise
        if compiled is None:  # one of Triton's hooks kept it from being compiled
            refuse_capture("a kernel was not compiled")
            return None
        if len(self._compiled) >= REMEMBERED:
            self._compiled.clear()
        self._compiled[key] = compiled, self.jit.arg_names[len(args) :]
        return self._compiled[key]


@final
class LookedUp:
    """The same where Triton looks a compiled kernel up in every launch, or interprets kernels."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        with _where(args):
            _started(self.jit, grid, args, named)


def _where(args: tuple[Any, ...]) -> AbstractContextManager[object]:
    """A context in which a kernel is launched on the device of its first tensor."""
    for x in args:
        if type(x) is Tensor:
            return device_of(x)
        x = x[0] if isinstance(x, tuple) and x else getattr(x, "base", x)
        if isinstance(x, Tensor):
            return device_of(x)
    return nullcontext()


def remembered(jit: Any) -> Any:
    """The kernel with its launches remembered and captured; on AMD's GPUs neither, nor interpreted."""
    return Remembered(jit) if isinstance(jit, JITFunction) and torch.version.hip is None else LookedUp(jit)


def _start(compiled: Any, grid: tuple[int, int, int], device: int, *args: Any) -> None:
    """Do what `compiled[grid](*args)` does, as PyTorch's Inductor does it, where no profiler hooks in.

    Triton calls its empty chains of hooks in every launch, and makes what it would tell them.
    """
    if is_watched(knobs.runtime):
        compiled[grid](*args)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _started(jit: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What Triton gives for a launch, which it may first compile; a `LaunchError` if it cannot be started."""
    written = getattr(jit, "fn", jit)  # the function as Python has it
    with launches(f"{written.__module__.rpartition('.')[2]}.{getattr(written, '__name__', '')}"):
        return jit[grid](*args, **named, **OPTIONS)


def _add_kinds(parts: list[object], args: tuple[Any, ...]) -> None:
    """Append what Triton may specialise a kernel on in these arguments. Integers stand for themselves.

    It is one loop over exact types, and calls nothing for most arguments: a call of a pipeline has about 150 of
    them. Two entries stand for a tensor; since only tensors begin with a dtype, different arguments never give the
    same entries.
    """
    add = parts.append
    for x in args:
        kind = type(x)
        if kind is int or x is None:
            add(x)
        elif kind is Tensor:
            add(x.dtype)
            add(x.data_ptr() % 16)
        elif kind is tuple:
            for part in x:
                if type(part) is not int:
                    inside: list[object] = []
                    _add_kinds(inside, x)
                    add(tuple(inside))
                    break
            else:
                add(x)
        elif kind is float:
            add(float)
        else:
            add(_kind(x))


def _kind(x: Any) -> object:
    """The same of an argument of a rarer type."""
    if isinstance(x, GluonDescriptor):
        return GluonDescriptor, x.base.dtype, *x.block_shape, x.padding, x.layout
    if isinstance(x, TensorDescriptor):
        return TensorDescriptor, x.base.dtype, *x.block_shape, x.padding
    if isinstance(x, float):
        return float
    if isinstance(x, Tensor):  # of a subclass; for all other types this question takes long
        return x.dtype, x.data_ptr() % 16
    return type(x), x
