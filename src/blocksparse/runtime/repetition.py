"""One call's launches, noted down and made again on other tensors of the same sizes.

What a pipeline does follows from the sizes, strides and dtypes of its inputs alone: which kernels it launches,
on which grids, with which arguments, on memory of which sizes. To decide this anew takes Python longer than a
GPU takes for a short prompt. So a call can be recorded, and its `Repetition` makes the same launches and
nothing else.

A `Recording` knows three things: allocations, `zero_` and `copy_` within what was given or allocated, and launches
of our own kernels, which tell it themselves. A call that does anything else with a tensor than to view it is not
repeated. So memory is all that is tracked: an argument lies so many bytes after the begin of memory that the call
was given or allocated, and is known by its address; or it was there before the call, as a weight was, and is taken
itself. As it is known when each piece of memory is first and last used, all of it but the result's is one
allocation in a repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from operator import add
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from blocksparse.runtime.torch_private import OpOverload, TorchDispatchMode, tree_leaves
from blocksparse.runtime.workspace import side_by_side

# A call with more memory than this keeps a GPU busy for longer than Python takes; and a recording holds all of it.
_MOST_BYTES = 1 << 30
_ALIGNED = 512  # bytes, to a multiple of which PyTorch allocates memory on a GPU; kernels rely on 16 of them
_ALLOCATE = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}  # fmt: skip

_IN_PLACE: dict[OpOverload, Callable[..., object]] = {
    torch.ops.aten.zero_.default: Tensor.zero_,
    torch.ops.aten.copy_.default: Tensor.copy_,
}

Make = Callable[[Tensor, int], Any]
"""Makes an argument of the memory that it lies in, and of the address at which it begins."""


class _Place(NamedTuple):
    """Where an argument lies that differs from call to call."""

    slot: int  # the number of its memory
    offset: int  # in bytes
    make: Make | None  # None if the argument is an address


class _Arguments(NamedTuple):
    """The arguments of a launch, or a tuple among them: those that are always the same, and what to put where."""

    fixed: list[Any]
    places: list[tuple[int, _Place | _Arguments]]

    def fill(self, memory: Sequence[Tensor], begins: Sequence[int]) -> list[Any]:
        """The arguments in memory that begins there."""
        filled = list(self.fixed)
        for at, place in self.places:
            if len(place) == 2:
                filled[at] = tuple(place.fill(memory, begins))
            else:
                slot, offset, make = place
                address = begins[slot] + offset
                filled[at] = address if make is None else make(memory[slot], address)
        return filled


class Repetition(NamedTuple):
    """The launches of a recorded call. Called with tensors like the recorded ones, it gives what that would give.

    Slots are the inputs, then what was allocated, which lies in one workspace but for the result's memory.
    """

    steps: list[tuple[Callable[..., object], _Arguments]]
    workspace: int  # numbers of 4 bytes
    begins: list[int]  # by allocated slot, how many bytes after the begin of the workspace
    own: tuple[int, Callable[[], Tensor]] | None  # the slot of the result, and what allocates it
    result: _Arguments

    def __call__(self, *inputs: Tensor) -> Any:
        workspace = torch.empty(self.workspace, dtype=torch.int32, device=inputs[0].device)
        start, memory = workspace.data_ptr(), [*inputs, *[workspace] * len(self.begins)]
        begins = [*[x.data_ptr() for x in inputs], *[start + begin for begin in self.begins]]
        if self.own is not None:
            slot, allocate = self.own
            memory[slot] = own = allocate()
            begins[slot] = own.data_ptr()
        for run, arguments in self.steps:
            run(*arguments.fill(memory, begins))
        return self.result.fill(memory, begins)[0]


@final
class Recording(TorchDispatchMode):
    """What a call does to these inputs.

    Args:
        sees: whether allocations and launches are noted. If not, it is only told what refuses to be repeated.
    """

    def __init__(self, inputs: Sequence[Tensor], *, sees: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None  # why the call cannot be repeated
        self.sees = sees
        self._inputs = len(inputs)
        self._steps: list[tuple[Callable[..., object], _Arguments]] = []
        self._used: dict[int, tuple[int, int]] = {}  # by slot, the first and the last step that uses its memory
        # By slot. All memory is held until the end, so that no address stands for two of them.
        self._held: list[Tensor] = []
        self._slot_of: dict[int, int] = {}
        for x in inputs:
            self._hold(x)

    def _hold(self, x: Tensor) -> None:
        self._slot_of.setdefault(_address(x), len(self._held))
        self._held.append(x)

    def refuse(self, because: str) -> None:
        """Give up: nothing more is noted, and no memory is held."""
        self.refused = because
        self._steps, self._held, self._slot_of = [], [], {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.refused is not None:
            return out
        if func.overloadpacket in _ALLOCATE:
            if out.numel():
                self._hold(out)
            held = sum(x.untyped_storage().nbytes() for x in self._held[self._inputs :])
            if out.device != self._held[0].device or held > _MOST_BYTES:
                self.refuse(f"{func} gives memory elsewhere, or too much")
        elif func in _IN_PLACE and all(self._place(x) for x in args if isinstance(x, Tensor)):
            self.launched(_IN_PLACE[func], args, as_views=True)
        elif func._schema.is_mutable or not self._are_views(args, out):
            self.refuse(f"{func} runs")
        return out

    def _are_views(self, args: tuple[Any, ...], out: Any) -> bool:
        """Whether an operation gave tensors without memory of their own; or it asked for none."""
        given, made = ([x for x in tree_leaves(part) if isinstance(x, Tensor)] for part in (args, out))
        there = {_address(x) for x in given} | self._slot_of.keys()
        return all(not x.numel() or _address(x) in there for x in made) and bool(made or not given)

    def launched(self, run: Callable[..., object], arguments: Sequence[Any], *, as_views: bool = False) -> None:
        """Note a launch, `run(*arguments)`. It takes the addresses of tensors, or tensors that are such views."""
        if self.sees and self.refused is None:
            self._steps.append((run, self._arguments(arguments, as_views)))

    def _arguments(self, given: Sequence[Any], as_views: bool) -> _Arguments:
        filled = _Arguments(list(given), [])
        for at, x in enumerate(given):
            if isinstance(x, tuple | list) and (inside := self._arguments(x, as_views)).places:
                filled.places.append((at, inside))
            elif (place := self._place(x)) is not None:
                filled.places.append((at, place._replace(make=_view_like(x)) if as_views else place))
                first, _ = self._used.get(place.slot, (len(self._steps), 0))
                self._used[place.slot] = first, len(self._steps)
                filled.fixed[at] = None
            elif isinstance(x, Tensor) and not x.numel():  # a view would keep what it was taken from
                filled.fixed[at] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return filled

    def _place(self, x: Any) -> _Place | None:
        """Where an argument lies; None if it is the same in each call."""
        if hasattr(x, "base") and hasattr(x, "block_shape"):  # a tensor descriptor
            return (place := self._place(x.base)) and place._replace(make=_descriptor_like(x))
        if not isinstance(x, Tensor) or not x.numel() or (slot := self._slot_of.get(_address(x))) is None:
            return None
        return _Place(slot, x.data_ptr() - self._held[slot].data_ptr(), None)

    def repetition(self, result: Any) -> Repetition | None:
        """What repeats the call, which gave `result`; None if nothing can."""
        given = self._place(result)
        if self.refused is not None or (given is None) != (result is None):  # the result was there before the call
            return None
        own = None
        if given is not None and given.slot >= self._inputs:
            like = self._held[given.slot]
            new = partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)
            own = given.slot, new
        shared = [x for x in self._used if x >= self._inputs and (given is None or x != given.slot)]
        sizes = [-(-self._held[slot].untyped_storage().nbytes() // _ALIGNED) * _ALIGNED for slot in shared]
        found = side_by_side([self._used[slot] for slot in shared], sizes)
        begins = dict(zip(shared, found, strict=True))
        return Repetition(
            self._steps,
            max(map(add, found, sizes), default=0) // 4,
            [begins.get(slot, 0) for slot in range(self._inputs, len(self._held))],
            own,
            self._arguments([result], as_views=True),
        )


current: ContextVar[Recording | None] = ContextVar("current", default=None)
"""The recording of what this thread does, if there is one."""


def refuse_repetition(because: str) -> None:
    """Tell the recording, if there is one, that something runs which it does not see, or must not leave out."""
    if (recording := current.get()) is not None:
        recording.refuse(because)


def _address(x: Tensor) -> int:
    """Where the memory under a tensor begins; of one without entries that may be 0, as of any other one."""
    return x.untyped_storage().data_ptr()


def _view_like(x: Tensor) -> Make:
    dtype, shape, strides = x.dtype, x.shape, x.stride()

    def make(memory: Tensor, address: int) -> Tensor:
        return memory.view(dtype).as_strided(shape, strides, (address - _address(memory)) // dtype.itemsize)

    return make


def _descriptor_like(x: Any) -> Make:
    kind, rest = type(x), {name: value for name, value in vars(x).items() if name != "base"}

    def make(_: Tensor, address: int) -> Any:
        # Its own constructor would check again what holds for all calls of these sizes.
        descriptor = object.__new__(kind)
        vars(descriptor).update(rest, base=SimpleNamespace(data_ptr=partial(int, address)))
        return descriptor

    return make
