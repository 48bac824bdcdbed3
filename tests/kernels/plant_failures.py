"""What a call says when one of its kernels cannot be launched; prints a line for each kernel of the package.

Run as a script, in a process of its own. Nothing is compiled or run here: launches end where Triton would compile, and
those of one kernel fail there, as if it needed more shared memory than there is.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from blocksparse import UnsupportedError
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.launch import failures
from blocksparse.launch.failures import LaunchError
from blocksparse.launch.launches import Remembered
from tests.kernels.compile_ahead import HEADS, KV_HEADS, TOKENS, calls
from tests.kernels.launched import gathered


def inputs() -> list[torch.Tensor]:
    return [torch.zeros(1, heads, TOKENS, 128, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def launched_by() -> dict[str, tuple[str, bool]]:
    """A call that launches each kernel, and whether it must take Hopper's own kernels to do so."""
    found: dict[str, tuple[str, bool]] = {}
    for hopper in (True, False):
        with gathered("sm_90", hopper=hopper) as launched:
            for title, call in calls(TARGETS["sm_90"]).items():
                launched.clear()
                call(*inputs())
                for variant in launched.values():
                    found.setdefault(variant.name, (title, hopper))
    return found


def said_without(kernel: str, title: str, hopper: bool) -> str:
    """What the second of two such calls raises if this kernel cannot be launched, or that it goes on.

    The first must do the same, and the second must not try the kernel again.
    """
    with gathered("sm_90", hopper=hopper), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(failures, "_why", {})
        keep, tried = JITFunction._do_compile, []
        call = calls(TARGETS["sm_90"])[title]

        def fail(self: JITFunction[Any], *args: Any) -> Any:
            if f"{self.module.rpartition('.')[2]}.{self.fn.__name__}" == kernel:
                tried.append(args[0])
                raise OutOfResources(300000, 232448, "shared memory")
            return keep(self, *args)

        monkeypatch.setattr(JITFunction, "_do_compile", fail)
        said = []
        for _ in range(2):
            try:
                call(*inputs())
            except (UnsupportedError, LaunchError) as error:
                said.append(f"{type(error).__name__}: {error}")
            else:
                said.append("goes on")
        assert tried
        assert len(set(tried)) == len(tried), (kernel, title, tried)
        assert all(x == "goes on" for x in said) or all(kernel in x for x in said), said
        return said[1].replace("\n", "\\n")


def forget() -> None:
    """What kernels remember of their own failures."""
    for module in [x for name, x in sys.modules.items() if name.startswith("blocksparse.kernels.")]:
        for x in vars(module).values():
            if isinstance(x, Remembered):
                x._failed.clear()


def main() -> int:
    torch.set_num_threads(1)
    logging.getLogger("blocksparse").setLevel(logging.ERROR)
    torch.set_grad_enabled(False)
    for kernel, (title, hopper) in sorted(launched_by().items()):
        print(f"{kernel} {said_without(kernel, title, hopper)}", flush=True)
        forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
