"""Options that are one number for all query heads, or one number for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, final
from weakref import ref

import torch
from attrs import fields, has
from torch import Tensor

from blocksparse.check.validators import Rule, is_real, is_whole, whole
from blocksparse.launch.torch_private import has_tangent

WHOLE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@final
class HeadValues:
    """One number for each query head, `[Hq]` float64, copied to each device once. Equal if the numbers are.

    Only the first call on a device copies the values there, because the host waits for a copy, and a CUDA graph
    cannot hold one.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values.detach().clone()  # later writes to the caller's tensor change nothing
        self._copies = {values.device: self.values}
        self.numbers = tuple(self.values.tolist())
        self._hash = hash(self.numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadValues) and self.numbers == other.numbers

    def __hash__(self) -> int:
        return self._hash

    def on(self, device: torch.device) -> Tensor:
        """The values on a device."""
        if device not in self._copies:
            self._copies[device] = self.values.to(device)
        return self._copies[device]

    def __repr__(self) -> str:
        return f"[{', '.join(map(written, self.values.tolist()))}]"

    def __reduce__(self) -> tuple[type[HeadValues], tuple[Tensor]]:
        return HeadValues, (self.values,)


_READ: dict[int, tuple[ref[Tensor], tuple[int, int], HeadValues]] = {}
_MOST_READ = 256


def read(x: Tensor) -> HeadValues:
    """The numbers of a tensor `[Hq]` of a layer on a GPU, for which the host waits in the first call only.

    They are read again for another tensor or other memory, or if the tensor's version shows that an op wrote to
    it. Tensors made in `torch.inference_mode` have no version, and are read in each call.
    """
    if x.is_inference():
        return HeadValues(x.to("cpu", torch.float64))
    now = x.data_ptr(), x._version
    known = _READ.get(id(x))
    if known is not None and known[0]() is x and known[1] == now:
        return known[2]
    if len(_READ) >= _MOST_READ:
        _READ.clear()
    values = HeadValues(x.detach().to("cpu", torch.float64))
    _READ[id(x)] = ref(x), now, values
    return values


def read_again() -> None:
    """Let `read` read every tensor that comes next, whatever its version says."""
    _READ.clear()


def read_changed_again(tensors: Sequence[Tensor]) -> None:
    """Let `read` read those of these tensors that hold other numbers by now, whatever their versions say.

    The host waits once for all of them, and not at all for tensors that `read` has not read.
    """
    known = [(x, found[2].numbers) for x in tensors if (found := _READ.get(id(x))) is not None]
    if known:
        now = torch.cat([x.detach().to(torch.float64) for x, _ in known]).cpu()
        for (x, before), numbers in zip(known, now.split([len(x) for x, _ in known]), strict=True):
            if tuple(numbers.tolist()) != before:
                del _READ[id(x)]


PerHead = float | HeadValues
"""One number for all query heads, or one for each."""


def per_head(value: float | Sequence[float] | Tensor | HeadValues) -> PerHead:
    """Converter: a number becomes a Python number, and a sequence or a tensor `[Hq]` of numbers `HeadValues`.

    Any other value stays as it is, for a rule to refuse.
    """
    found: Any = _number(value)
    if found is None and isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        entries = [_number(entry) for entry in value]
        if entries and None not in entries:
            found = HeadValues(torch.tensor(entries, dtype=torch.float64, device="cpu"))
    elif found is None and isinstance(value, Tensor) and value.ndim == 1 and len(value) and is_plain(value):
        found = HeadValues(value.to(torch.float64))
    return value if found is None else found  # type: ignore[return-value]


def maybe_per_head(value: float | Sequence[float] | Tensor | HeadValues | None) -> PerHead | None:
    """Converter: `per_head`, and None stays None."""
    return None if value is None else per_head(value)


def _number(value: Any) -> float | None:
    """A real number as a Python `int` or `float`; None for any other value."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and value.ndim == 0 and is_plain(value):
        value = value.item()
    if not is_real(value):
        return None
    try:
        return whole(value) if is_whole(value) and abs(value) <= 2**53 else float(value)
    except OverflowError:
        return None


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is dense and not on "meta", holds real numbers, and is not differentiated."""
    real = x.dtype.is_floating_point or x.dtype in WHOLE_DTYPES
    waits = x.requires_grad and torch.is_grad_enabled()
    if not torch.compiler.is_compiling():
        waits = waits or has_tangent(x)
    return real and not waits and x.layout is torch.strided and not x.is_meta


def may_be_numbers(value: Any) -> bool:
    """Whether it is None, or `per_head` may make a number or `HeadValues` of it, as far as a graph can tell."""
    if isinstance(value, Tensor):
        return is_plain(value)
    if isinstance(value, list | tuple):
        return all(not isinstance(entry, list | tuple) and may_be_numbers(entry) for entry in value)
    return value is None or (isinstance(value, HeadValues | Real) and not isinstance(value, bool))


def numbers(what: str, holds: Callable[[Tensor], Tensor]) -> Rule:
    """A rule for a number, or one per query head, of which `holds` must be true; `holds` must be false for NaN."""

    @lru_cache(maxsize=256)  # pipelines are made again for each call with the same few numbers
    def holds_for_number(value: float) -> bool:
        return bool(holds(torch.tensor(value, dtype=torch.float64, device="cpu")))

    # A field is asked for what `per_head` has already made; a function's argument may be anything.
    def is_kind(value: Any) -> bool:
        if type(value) is float:
            return True
        return isinstance(per_head(value), int | float | HeadValues) and not isinstance(value, bool)

    def holds_for_all(value: Any) -> bool:
        found = value if type(value) is float else per_head(value)
        # An `int` as large as this was too large for a float, or `per_head` would have made it one.
        if isinstance(found, int) and abs(found) > 2**53:
            return False
        # The CPU is named because the default device may be another one, "meta" while a model is built.
        if isinstance(found, HeadValues):
            return bool(holds(found.values.to("cpu", torch.float64)).all())
        return holds_for_number(found)

    return Rule(f"{what}, or one per query head", is_kind, holds_for_all)


any_number = numbers("a number that fp64 can hold, not NaN", lambda x: ~x.isnan())
finite = numbers("a finite number", lambda x: x.float().isfinite())
share = numbers("a number in (0, 1]", lambda x: (x > 0) & (x <= 1))
probability = numbers("a number in [0, 1]", lambda x: (x >= 0) & (x <= 1))
cosine = numbers("a number in [-1, 1]", lambda x: (x >= -1) & (x <= 1))
at_least_0 = numbers("a number, at least 0", lambda x: x >= 0)
positive = numbers("a finite number greater than 0", lambda x: (x.float() > 0) & x.float().isfinite())
negative = numbers("a finite number below 0", lambda x: (x < 0) & x.float().isfinite())
budget = numbers("a whole number, at least 1", lambda x: (x >= 1) & (x == x.floor()) & x.isfinite())


def written(value: object) -> str:
    """The repr of a value as a Python expression; the plain repr `inf` of an infinity is not one."""
    return f"float('{value}')" if value in (float("inf"), float("-inf")) else repr(value)


def over_blocks(value: PerHead, scores: Tensor) -> Tensor:
    """The value as a float64 tensor that broadcasts against `scores` `[B, Hq, rows, cols]`."""
    if not isinstance(value, HeadValues):
        return _numbers(value, 1, torch.float64, scores).view(1, 1, 1, 1)
    entries = value.on(scores.device)
    if entries.shape[0] != scores.shape[1]:
        raise ValueError(
            f"a per-head value needs one entry per query head ({scores.shape[1]}): {entries.shape[0]}. Give one "
            "number per query head, or one for all."
        )
    return entries.reshape(1, -1, 1, 1)


def least(value: PerHead) -> float:
    """The least number of all heads."""
    return min(value.numbers) if isinstance(value, HeadValues) else value


def number_or_blocks(value: PerHead, scores: Tensor) -> float | Tensor:
    """`over_blocks` of a number per head; one number for all stays a number, which costs no launch to pass on."""
    return over_blocks(value, scores) if isinstance(value, HeadValues) else value


def by_head(value: PerHead, q: Tensor) -> Tensor:
    """The value as fp32 `[Hq]` on the device of `q` `[B, Hq, M, D]`."""
    if not isinstance(value, HeadValues):
        # PyTorch refuses to fill fp32 with what it cannot hold; numbers of a tensor become infinite instead.
        value = value if abs(value) <= torch.finfo(torch.float32).max else math.copysign(math.inf, value)
    return _numbers(value, q.shape[1], torch.float32, q)


def _numbers(value: PerHead, heads: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The value for so many heads on the device of `like`; the first call leaves it for later ones."""
    captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
    make = _new_numbers if captured or type(like) is not Tensor else _kept_numbers
    return make(value, heads, dtype, like.device)


def _new_numbers(value: PerHead, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, HeadValues):
        return value.on(device).to(dtype)
    return torch.full((heads,), value, dtype=dtype, device=device)


@lru_cache(maxsize=1024)
def _kept_numbers(value: PerHead, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # From the CPU, for which the host waits: the next call may be on another stream.
    return _new_numbers(value, heads, dtype, torch.device("cpu")).to(device)


def wrong_heads(name: str, value: PerHead | None, heads: int) -> list[str]:
    """A list with the reason why a value does not fit `heads` query heads; empty if it fits."""
    if not isinstance(value, HeadValues) or len(value.values) == heads:
        return []
    return [f"'{name}' has {len(value.values)} entries for {heads} query heads"]


def check_heads(stage: object, heads: int) -> None:
    """Refuse numbers per query head, of a stage or of one inside of it, that are not for so many heads."""
    kind: Any = type(stage)
    for each in fields(kind) if has(kind) else ():
        value = getattr(stage, each.name)
        for reason in wrong_heads(each.alias or each.name, value, heads):
            raise ValueError(f"{type(stage).__name__}: {reason}. Give one number per query head, or one for all.")
        if each.init:
            check_heads(value, heads)
