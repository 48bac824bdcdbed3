"""The kernel launches of one call, captured and launched again on other tensors of the same sizes.

The launches of a pipeline follow from the sizes, strides and dtypes of its inputs alone. To decide them again
takes Python longer than a GPU takes for a short prompt. A `LaunchCapture` knows allocations, `zero_` and `copy_`
within its buffers, and launches of our own kernels, which report themselves. A buffer is an input, or memory that
the call allocates. A call that does anything else with a tensor than to view it cannot be captured. The exception
are stages of users that may run PyTorch's functions: each then runs again, and copies its results into buffers. So
most arguments are captured as a buffer and an offset in bytes. An argument that was there before the call, such as
a weight, is captured itself. Where stages of users run it is not, since they may get a tensor from code that is
not seen. The capture knows the first and the last use of each buffer, so that a `LaunchGraph` allocates all of
them at once, except the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import groupby
from operator import add, itemgetter
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from blocksparse.launch.driver_graph import Base, DriverGraph, Place, can_join, driver_graph
from blocksparse.launch.torch_private import OpOverload, TorchDispatchMode, tree_leaves

_WHERE_IT_IS = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context in which kernels are launched on the device of `x`, whichever device is current outside."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _WHERE_IT_IS  # to switch to the current device costs the host microseconds a launch
    return torch.cuda.device(x.device)


def side_by_side(used: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[int]:
    """Where in one allocation each piece of memory begins, so that those that are in use at a time do not meet.

    Args:
        used: by piece, the first step that uses it and the last one.
        sizes: in the unit of the result.
    """
    begins: dict[int, int] = {}
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):  # small ones then fill gaps
        (first, last), begin = used[piece], 0
        for other in sorted(begins, key=begins.__getitem__):
            apart = used[other][1] < first or last < used[other][0]
            if not apart and begin + sizes[piece] > begins[other]:
                begin = max(begin, begins[other] + sizes[other])
        begins[piece] = begin
    return [begins[piece] for piece in range(len(sizes))]


# A call with more memory than this keeps a GPU busy for longer than Python takes; and a capture holds all of it.
_MOST_BYTES = 1 << 30
_ALIGNED = 512  # bytes, to a multiple of which PyTorch allocates memory on a GPU; kernels rely on 16 of them
_ALLOCATE = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}  # fmt: skip
_WHOLE: set[OpOverload] = set()  # those met so far that are not made of others
_IN_PLACE = {torch.ops.aten.zero_.default, torch.ops.aten.copy_.default}
# Of functions that look at contents for a number or a shape, that change what a tensor is, or that draw from a
# generator: Python may have seeded it for this call.
_UNSTEADY = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}  # fmt: skip

Make = Callable[[list[Any]], Any]
"""Makes a value, or the tuple of a launch's arguments, of the values before it and of memory."""

_Step = tuple[Callable[..., object], Make, Sequence[int]]  # what runs, what picks its arguments, their indices
_Parts = list[tuple[DriverGraph | None, Sequence[_Step]]]
_Varying = tuple[Sequence[tuple[int, Place]], Sequence[tuple[int, Make, Sequence[int]]]]


class CaptureError(BaseException):
    """A call that is captured does what cannot be replayed. Handlers of errors should not catch it."""


@final
class LaunchGraph:
    """The launches of a captured call. Called with tensors like the captured ones, it returns that call's result.

    Buffers are the inputs, then what was allocated. The arguments of all launches are one list of values, and
    behind them buffer `i` is `values[-1 - i]`. Bases are the inputs, the workspace and the memory of the result.
    The first call launches one by one, and then makes the launches that follow one another graphs of the driver.

    Args:
        fixed: the values that are the same in each call, None in place of the others.
        addresses: the index of a value that is an address, and where it points.
        made: the index of a value, what makes it, and of which others.
        steps: what runs, and the indices of its arguments.
        result: index, buffer, what allocates it.
        allocated: how many buffers there are behind the inputs.
        workspace: numbers of 4 bytes.
    """

    def __init__(
        self,
        fixed: list[Any],
        addresses: list[tuple[int, Place]],
        made: list[tuple[int, Make, Sequence[int]]],
        steps: list[tuple[Callable[..., object], Sequence[int]]],
        result: tuple[int, int, Callable[[], Tensor] | None],
        allocated: int,
        workspace: int,
    ) -> None:
        self.steps = [(run, _tuple_of(indices), indices) for run, indices in steps]
        self.fixed, self.workspace, self._result, self._allocated = fixed, workspace, result, allocated
        self._all = addresses, made
        # Steps in turn, with a graph of the driver or without, and the values that those without one need.
        self._plan: tuple[_Parts, _Varying] = [(None, self.steps)], self._all
        self._only: DriverGraph | None = None  # where it does all steps, and the result is an input
        self._is_new = True

    def __call__(self, *inputs: Tensor, memory: Tensor | None = None) -> Any:
        """
        Args:
            memory: int32, to be used as workspace if there is enough of it.
        """
        if (workspace := memory) is None or workspace.numel() < self.workspace:
            workspace = torch.empty(self.workspace, dtype=torch.int32, device=inputs[0].device)
        bases = [*[x.data_ptr() for x in inputs], workspace.data_ptr()]
        if self._only is not None and self._only.launch(bases):
            return inputs[self._result[1]]
        values = [*self.fixed, *[workspace] * self._allocated, *reversed(inputs)]
        index, own, allocate = self._result
        if allocate is not None:
            values[-1 - own] = memory = allocate()
            bases.append(memory.data_ptr())
        parts, varying = self._plan
        _fill(values, bases, varying)
        for graph, steps in parts:
            if graph is not None:
                if graph.launch(bases):
                    continue
                _fill(values, bases, self._all)
            for run, arguments, _ in steps:
                run(*arguments(values))
        if self._is_new:
            self._is_new = False
            self._plan = self._joined(values, bases)
            if len(graphs := self._plan[0]) == 1 and allocate is None and index == -1 - own:
                self._only = graphs[0][0]
        return values[index]

    def _joined(self, values: list[Any], bases: list[int]) -> Any:
        """The plan with launches joined, which were called with these values."""
        addresses, made = self._all
        known = {values[index]: place for index, place in addresses}
        # Inputs that overlap may have one address for two places, which those of another call need not have.
        is_clear = len(known) == len({place for _, place in addresses})
        parts: _Parts = []
        calls = [(step, (step[0], step[1](values))) for step in self.steps]
        for joined, group in groupby(calls, key=lambda call: can_join(*call[1])):
            steps, called = zip(*group, strict=True)
            joined = joined and len(steps) > 1 and is_clear
            graph = driver_graph(called, known, len(bases)) if joined else None
            parts.append((graph, steps))
        wanted = {self._result[0]}
        wanted.update(*[step[2] for graph, steps in parts if graph is None for step in steps])
        for index, _, of in reversed(made):
            if index in wanted:
                wanted.update(of)
        return parts, ([x for x in addresses if x[0] in wanted], [x for x in made if x[0] in wanted])


def _fill(values: list[Any], bases: list[int], varying: _Varying) -> None:
    """Set the values that differ from call to call."""
    for index, (base, offset) in varying[0]:
        values[index] = bases[base] + offset
    for index, make, _ in varying[1]:
        values[index] = make(values)


@final
class LaunchCapture(TorchDispatchMode):
    """Captures a call of these inputs; it raises `CaptureError` at operations that cannot be replayed.

    Args:
        functions: whether PyTorch's functions may run, if the shapes of results follow from those of arguments.

    Attributes:
        refused: whether it raised. Code in between may have caught that, or have raised another error for it.
    """

    def __init__(self, inputs: Sequence[Tensor], *, functions: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions = functions
        self.refused = False
        self._inputs = len(inputs)
        self._steps: list[tuple[Callable[..., object], Sequence[int]]] = []
        self._values: list[Any] = []
        self._addresses: dict[tuple[int, int], int] = {}  # a value's index, by buffer and offset in bytes
        self._made: dict[int, tuple[Make, Sequence[int]]] = {}  # and of which values
        self._used: dict[int, tuple[int, int]] = {}  # by buffer, the first and the last step that uses it
        # Held until the end, so that no address stands for two of them.
        self._buffers: list[Tensor] = []
        self._at: dict[int, int] = {}  # a buffer, the first of those that share memory, by where that begins
        self._keep(inputs)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _UNSTEADY.isdisjoint(func.tags):  # an empty result tells as much as another one
            self.refuse(f"{func} runs")
        if func not in _WHOLE:
            with self:  # in inference mode, functions made of others come whole, without tags of what those do
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
            _WHOLE.add(func)
        steady = self._functions and not _tensors(kwargs)
        if mutable := func._schema.is_mutable:
            in_place = func in _IN_PLACE or (steady and not kwargs)
            if not in_place or not all(map(self._where, _tensors(args))):
                self.refuse(f"{func} runs")
            self.launched(func, args, as_views=True)
        out = func(*args, **kwargs)
        if not all(map(_is_plain, _tensors((args, out)))):
            self.refuse(f"{func} gives or takes what is not a plain tensor")
        if func.overloadpacket in _ALLOCATE:
            self._hold(func, [out])
        elif not mutable and not self._are_views(args, out):
            made = tree_leaves(out)
            if not steady or not made or len(_tensors(out)) < len(made) or self._shares_memory(args, made):
                self.refuse(f"{func} runs")
            self._hold(func, made)
            self.launched(partial(_computed, func, len(made), kwargs), (*made, *args), as_views=True)
        return out

    def refuse(self, because: str) -> NoReturn:
        """End the capture."""
        self.refused = True
        raise CaptureError(because)

    def _hold(self, func: OpOverload, made: Sequence[Tensor]) -> None:
        """Keep new memory as buffers."""
        self._keep(made)
        held = sum(x.untyped_storage().nbytes() for x in self._buffers[self._inputs :])
        if held > _MOST_BYTES or any(x.device != self._buffers[0].device for x in made):
            self.refuse(f"{func} gives memory elsewhere, or too much")

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            if x.numel():
                self._at.setdefault(_address(x), len(self._buffers))
                self._buffers.append(x.detach())

    def _are_views(self, args: tuple[Any, ...], out: Any) -> bool:
        """Whether an operation gave tensors without separate memory; or it asked for none."""
        given, made = _tensors(args), _tensors(out)
        there = self._at.keys() | map(_address, given)
        return all(not x.numel() or _address(x) in there for x in made) and bool(made or not given)

    def _shares_memory(self, args: tuple[Any, ...], made: Sequence[Tensor]) -> bool:
        """Whether one of these results has memory that was there before."""
        there = self._at.keys() | map(_address, _tensors(args))
        return any(x.numel() and _address(x) in there for x in made)

    def launched(self, run: Callable[..., object], arguments: Sequence[Any], *, as_views: bool = False) -> None:
        """Capture a launch, `run(*arguments)`; it takes addresses of tensors, or with `as_views` tensors."""
        self._steps.append((run, [self._value(x, as_views) for x in arguments]))

    def _value(self, x: Any, as_view: bool) -> int:
        """The index of the value that is this argument of a launch, or the result."""
        if type(x) is int or (type(x) is tuple and all(type(part) is int for part in x)):  # as most arguments are
            return self._add(x)
        if isinstance(x, tuple | list):
            before, parts = len(self._values), [self._value(part, as_view) for part in x]
            if not {*self._made, *self._addresses.values()}.isdisjoint(parts):
                return self._add(None, _tuple_of(parts), parts)
            del self._values[before:]
        base = x.base if (described := hasattr(x, "base") and hasattr(x, "block_shape")) else x
        if (where := self._where(base)) is None:
            if isinstance(x, Tensor) and not x.numel():  # a view would keep what it was taken from
                x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            elif isinstance(base, Tensor) and self._functions:
                self.refuse("a tensor comes from elsewhere")
            return self._add(x)
        first, _ = self._used.get(where[0], (len(self._steps), 0))
        self._used[where[0]] = first, len(self._steps)
        if (address := self._addresses.get(where)) is None:
            self._addresses[where] = address = self._add(None)
        if as_view:
            return self._add(None, _view_like(x, where[0], address), [address])
        return self._add(None, _descriptor_like(x, address), [address]) if described else address

    def _add(self, value: Any, make: Make | None = None, of: Sequence[int] = ()) -> int:
        if make is not None:
            self._made[len(self._values)] = make, of
        self._values.append(value)
        return len(self._values) - 1

    def _where(self, x: Any) -> tuple[int, int] | None:
        """The buffer in which an argument lies and its offset in bytes; None if it lies in none."""
        if isinstance(x, Tensor) and x.numel() and (index := self._at.get(_address(x))) is not None:
            return index, x.data_ptr() - self._buffers[index].data_ptr()
        return None

    def graph(self, result: Any) -> LaunchGraph:
        """The graph of the call, which returned `result`."""
        if self.refused or (where := self._where(result)) is None:
            self.refuse("the result was there before the call, or an earlier refusal was caught")
        buffer, like = where[0], self._buffers[where[0]]
        whole = (result.data_ptr(), result.dtype, result.shape, result.stride()) == (
            like.data_ptr(), like.dtype, like.shape, like.stride()
        )  # fmt: skip
        index = -1 - buffer if whole else self._value(result, as_view=True)
        new = partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)
        shared = [x for x in self._used if x >= self._inputs and x != buffer]
        sizes = [-(-self._buffers[x].untyped_storage().nbytes() // _ALIGNED) * _ALIGNED for x in shared]
        found = side_by_side([self._used[x] for x in shared], sizes)
        begins = dict(zip(shared, found, strict=True))

        def place(of: int, offset: int) -> Place:
            if of < self._inputs:
                return of, offset
            return (self._inputs + 1, offset) if of == buffer else (self._inputs, offset + begins[of])

        return LaunchGraph(
            self._values,
            [(at, place(*where)) for where, at in self._addresses.items()],
            [(at, *made) for at, made in self._made.items()],
            self._steps,
            (index, buffer, None if buffer < self._inputs else new),
            len(self._buffers) - self._inputs,
            max(map(add, found, sizes), default=0) // 4,
        )


current_capture: ContextVar[LaunchCapture | None] = ContextVar("current_capture", default=None)
"""The capture that this thread runs, if any."""


def refuse_capture(because: str) -> None:
    """End the capture, if there is one: something runs which it does not see, or must not leave out."""
    if (capture := current_capture.get()) is not None:
        capture.refuse(because)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in arguments or results of an operation: nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [found for x in values if x is not None for found in _tensors(x)]


def _computed(func: OpOverload, count: int, kwargs: dict[str, Any], *values: Any) -> None:
    """Run a function on all but the first `count` values, and copy its results into these."""
    for into, x in zip(values[:count], tree_leaves(func(*values[count:], **kwargs)), strict=True):
        if (x.shape, x.dtype) != (into.shape, into.dtype):
            raise CaptureError(f"{func} gives another shape or dtype than before")
        into.copy_(x)


def _is_plain(x: Tensor) -> bool:
    """Whether a view of memory says all about a tensor: none that is sparse, conjugated or of a subclass."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_conj() or x.is_neg())
    )


def _address(x: Tensor) -> int:
    """Where the memory under a tensor begins; of one without entries that may be 0, as of any other one."""
    return x.untyped_storage().data_ptr()


def _tuple_of(indices: Sequence[int]) -> Make:
    return itemgetter(*indices) if len(indices) > 1 else lambda values: tuple([values[i] for i in indices])


def _view_like(x: Tensor, buffer: int, at: int) -> Make:
    dtype, shape, strides = x.dtype, x.shape, x.stride()

    def make(values: list[Any]) -> Tensor:
        memory: Tensor = values[-1 - buffer]
        return memory.view(dtype).as_strided(shape, strides, (values[at] - _address(memory)) // dtype.itemsize)

    return make


def _descriptor_like(x: Any, at: int) -> Make:
    kind, rest = type(x), {name: value for name, value in vars(x).items() if name != "base"}

    def make(values: list[Any]) -> Any:
        # Its own constructor would check again what holds for all calls of these sizes.
        descriptor = object.__new__(kind)
        descriptor.__dict__ = {**rest, "base": Base(values[at])}
        return descriptor

    return make
