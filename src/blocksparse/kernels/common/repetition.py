"""One call's operations on tensors, noted down and run again on other tensors of the same sizes.

What a pipeline does follows from the sizes, strides and dtypes of its inputs alone: which kernels it launches, on which
grids, with which arguments, on memory of which sizes. To decide this anew takes Python longer than a GPU takes for a short
prompt. So a call can be recorded: a `Recording` sees PyTorch's operations as a dispatch mode, and kernels tell it of their
launches (`noted`). A `Repetition` then makes the same operations in the same order, and nothing else.

Tensors are told apart by the memory under them. Each operation that gives new memory fills a slot. A tensor that an
operation takes is either memory of a slot, seen from some offset, or it was there before the call, as a weight was, and is
taken itself. So views need no step of their own. Launches are given addresses, so small memory that nothing but launches
uses is allocated in one piece.

A call cannot be repeated if Python decides by the contents of tensors, if it waits for the GPU, or if something computes
where no recording can see it; that says so itself (`refuse_repetition`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._ops import OpOverload  # no public name up to torch 2.13
from torch.utils._python_dispatch import TorchDispatchMode  # likewise
from torch.utils._pytree import tree_leaves  # likewise

# A call with more memory than this keeps a GPU busy for longer than Python takes; and a recording holds all of it at once.
_MOST_BYTES = 1 << 30
_SMALL = 1 << 22  # bytes up to which memory may be part of one allocation, and so be held until the call ends
_ALIGNED = 512  # bytes, to a multiple of which PyTorch allocates memory on a GPU; kernels rely on 16 of them
_UNREPEATABLE = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded,
}  # fmt: skip
_ALLOCATE = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}  # fmt: skip
# These make a tensor have other memory, which is no longer that of its slot.
_CHANGE_MEMORY = {torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_}

Values = list[Any]
"""The tensors in the slots."""
Hole = Callable[[Values], Any]
"""Makes an argument from the slots."""


class _Step(NamedTuple):
    """One operation: which arguments to fill in, where its results go, and which slots nobody needs after it."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    holes: tuple[tuple[int, Hole], ...]
    results: tuple[int, ...]
    unpack: bool
    done: tuple[int, ...] = ()


@final
class Repetition:
    """The operations of a recorded call. Called with tensors like the recorded ones, it gives what the call would give."""

    def __init__(self, steps: Sequence[_Step], slots: int, inputs: int, result: Hole) -> None:
        self._steps = tuple(steps)
        self._empty = (None,) * (slots - inputs)
        self._result = result

    def __call__(self, *inputs: Tensor) -> Any:
        values: Values = [*inputs, *self._empty]
        for run, arguments, holes, results, unpack, done in self._steps:
            if holes:
                filled = list(arguments)
                for at, hole in holes:
                    filled[at] = hole(values)
                found = run(*filled)
            else:
                found = run(*arguments)
            if results:
                if unpack:
                    for at, slot in enumerate(results):
                        values[slot] = found[at]
                else:
                    values[results[0]] = found
            filled = found = None
            for slot in done:  # memory is free as early as it can be, for nothing else holds it now
                values[slot] = None
        return self._result(values)


@final
class Recording(TorchDispatchMode):
    """Notes what a call does to these inputs, while it is entered.

    Args:
        sees: whether operations and launches are noted. If not, it is only told what refuses to be repeated.
    """

    def __init__(self, inputs: Sequence[Tensor], *, sees: bool = True) -> None:
        super().__init__()
        self.refused: str | None = None  # why the call cannot be repeated
        self.sees = sees
        self._inputs = len(inputs)
        self._device = inputs[0].device
        self._bytes = 0
        self._steps: list[_Step] = []
        self._used: list[set[int]] = []  # the slots that each step uses
        self._small: dict[int, int] = {}  # by slot that small memory fills, the step that allocates it
        self._as_tensors: set[int] = set()  # the slots of which somebody takes more than an address
        # All memory is held until the end, so that no address stands for two of them.
        self._held: list[Tensor] = list(inputs)
        self._slot_of: dict[int, int] = {}
        for slot, x in enumerate(inputs):
            self._slot_of.setdefault(_address(x), slot)

    def refuse(self, because: str) -> None:
        """Give up: nothing more is noted, and no memory is held."""
        self.refused = because
        self._steps.clear()
        self._used.clear()
        self._small.clear()
        self._held.clear()
        self._slot_of.clear()

    def repetition(self, result: Tensor | None) -> Repetition | None:
        """What repeats the call, which gave `result`; None if nothing can."""
        if self.refused is not None:
            return None
        give, used = self._hole(result, pointers=False)
        if result is not None and not used:  # it was there before the call
            return None
        self._allocate_together()
        last = {slot: at for at, slots in enumerate(self._used) for slot in slots}
        done: dict[int, list[int]] = {}
        for slot, at in last.items():
            if slot not in used:
                done.setdefault(at, []).append(slot)
        steps = [step._replace(done=tuple(done.get(at, ()))) for at, step in enumerate(self._steps)]
        return Repetition(steps, len(self._held) + 1, self._inputs, give if callable(give) else _nothing)

    def _allocate_together(self) -> None:
        """Replace the steps that allocate small memory, of which only addresses are taken, by one before all others."""
        steps = {at: slot for slot, at in self._small.items() if slot not in self._as_tensors}
        if len(steps) < 2:
            return
        first, places = 0, []
        for slot in steps.values():
            places.append(first)
            first += -(-self._held[slot].untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
        results = (len(self._held), *steps.values())  # the memory fills one more slot, which no step gives back
        kept = [at for at in range(len(self._steps)) if at not in steps]
        together = _Step(_allocate_small(first, places, self._device), (), (), results, unpack=True)
        self._steps = [together, *(self._steps[at] for at in kept)]
        self._used = [set(results[1:]), *(self._used[at] for at in kept)]

    def launched(self, run: Callable[..., object], arguments: tuple[Any, ...], *, pointers: bool) -> None:
        """Note a launch, `run(*arguments)`; with `pointers` a tensor may be given as the address of its first entry."""
        if self.sees and self.refused is None:
            self._add(run, arguments, (), unpack=False, pointers=pointers)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.sees and self.refused is None:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        taken = [_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        if not all(isinstance(x, Tensor) for x in outputs):
            if taken:  # a number that Python asked for
                self.refuse(f"Python asks for what {func} gives")
            return
        old = self._slot_of.keys() | taken
        new = [x for x in outputs if x.numel() and _address(x) not in old]
        if not new and not func._schema.is_mutable:
            return  # a view, or without entries
        self._bytes += sum(x.untyped_storage().nbytes() for x in new)
        first = len(self._held)
        if not all(_address(x) in self._slot_of for x in _written(func, args)):
            self.refuse(f"{func} may change what was there before the call")
        elif any(x.device != self._device for x in new) or self._bytes > _MOST_BYTES:
            self.refuse(f"{func} gives memory elsewhere, or too much")
        elif func.overloadpacket in _ALLOCATE:
            (x,) = new
            run: Callable[..., Any] = _allocate(tuple(x.shape), x.stride(), x.dtype, x.device)
            if x.untyped_storage().nbytes() <= _SMALL:
                self._small[first] = len(self._steps)
            self._add(run, (), (first,), unpack=False, pointers=False)
        elif (
            func.namespace != "aten"
            or func.overloadpacket in _CHANGE_MEMORY
            or _UNREPEATABLE & set(func.tags)
            or any(isinstance(x, Tensor) for x in kwargs.values())
            or 0 < len(new) < len(outputs)
        ):
            self.refuse(f"{func} cannot be noted")
        else:
            results = tuple(range(first, first + len(new)))
            run = _with_names(func, kwargs) if kwargs else func
            self._add(run, args, results, unpack=isinstance(out, tuple | list), pointers=False)
        if self.refused is None:
            for x in new:
                self._slot_of[_address(x)] = len(self._held)
                self._held.append(x)

    def _add(
        self,
        run: Callable[..., Any],
        arguments: Sequence[Any],
        results: tuple[int, ...],
        *,
        unpack: bool,
        pointers: bool,
    ) -> None:
        template: list[Any] = []
        holes: list[tuple[int, Hole]] = []
        used = set(results)
        for at, argument in enumerate(arguments):
            made, slots = self._hole(argument, pointers=pointers)
            if slots:
                holes.append((at, made))
                made = None
            template.append(made)
            used |= slots
        self._steps.append(_Step(run, tuple(template), tuple(holes), results, unpack))
        self._used.append(used)

    def _hole(self, x: Any, *, pointers: bool) -> tuple[Any, set[int]]:
        """What makes an argument, and the slots that it needs; the argument itself if it needs none."""
        if isinstance(x, Tensor):
            if not x.numel():  # a view without entries would keep all memory that it was taken from
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device), set()
            slot = self._slot_of.get(_address(x))
            return (x, set()) if slot is None else (self._seen(x, slot, pointers=pointers), {slot})
        if isinstance(x, tuple | list):
            parts = [self._hole(part, pointers=pointers) for part in x]
            used = set().union(*(slots for _, slots in parts))
            return (_sequence(getattr(x, "_make", type(x)), parts), used) if used else (x, used)
        if hasattr(x, "base") and hasattr(x, "block_shape"):  # a tensor descriptor, which says itself how to read
            base, used = self._hole(x.base, pointers=False)
            return (_descriptor(x, base), used) if used else (x, used)
        return x, set()

    def _seen(self, x: Tensor, slot: int, *, pointers: bool) -> Hole:
        """What makes `x`, whose memory is in a slot."""
        held = self._held[slot]
        if pointers:
            return _pointer(slot, x.data_ptr() - held.data_ptr())
        self._as_tensors.add(slot)
        if x.dtype != held.dtype:
            return _reread(slot, x.dtype, tuple(x.shape), x.stride(), x.data_ptr() - held.data_ptr())
        offset = x.storage_offset() - held.storage_offset()
        if offset == 0 and x.shape == held.shape and x.stride() == held.stride():
            return itemgetter(slot)
        return _view(slot, tuple(x.shape), x.stride(), offset)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


def is_recording() -> bool:
    """Whether a call is being recorded, or watched, in this thread."""
    return _recording.get() is not None


@contextmanager
def told(recording: Recording) -> Iterator[None]:
    """Launches and refusals go to this recording meanwhile."""
    before = _recording.set(recording)
    try:
        yield
    finally:
        _recording.reset(before)


@contextmanager
def unseen() -> Iterator[None]:
    """What PyTorch does meanwhile is part of a launch: Triton's interpreter reads and writes tensors by it."""
    if (recording := _recording.get()) is None:
        yield
        return
    before, recording.sees = recording.sees, False
    try:
        yield
    finally:
        recording.sees = before


def noted(run: Callable[..., object], arguments: tuple[Any, ...], *, pointers: bool) -> None:
    """Tell the recording, if there is one, of a launch: see `Recording.launched`."""
    if (recording := _recording.get()) is not None:
        recording.launched(run, arguments, pointers=pointers)


def refuse_repetition(because: str) -> None:
    """Tell the recording, if there is one, that something runs which it does not see, or must not leave out."""
    if (recording := _recording.get()) is not None:
        recording.refuse(because)


def _address(x: Tensor) -> int:
    """Where the memory under a tensor begins. That of a tensor without entries may be 0, as that of any other one."""
    return x.untyped_storage().data_ptr()


def _written(func: OpOverload, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The arguments that an operation writes to."""
    for x, declared in zip(args, func._schema.arguments, strict=False):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from (part for part in tree_leaves(x) if isinstance(part, Tensor) and part.numel())


def _allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


@final
class _Address:
    """Where memory begins, for launches that ask a slot for it as they ask a tensor."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _allocate_small(in_bytes: int, places: list[int], device: torch.device) -> Callable[[], list[Any]]:
    """Allocates `in_bytes` bytes, a multiple of 4, and gives this memory and the addresses of these places in it."""

    def allocate() -> list[Any]:
        memory = torch.empty(in_bytes // 4, dtype=torch.int32, device=device)
        begin = memory.data_ptr()
        return [memory, *[_Address(begin + place) for place in places]]

    return allocate


def _with_names(func: OpOverload, kwargs: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args: func(*args, **kwargs)


def _pointer(slot: int, offset: int) -> Hole:
    if not offset:
        return lambda values: values[slot].data_ptr()
    return lambda values: values[slot].data_ptr() + offset


def _view(slot: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Hole:
    def make(values: Values) -> Any:
        x = values[slot]
        return x.as_strided(shape, strides, x.storage_offset() + offset)

    return make


def _reread(
    slot: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], in_bytes: int
) -> Hole:
    """A view of the same memory as numbers of another dtype, whatever the sizes of both."""

    def make(values: Values) -> Any:
        x = values[slot]
        first = (x.storage_offset() * x.dtype.itemsize + in_bytes) // dtype.itemsize
        return x.new_empty(0, dtype=dtype).set_(x.untyped_storage(), first, shape, strides)

    return make


def _sequence(kind: Callable[[Any], Any], parts: list[tuple[Any, set[int]]]) -> Hole:
    return lambda values: kind([made(values) if slots else made for made, slots in parts])


def _descriptor(like: Any, base: Hole) -> Hole:
    kind = type(like)
    rest = {name: value for name, value in vars(like).items() if name != "base"}

    def make(values: Values) -> Any:
        # Its own constructor would check again what holds for all calls of these sizes.
        descriptor = object.__new__(kind)
        vars(descriptor).update(rest, base=base(values))
        return descriptor

    return make


def _nothing(values: Values) -> None:
    del values
