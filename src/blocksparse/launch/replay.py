"""Launch replay: a call launches what an earlier call of the same sizes launched, without running its stages."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, Generic, TypeVar, final

import torch
from attrs import fields, has
from torch import Tensor

from blocksparse.launch.launch_graph import CaptureError, LaunchCapture, current_capture, device_of
from blocksparse.launch.torch_modes import is_transformed
from blocksparse.launch.torch_private import under_a_function_mode, under_forward_mode

Key = tuple[object, ...]
"""All that a call depends on, and whose it is."""

T = TypeVar("T")


@final
class GraphCache:
    """Launch graphs by the keys of calls; a full cache drops the least recently used graph.

    A call is captured the second time it is seen. In a full cache it is captured only if the graph to be dropped
    was not used in between. So of more calls than fit, made by turns, some are replayed all the time, and the
    others cost no captures.

    Args:
        most_graphs: calls that can be replayed.
        most_seen: calls that were seen and have no graph.
    """

    def __init__(self, most_graphs: int, most_seen: int) -> None:
        self._most_graphs, self._most_seen = most_graphs, most_seen
        self._lock = Lock()
        self._calls = 0  # of this process
        # The graph of a call, and when it was used last: to move a long key to an end would hash it once more.
        self._graphs: dict[Key, list[Any]] = {}
        # When a call without a graph was seen last; infinity if it is never captured.
        self._seen: OrderedDict[Key, float] = OrderedDict()

    def get(self, key: Key) -> Any:
        """The graph of a call; None if there is none."""
        with self._lock:
            if (entry := self._graphs.get(key)) is None:
                return None
            self._calls += 1
            entry[1] = self._calls
            return entry[0]

    def should_capture(self, key: Key) -> bool | None:
        """Whether to capture a call that has no graph; None if it is seen for the first time."""
        with self._lock:
            self._calls += 1
            before = self._seen.pop(key, None)
            self._seen[key] = self._calls if before is None else max(before, self._calls)
            if len(self._seen) > self._most_seen:
                self._seen.popitem(last=False)
            if before is None:
                return None
            is_full = len(self._graphs) >= self._most_graphs
            oldest = min(used for _, used in self._graphs.values()) if is_full else 0
            return oldest < before < math.inf

    def exclude(self, key: Key) -> None:
        """Never capture this call again."""
        with self._lock:
            if key in self._seen:
                self._seen[key] = math.inf

    def put(self, key: Key, graph: Any) -> None:
        """Keep the graph of a call."""
        with self._lock:
            self._seen.pop(key, None)
            self._graphs.pop(key, None)
            if len(self._graphs) >= self._most_graphs:
                oldest, _ = min(self._graphs.items(), key=lambda item: item[1][1])  # hashes no key
                del self._graphs[oldest]
            self._graphs[key] = [graph, self._calls]

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self._graphs.clear()
            self._seen.clear()


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
    """The owner of a function: itself, or of a method the `owner` of its value, or else `owner_of_value`."""
    value = getattr(run, "__self__", None)
    if value is None:
        return run
    return value.owner if hasattr(value, "owner") else owner_of_value(value)


def owner_of_value(value: object) -> object:
    """One object, or equal ones, for all values that run alike.

    It is None where a value has no hash, or holds what is neither `is_ours` nor `replayable`.
    """
    return _OWNERS.find(value, object) or _spelled(value)


def is_ours(value: object) -> bool:
    """Whether a value and all that it holds are of this library, of PyTorch, or plain, and none is a tensor.

    No new value is equal to one that holds a tensor: to remember it would only keep the tensor's memory.
    """
    if isinstance(value, tuple):
        return all(map(is_ours, value))
    kind = type(value)
    if isinstance(value, Tensor) or not _is_known(kind):
        return False
    return not has(kind) or all(is_ours(getattr(value, field.name)) for field in fields(kind) if field.init)


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in (__name__.partition(".")[0], "torch", "builtins")


def _spelled(value: object) -> Key | None:
    """A value with `replayable` stages of users as all of their fields, so that none that differ are equal.

    Their own equality may leave out fields or see no types: 2 == 2.0. It is None if the value holds anything else
    that is not `is_ours`, or that has no hash. The class of a stage must be one of attrs by itself, since one that
    only inherits its fields may hold more.
    """
    kind: Any = type(value)
    ours = _is_known(kind)
    if isinstance(value, tuple):
        held: Iterable[object] = value
    elif ours and not has(kind):
        return None if isinstance(value, Tensor) or kind.__hash__ is None else (kind, value)
    elif ours or (getattr(kind, "replayable", False) is True and "__attrs_attrs__" in vars(kind)):
        held = [getattr(value, field.name) for field in fields(kind) if field.eq or not ours]
    else:
        return None
    parts = [_spelled(each) for each in held]
    return None if None in parts else (kind, *parts)


Result = TypeVar("Result")

GRAPHS = GraphCache(most_graphs=1024, most_seen=4096)
"""The graphs of this process: some 60 kB for a call that is replayed, 2 kB for one that was seen."""


def replayed(run: Callable[..., Result], *args: Any, memory: Tensor | None = None) -> Result:
    """Run a function of tensors and plain values, such as `(q, k, v, spec, out)`, or replay its launches on a GPU.

    The first call with inputs of some sizes runs normally, which compiles kernels. The second is captured, and
    later ones replay it (`launch_graph.py`): the same launches on memory of the same sizes, so they give the same
    result. Where a capture fails, the call begins again, and later ones run normally. Graphs belong to the value
    of which `run` is a method, so that equal values share them, and live as long as the process. No call is
    replayed where tensors need gradients or are of a subclass, or in forward-mode differentiation. Nor is one
    replayed under a mode that changes PyTorch's functions, while a CUDA graph is captured, or on AMD's GPUs.

    Args:
        run: in it, Python looks at the sizes, strides and dtypes of tensors, and never at their contents. A method
            of a value that holds stages from elsewhere is replayed only if they are `replayable`, since others may
            launch kernels that a capture does not see.
        memory: int32, for what a replay needs in between. If its address stays, fewer kernels are set again.
    """
    tensors = tuple([x for x in args if isinstance(x, Tensor)])
    key = None if current_capture.get() is not None else _key(run, tensors, args)
    if key is not None and ((graph := GRAPHS.get(key)) is not None or GRAPHS.should_capture(key)):
        try:
            if graph is None:
                return _captured(key, run, tensors, args)
            with device_of(tensors[0]):
                out: Result = graph(*tensors, memory=memory)
            return out
        except (CaptureError, torch.OutOfMemoryError):
            pass  # A capture holds all memory of a call, and a replay takes most of it in one piece.
    return run(*args)


def _captured(key: Key, run: Callable[..., Result], tensors: tuple[Tensor, ...], args: tuple[Any, ...]) -> Result:
    """Run a call, and keep its graph."""
    GRAPHS.exclude(key)  # unless it succeeds
    capture = LaunchCapture(tensors, functions=not is_ours(getattr(run, "__self__", None)))
    before = current_capture.set(capture)
    try:
        with capture:
            out = run(*args)
    except Exception as error:
        if capture.refused:  # TorchScript gives an error of its own for that
            raise CaptureError(str(error)) from error
        raise
    finally:
        current_capture.reset(before)
    GRAPHS.put(key, capture.graph(out))
    return out


def _key(run: Callable[..., Any], tensors: tuple[Tensor, ...], args: tuple[Any, ...]) -> Key | None:
    """All that a call may depend on but the contents of its tensors; None for a call that is not replayed."""
    first = tensors[0]
    if not first.is_cuda or torch.version.hip is not None:
        return None
    if is_transformed() or under_forward_mode() or under_a_function_mode():
        return None  # something stands between calls of PyTorch and what they do
    if torch.cuda.is_current_stream_capturing() or (owner := owner_of(run)) is None:
        return None
    parts: list[object] = [owner, first.device, torch.get_default_dtype()]
    begins: dict[Any, tuple[int, int]] = {}  # by where memory begins, the first tensor in it, and where that is
    for x in args:
        if type(x) is Tensor:
            place = x.data_ptr()  # 0 of a tensor without entries
            if not place or (x.requires_grad and torch.is_grad_enabled()):
                return None
            begin = place - x.storage_offset() * x.itemsize
            # q, k and v may be parts of one tensor: then also where
            one, first_place = begins.setdefault(begin, (len(begins), place))
            parts += (x.shape, x.stride(), x.dtype, place % 16, one, place - first_place)
        elif isinstance(x, Tensor):
            return None
        else:
            parts += (type(x), x)
    return tuple(parts)
