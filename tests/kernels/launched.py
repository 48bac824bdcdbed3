"""What pipelines would launch on a GPU that is not here, as Triton would compile it. For a process of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from blocksparse.execute import int8
from blocksparse.kernels.attention import gather_attention
from blocksparse.kernels.common import tiles
from blocksparse.kernels.common.hardware import TARGETS
from tests.kernels.ahead import triton_target
from tests.on_kernels import pretend_gpu, zeros_for_empty


class Variant(NamedTuple):
    """A kernel, and all that Triton specialises it on."""

    jit: JITFunction[Any]
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    options: Any
    attributes: dict[tuple[int, ...], Any]

    @property
    def name(self) -> str:
        """`sparse_attention_triton._kernel`."""
        return f"{self.jit.module.rpartition('.')[2]}.{self.jit.fn.__name__}"

    def named(self) -> dict[str, Any]:
        """Constants by name, of parameters that are constants as a whole, and the options of the launch."""
        names = self.jit.arg_names
        found = {names[at[0]]: value for at, value in self.constants.items() if len(at) == 1}
        return {
            **{
                name: value
                for name, value in found.items()
                if isinstance(value, int | str | bool) and name == name.upper()
            },
            "num_warps": self.options.num_warps,
            "num_stages": self.options.num_stages,
        }

    def itemsizes(self) -> list[int]:
        """Bytes of an entry of each tensor, in order."""
        bits = (re.search(r"\d+", dtype) for dtype in self.dtypes())
        return [max(int(found[0]) // 8, 1) if found else 1 for found in bits]

    def dtypes(self) -> list[str]:
        """Types of the pointers and descriptors, in order."""
        types = (x for x in self.signature.values() if isinstance(x, str))
        return [
            x.removeprefix("tensordesc<").partition("[")[0].strip("*") for x in types if x[0] == "*" or "<" in x
        ]

    def compiled(self, target: GPUTarget) -> Any:
        source = self.jit.ASTSource(self.jit, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=target, options=self.options.__dict__)


class _Driver:
    """The part of a driver of Triton that decides what a launch is compiled for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"{self._target.arch}"  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def gathered(name: str, *, hopper: bool = False) -> Iterator[dict[str, Variant]]:
    """Calls meanwhile see a GPU of this target; what they launch is not run, and is in the dictionary, each once.

    With `hopper` they take Hopper's own kernels where there are any.
    """
    found: dict[str, Variant] = {}

    def keep(
        self: JITFunction[Any], key: str, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> None:  # fmt: skip
        variant = Variant(self, signature, constexprs, options, attrs)
        found.setdefault(f"{variant.name} {key}", variant)

    hardware = TARGETS[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_gpu(monkeypatch, hardware)
        zeros_for_empty(monkeypatch)
        monkeypatch.setattr(torch.version, "hip", None if hardware.is_nvidia else "7.0")
        for module in (gather_attention, int8, tiles):
            monkeypatch.setattr(module, "is_hopper", lambda device: hopper)
        monkeypatch.setattr(JITFunction, "_do_compile", keep)
        monkeypatch.setattr(driver, "_active", _Driver(triton_target(hardware)))
        yield found
