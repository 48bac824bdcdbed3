"""Calls that repeat what an earlier call with inputs of the same sizes did on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from attrs import fields, has
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack  # no public name up to torch 2.13
from torch.utils._device import DeviceContext  # likewise

from blocksparse.executors.executor import Executor
from blocksparse.kernels.common.hardware import device_of
from blocksparse.kernels.common.repetition import Recording, Repetition, is_recording, told
from blocksparse.opaque_call import is_transformed
from blocksparse.permuters.permuter import Permuter
from blocksparse.scorers.scorer import Scorer
from blocksparse.selectors.selector import Selector

_MOST_KNOWN = 64  # repetitions; each takes 40 to 250 kB
_MOST_MET = 512  # calls that were met once, or cannot be repeated


@final
class Repeated:
    """A function of tensors, then of plain values: `(q, k, v, causal, scale)`, say. Calls on a GPU are repeated.

    The first call with inputs of some sizes runs as it is, which compiles kernels. The second is recorded, and
    later ones repeat it (`kernels/common/repetition.py`): the same operations on memory of the same sizes, so they
    give the same result. A call also runs as it is where tensors need gradients or are of a subclass, in
    forward-mode differentiation, under a mode that changes PyTorch's functions, while a graph is captured, and on
    AMD's GPUs.

    Args:
        run: in it, Python looks at the sizes, strides and dtypes of tensors, and never at their contents.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self._known: dict[tuple[object, ...], Repetition] = {}
        self._met: dict[tuple[object, ...], bool] = {}  # whether a call may be recorded

    def __reduce__(self) -> tuple[type[Repeated], tuple[Callable[..., Any]]]:
        return Repeated, (self.run,)  # a copy learns anew, since what is known has pointers into memory

    def __call__(self, *args: Any) -> Any:
        tensors = tuple([x for x in args if isinstance(x, Tensor)])
        key = None if is_recording() else _key(tensors, args[len(tensors) :])
        if key is None:
            return self.run(*args)
        if (known := self._known.get(key)) is not None:
            with device_of(tensors[0]):
                return known(*tensors)
        return self._learn(key, tensors, args, self._met.get(key))

    def _learn(
        self, key: tuple[object, ...], tensors: tuple[Tensor, ...], args: tuple[Any, ...], may_record: bool | None
    ) -> Any:
        """Make a call, and learn whether it may be recorded, which is None in the first one, or how to repeat it.

        What torch.compile compiles must not run while a recording sees operations, since it would run uncompiled.
        So the first call is only watched for what refuses to be repeated.
        """
        if may_record is False:
            return self.run(*args)
        recording = Recording(tensors, sees=may_record is not None)
        with told(recording):
            if may_record is None:
                out = self.run(*args)
                _put(self._met, key, recording.refused is None, _MOST_MET)
                return out
            short = False
            try:
                with recording:
                    out = self.run(*args)
            except torch.OutOfMemoryError:
                short = True
                recording.refuse("a recording holds more memory than a call does")
            if not short and (known := recording.repetition(out)) is not None:
                _put(self._known, key, known, _MOST_KNOWN)
            else:
                _put(self._met, key, False, _MOST_MET)
        return self.run(*args) if short else out


def _put(table: dict[tuple[object, ...], Any], key: tuple[object, ...], value: object, most: int) -> None:
    """Add an entry to a table, and drop the oldest one if there are too many."""
    if len(table) >= most:
        table.pop(next(iter(table)), None)
    table[key] = value


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
    if not first.is_cuda or torch.version.hip is not None or not _is_plain():
        return None
    parts: list[object] = [*values, *map(type, values), first.device]
    memories: dict[int, tuple[int, int, int]] = {}  # of each memory: its first tensor, where that begins, its size
    for at, x in enumerate(tensors):
        if type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled()) or not x.numel():
            return None
        memory, begin = x.untyped_storage(), x.data_ptr()
        parts += (x.shape, x.stride(), x.dtype, begin % 16)
        one, its_begin, size = memories.setdefault(memory.data_ptr(), (at, begin, memory.nbytes()))
        if size != memory.nbytes():  # two owners of one memory, as DLPack makes them
            return None
        if one != at:  # q, k and v may be parts of one tensor: then also where in it they lie
            parts += (one, begin - its_begin)
    return tuple(parts)


def _is_plain() -> bool:
    """Whether nothing stands between calls of PyTorch and what they do, and no graph is captured."""
    return not (
        is_transformed()
        or forward_ad._current_level >= 0
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
        or torch.cuda.is_current_stream_capturing()
    )
