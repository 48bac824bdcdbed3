"""Calls that repeat what an earlier call with inputs of the same sizes did on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from attrs import fields, has
from torch import Tensor
from torch.autograd import forward_ad

from blocksparse.executors.executor import Executor
from blocksparse.kernels.common.hardware import device_of
from blocksparse.kernels.common.repetition import Recording, Repetition, is_recording, told
from blocksparse.opaque_call import is_transformed
from blocksparse.permuters.permuter import Permuter
from blocksparse.scorers.scorer import Scorer
from blocksparse.selectors.selector import Selector

_MOST_KNOWN = 512  # calls; what is known of one takes some kilobytes


@final
class Repeated:
    """A function of tensors, then of plain values: `(q, k, v, causal, scale)`, say. Calls on a GPU are repeated.

    The first call with inputs of some sizes runs as it is, which compiles kernels. The second is recorded, and
    later ones repeat it (`kernels/common/repetition.py`): the same operations on memory of the same sizes, so they
    give the same result. A call also runs as it is where tensors need gradients or are of a subclass, in
    forward-mode differentiation, while a graph is captured, and on AMD's GPUs.

    Args:
        run: in it, Python looks at the sizes, strides and dtypes of tensors, and never at their contents.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self._known: dict[tuple[object, ...], Repetition | bool] = {}  # whether a call can be repeated, or how

    def __reduce__(self) -> tuple[type[Repeated], tuple[Callable[..., Any]]]:
        return Repeated, (self.run,)  # a copy learns anew, since what is known has pointers into memory

    def __call__(self, *args: Any) -> Any:
        tensors = tuple([x for x in args if isinstance(x, Tensor)])
        key = None if is_recording() else _key(tensors, args[len(tensors) :])
        if key is None:
            return self.run(*args)
        known = self._known.get(key)
        if type(known) is Repetition:
            with device_of(tensors[0]):
                return known(*tensors)
        if known is False:
            return self.run(*args)
        return self._learn(key, tensors, args, first=known is None)

    def _learn(
        self, key: tuple[object, ...], tensors: tuple[Tensor, ...], args: tuple[Any, ...], *, first: bool
    ) -> Any:
        """Make a call, and remember how to repeat it or, in the first one, whether it may be recorded.

        What torch.compile compiles must not run while a recording sees operations, since it would run uncompiled.
        So the first call is only watched for what refuses to be repeated.
        """
        recording = Recording(tensors, sees=not first)
        with told(recording):
            if first:
                out = self.run(*args)
                known: Repetition | bool = recording.refused is None
            else:
                with recording:
                    out = self.run(*args)
                known = recording.repetition(out) or False
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = known
        return out


def only_ours(*stages: object) -> bool:
    """Whether these stages, and those inside them, are of this library. Others may launch what nobody records."""
    return all(map(_is_ours, stages))


def _is_ours(value: object) -> bool:
    kind = type(value)
    if isinstance(value, tuple):
        return only_ours(*value)
    if not has(kind):
        return not isinstance(value, Permuter | Scorer | Selector | Executor)
    named = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return named and only_ours(*(getattr(value, field.name) for field in fields(kind)))


def _key(tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> tuple[object, ...] | None:
    """All that a call may depend on but the contents of its tensors; None for a call that is not repeated."""
    first = tensors[0]
    if not first.is_cuda or torch.version.hip is not None:
        return None
    if is_transformed() or forward_ad._current_level >= 0 or torch.cuda.is_current_stream_capturing():
        return None
    parts: list[object] = [*values, *map(type, values), first.device]
    memory = set()
    for x in tensors:
        if type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled()) or not x.numel():
            return None
        parts += (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)
        memory.add(x.untyped_storage().data_ptr())
    if len(memory) < len(tensors):  # q, k and v may be parts of one tensor: then also where in it they lie
        parts += [x.data_ptr() - first.data_ptr() for x in tensors]
    return tuple(parts)
