"""What is known of calls that may be repeated, and whose they are, for the whole process."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, TypeVar, final

from attrs import fields, has
from torch import Tensor

Key = tuple[object, ...]
"""All that a call depends on, and whose it is."""

T = TypeVar("T")


@final
class Calls:
    """How calls are repeated, by their keys; of too many, what was used least recently is forgotten.

    A call is recorded when it is met again. If there is no room then, it is recorded only if the one that would
    be forgotten for it was not made in between. So of more calls than there is room for, made in turns, some
    are repeated all the time, and the others cost no recordings.

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
        """What repeats this call; None if nothing is known that does."""
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
    """What stands for a function: itself, or the value that it is a method of, one object for all that are equal.

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
