"""The modes of PyTorch that a call runs under: autocast, torch.compile, `torch.func` and checkpointing."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from blocksparse.launch.torch_private import under_a_transform

AUTOCAST_TAKES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*AUTOCAST_TAKES, torch.float64)
"""What q, k and v may be of."""

_AS_IT_IS = nullcontext()
# torch.compile recompiles when the autocast dtype changes, even with autocast off: so it is set to the default.
_FIRST_DTYPE = {"cpu": torch.bfloat16, "cuda": torch.float16}


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of `x`. It does nothing if autocast is off already."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _AS_IT_IS
    return torch.autocast(device, dtype=_FIRST_DTYPE.get(device), enabled=False)


def is_checkpointed() -> bool:
    """Whether reentrant checkpointing runs a call without gradients, and will run it again with them.

    PyTorch notes this nowhere but on the stack, as the forward pass of an `autograd.Function`, and so do other
    packages that checkpoint. Never so while a graph is traced.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    frame = sys._getframe().f_back
    while frame is not None and not _is_of_a_function(frame):
        frame = frame.f_back
    return frame is not None


def _is_of_a_function(frame: FrameType) -> bool:
    code = frame.f_code  # locals are asked last, as they take microseconds
    named = code.co_name == "forward" and code.co_varnames[:1] == ("ctx",)
    return named and isinstance(frame.f_locals.get("ctx"), FunctionCtx)


def refuse_tracing() -> None:
    """Refuse to be followed by `torch.jit.trace`, which would keep the blocks of its example for all inputs."""
    if cast(Any, torch.jit).is_tracing():
        raise ValueError(
            "torch.jit.trace would keep the blocks of its example for all inputs. Use torch.compile or "
            "torch.export."
        )


def is_transformed() -> bool:
    """Whether tensors may be stand-ins now: those of a graph that is traced, or of a transform of `torch.func`.

    Kernels cannot read stand-ins. An op gets the tensors behind them.
    """
    return torch.compiler.is_compiling() or under_a_transform()


def refuse_transforms(method: str) -> None:
    """Refuse a call of a method of pipelines without a graph node."""
    if is_transformed():
        raise ValueError(
            f"torch.compile and torch.func take calls of a pipeline, but not {method!r}. Leave it out of them."
        )
