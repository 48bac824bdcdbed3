"""Calls that repeat what an earlier call with inputs of the same sizes did on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from blocksparse.runtime.device import device_of
from blocksparse.runtime.known_calls import Calls, Key, owner_of
from blocksparse.runtime.repetition import NotRepeated, Recording, current
from blocksparse.runtime.torch_private import NO_DISPATCH_MODES, under_a_function_mode, under_forward_mode
from blocksparse.runtime.transforms import is_transformed

Result = TypeVar("Result")

CALLS = Calls(most_known=1024, most_met=4096)
"""What this process learned: some 20 kB for a call that is repeated, 2 kB for one that was met."""


def repeated(run: Callable[..., Result], *args: Any) -> Result:
    """Run a function of tensors and plain values, `(q, k, v, spec, out)`, say, or repeat what it did on a GPU.

    The first call with inputs of some sizes runs as it is, which compiles kernels. The second is recorded, and
    later ones repeat it (`repetition.py`): the same launches on memory of the same sizes, so they give the same
    result. Where a recording meets what cannot be repeated, the call begins again, and runs as it is ever after.
    What is learned belongs to the value of which `run` is a method, so that equal ones learn together, and for as
    long as the process runs. None is repeated where tensors need gradients or are of a subclass, in forward-mode
    differentiation, under a mode that changes PyTorch's functions, while a graph is captured, and on AMD's GPUs.

    Args:
        run: in it, Python looks at the sizes, strides and dtypes of tensors, and never at their contents. A
            method of a value that holds stages from elsewhere is never repeated, since they may launch what
            nobody records.
    """
    tensors = tuple([x for x in args if isinstance(x, Tensor)])
    key = None if current.get() is not None else _key(run, tensors, args)
    if key is not None and ((known := CALLS.find(key)) is not None or CALLS.meet(key)):
        try:
            if known is None:
                return _recorded(key, run, tensors, args)
            with device_of(tensors[0]):
                out: Result = known(*tensors)
            return out
        except (NotRepeated, torch.OutOfMemoryError):
            pass  # A recording holds all memory of a call, and a repetition takes most of it in one piece.
    return run(*args)


def _recorded(key: Key, run: Callable[..., Result], tensors: tuple[Tensor, ...], args: tuple[Any, ...]) -> Result:
    """Make a call, and learn how to repeat it."""
    CALLS.never(key)  # unless it succeeds
    recording = Recording(tensors)
    before = current.set(recording)
    try:
        with recording:
            out = run(*args)
    finally:
        current.reset(before)
    CALLS.learn(key, recording.repetition(out))
    return out


def _key(run: Callable[..., Any], tensors: tuple[Tensor, ...], args: tuple[Any, ...]) -> Key | None:
    """All that a call may depend on but the contents of its tensors; None for a call that is not repeated."""
    first = tensors[0]
    if not first.is_cuda or NO_DISPATCH_MODES is not None or torch.version.hip is not None:
        return None
    if is_transformed() or under_forward_mode() or under_a_function_mode():
        return None  # something stands between calls of PyTorch and what they do
    if torch.cuda.is_current_stream_capturing() or (owner := owner_of(run)) is None:
        return None
    parts: list[object] = [owner, first.device]
    begins: list[Any] = []  # of the memory of each tensor
    for x in args:
        if not isinstance(x, Tensor):
            parts += (type(x), x)
        elif type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled()) or not x.numel():
            return None
        else:
            begins.append((place := x.data_ptr()) - x.storage_offset() * x.dtype.itemsize)
            one = begins.index(begins[-1])  # q, k and v may be parts of one tensor: then also where
            parts += (x.shape, x.stride(), x.dtype, place % 16, one, place - tensors[one].data_ptr())
    return tuple(parts)
