"""Rules for arguments. An error names the user's argument, the rule and the value, and then the fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import FunctionType
from typing import Any, TypeGuard, final

import torch
from attrs import Attribute, evolve, frozen
from torch import Tensor

from blocksparse.launch.torch_private import has_tangent


class UserError(Exception):
    """The command cannot run as asked; the message says why and what to do."""


MAX_BLOCK = 16384  # tokens; buffers are padded to whole blocks, and this bounds them for short prompts


@final
@frozen(eq=False)
class Rule:
    """A validator of attrs fields; its method `check` does the same for the arguments of a function.

    Args:
        what: what a value must be. The error says "'name' must be {what}".
        is_kind: whether a value has the right type. If not, a `TypeError` is raised.
        holds: whether a value of the right type is allowed. If not, a `ValueError` is raised. All are if None.
        hint: what to do about a wrong value, where that is not obvious. It ends the error.
        or_none: whether None passes as well.
    """

    what: str
    is_kind: Callable[[Any], bool]
    holds: Callable[[Any], bool] | None = None
    hint: str = ""
    or_none: bool = False

    def __call__(self, _: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and self.or_none:  # `passes`, without a call
            return
        if not (self.is_kind(value) and (self.holds is None or self.holds(value))):
            self.check(**{attribute.name: value})

    def passes(self, value: object) -> bool:
        """Whether a value is allowed."""
        if value is None and self.or_none:
            return True
        return self.is_kind(value) and (self.holds is None or self.holds(value))

    def check(self, **named: object) -> None:
        """Raise unless every one of these named values passes the rule."""
        for name, value in named.items():
            if value is None and self.or_none:
                continue
            if not self.is_kind(value):
                raise TypeError(f"'{name}' must be {self.what}: {shown(value)}{self.hint}")
            if self.holds is not None and not self.holds(value):
                raise ValueError(f"'{name}' must be {self.what}: {shown(value)}{self.hint}")

    def or_else(self, hint: str) -> Rule:
        """The same rule, whose error ends with what to do."""
        return evolve(self, hint=f". {hint}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of Python or numpy, bools excluded."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_real(value: object) -> bool:
    """Whether a value is a real number of Python or numpy, bools excluded."""
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def whole(value: int) -> int:
    """Converter: a whole number becomes a Python `int`; any other value stays as it is, for a rule to refuse."""
    return int(value) if type(value) is not int and is_whole(value) else value


def maybe_whole(value: int | None) -> int | None:
    """Converter: `whole`, and None stays None."""
    return None if value is None else whole(value)


def real(value: float) -> float:
    """Converter: a real number becomes a Python `int` or `float`; any other value stays as it is."""
    if is_whole(value):
        return int(value)
    return float(value) if is_real(value) else value


size = Rule("a whole number, at least 1", is_whole, lambda x: x >= 1)
count = Rule("a whole number, at least 0", is_whole, lambda x: x >= 0)
block_size = Rule(f"a whole number from 1 to {MAX_BLOCK}", is_whole, lambda x: 1 <= x <= MAX_BLOCK)
hash_seed = Rule("a whole number from 0 to 2**32 - 1", is_whole, lambda x: 0 <= x < 2**32)
positive = Rule("a finite number above 0", is_real, lambda x: 0 < x < float("inf"))
flag = Rule("True or False", lambda x: isinstance(x, bool))


def one_of(*options: str | int) -> Rule:
    """A rule for values that must be one of `options`, which all have one type."""
    kind, (*before, last) = type(options[0]), map(repr, options)
    return Rule(
        f"{', '.join(before)} or {last}",
        is_whole if kind is int else lambda x: isinstance(x, kind),
        lambda x: x in options,
    )


def a(*roles: type) -> Rule:
    """A rule for values that must be instances of one of these classes."""
    names = (f"{'an' if role.__name__[0] in 'AEIOU' else 'a'} {role.__name__}" for role in roles)
    return Rule(" or ".join(names), lambda x: isinstance(x, roles))


def optional(rule: Rule) -> Rule:
    """A rule that also lets None pass."""
    return evolve(rule, what=f"{rule.what}, or None", or_none=True)


def numbers_on_host(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """Whole numbers as a list; the host waits if they are on a GPU."""
    if isinstance(values, Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"'{name}' must be whole numbers along one axis: {shown(values)}. Flatten it.")
        found: list[int] = values.tolist()
        return found
    if not isinstance(values, Sequence) or not all(map(is_whole, values)):
        raise TypeError(
            f"'{name}' must be a sequence of whole numbers, or a tensor of them: {shown(values)}. "
            "Give [4, 8], say."
        )
    return [whole(value) for value in values]


def multiple(name: str, value: int | None, of: str, size: int) -> None:
    """Raise a `ValueError` unless argument `name` is None or a multiple of argument `of` (which is `size`)."""
    if value is not None and whole(value) % whole(size):
        raise ValueError(f"'{name}' must be a multiple of '{of}' ({size}): {shown(value)}")


def shown(value: object) -> str:
    """A value as text for an error message: one line of at most 80 characters."""
    if isinstance(value, Tensor):
        grad = " that requires grad (detach it)" if value.requires_grad else ""
        if not torch.compiler.is_compiling() and has_tangent(value):
            grad = " that has a tangent (detach it)"
        return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}{grad}"
    if isinstance(value, FunctionType | type):  # a stage or a preset whose parentheses were forgotten
        return f"{value.__name__} itself; call it: {value.__name__}()"
    if torch.compiler.is_compiling() and isinstance(value, int | float):  # a symbol perhaps, which has no repr
        return f"a value of type {type(value).__name__}"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to print a whole number of more than 4300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
