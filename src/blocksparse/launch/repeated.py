"""Calls that repeat what an earlier one did on the GPU with inputs of the same sizes, and what is known of it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, TypeVar, final

import torch
from attrs import fields, has
from torch import Tensor

from blocksparse.launch.replay import NotRepeated, Recording, current, device_of
from blocksparse.launch.torch_modes import is_transformed
from blocksparse.launch.torch_private import under_a_function_mode, under_forward_mode

Key = tuple[object, ...]
"""All that a call depends on, and whose it is."""

T = TypeVar("T")


@final
class Calls:
    """How calls are repeated, by their keys; of too many, what was used least recently is forgotten.

    A call is recorded when it is met again. If no room is left then, it is recorded only if the one that would be
    forgotten for it was not made in between. So of more calls than there is room for, made in turns, some are
    repeated all the time, and the others cost no recordings.

    Args:
        most_known: calls that can be repeated.
        most_met: calls that were met and are not repeated.
    """

    def __init__(self, most_known: int, most_met: int) -> None:
        self._most_known, self._most_met = most_known, most_met
        self._lock = Lock()
        self._made = 0  # calls of this process
        # What repeats a call, and when it was made last.
        self._known: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
        # When a call was met last; infinity if it is never repeated.
        self._met: OrderedDict[Key, float] = OrderedDict()

    def find(self, key: Key) -> Any:
        """The recording that repeats this call; None if there is none."""
        with self._lock:
            if (entry := self._known.get(key)) is None:
                return None
            self._made += 1
            self._known[key] = entry[0], self._made
            self._known.move_to_end(key)
            return entry[0]

    def meet(self, key: Key) -> bool | None:
        """Whether this call, which nothing repeats, is to be recorded; None if it is met for the first time."""
        with self._lock:
            self._made += 1
            before = self._met.pop(key, None)
            self._met[key] = self._made if before is None else max(before, self._made)
            if len(self._met) > self._most_met:
                self._met.popitem(last=False)
            if before is None:
                return None
            _, oldest = next(iter(self._known.values())) if len(self._known) >= self._most_known else (None, 0)
            return oldest < before < math.inf

    def never(self, key: Key) -> None:
        """This call cannot be repeated."""
        with self._lock:
            if key in self._met:
                self._met[key] = math.inf

    def learn(self, key: Key, known: Any) -> None:
        """This call is repeated so from now on."""
        with self._lock:
            self._met.pop(key, None)
            self._known[key] = known, self._made
            if len(self._known) > self._most_known:
                self._known.popitem(last=False)

    def forget(self) -> None:
        """Nothing is known any more."""
        with self._lock:
            self._known.clear()
            self._met.clear()


@final
class ByValue(Generic[T]):
    """One object for all equal values, made for the first of them; of too many, the oldest is forgotten.

    Only for values that are `is_ours`: what is from elsewhere is not kept alive here.

    Args:
        most: objects that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._made: dict[object, T] = {}

    def find(self, value: object, make: Callable[[], T]) -> T | None:
        """The object of a value; None if the value has no hash, or is not `is_ours`."""
        try:
            found = self._made.get(value)
        except TypeError:  # it has no hash
            return None
        if found is None and is_ours(value):
            made = make()
            with self._lock:
                if len(self._made) >= self._most:
                    del self._made[next(iter(self._made))]
                found = self._made.setdefault(value, made)
        return found


_OWNERS: ByValue[object] = ByValue(512)


def owner_of(run: Callable[..., Any]) -> object:
    """The owner of a function: itself, or the value that it is a method of, one object for all that are equal.

    It is None where that value has no hash, or holds what is not `is_ours`.
    """
    value = getattr(run, "__self__", None)
    return run if value is None else _OWNERS.find(value, object)


def is_ours(value: object) -> bool:
    """Whether a value and all that it holds are of this library, of PyTorch, or plain, and none is a tensor.

    No new value is equal to one that holds a tensor: to remember it would only keep the tensor's memory.
    """
    if isinstance(value, tuple):
        return all(map(is_ours, value))
    if isinstance(value, Tensor):
        return False
    kind = type(value)
    if kind.__module__.partition(".")[0] not in (__name__.partition(".")[0], "torch", "builtins"):
        return False
    return not has(kind) or all(is_ours(getattr(value, field.name)) for field in fields(kind) if field.init)


Result = TypeVar("Result")

CALLS = Calls(most_known=1024, most_met=4096)
"""What this process learned: some 20 kB for a call that is repeated, 2 kB for one that was met."""


def repeated(run: Callable[..., Result], *args: Any) -> Result:
    """Run a function of tensors and plain values, `(q, k, v, spec, out)`, say, or repeat what it did on a GPU.

    The first call with inputs of some sizes runs as it is, which compiles kernels. The second is recorded, and
    later ones repeat it (`repetition.py`): the same launches on memory of the same sizes, so they give the same
    result. Where a recording meets what cannot be repeated, the call begins again, and runs as it is ever after.
    What is learned belongs to the value of which `run` is a method, so that equal ones learn together, and for as
    long as the process runs. No call is repeated where tensors need gradients or are of a subclass, or in
    forward-mode differentiation. Nor is one repeated under a mode that changes PyTorch's functions, while a graph
    is captured, or on AMD's GPUs.

    Args:
        run: in it, Python looks at the sizes, strides and dtypes of tensors, and never at their contents. A method
            of a value that holds stages from elsewhere is never repeated, since they may launch kernels that are
            not recorded.
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
    if not first.is_cuda or torch.version.hip is not None:
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
