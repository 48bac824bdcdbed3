"""What arguments must be. A rule refuses a value in one sentence, by the name that the user wrote."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeGuard, final

from attrs import Attribute, frozen
from torch import Tensor

MAX_BLOCK = 16384  # tokens; what has room for whole blocks then stays small, however short the prompt is


@final
@frozen(eq=False)
class Rule:
    """A validator of attrs fields, and by `check` of arguments of a function.

    Args:
        what: what a value must be, as the end of a sentence.
        is_kind: whether a value is of the right kind; otherwise a `TypeError` is raised.
        holds: whether a value of the right kind is a right one; otherwise a `ValueError` is raised.
    """

    what: str
    is_kind: Callable[[Any], bool]
    holds: Callable[[Any], bool] = lambda _: True

    def __call__(self, _: object, attribute: Attribute[Any], value: object) -> None:
        self.check(**{attribute.name: value})

    def check(self, **named: object) -> None:
        """Raise unless all these values, by name, are what they must be."""
        for name, value in named.items():
            if not self.is_kind(value):
                raise TypeError(f"'{name}' must be {self.what}: {shown(value)}")
            if not self.holds(value):
                raise ValueError(f"'{name}' must be {self.what}: {shown(value)}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of Python's or numpy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole(value: int) -> int:
    """Converter: whole numbers become Python's, and what is none stays as it is, for a rule to refuse."""
    return int(value) if is_whole(value) else value


size = Rule("a whole number, at least 1", is_whole, lambda x: x >= 1)
count = Rule("a whole number, at least 0", is_whole, lambda x: x >= 0)
block_size = Rule(f"a whole number from 1 to {MAX_BLOCK}", is_whole, lambda x: 1 <= x <= MAX_BLOCK)
hash_seed = Rule("a whole number from 0 to 2**32 - 1", is_whole, lambda x: 0 <= x < 2**32)
flag = Rule("True or False", lambda x: isinstance(x, bool))


def one_of(*options: str | int) -> Rule:
    """One of these values, which are of one type."""
    kind, (*before, last) = type(options[0]), map(repr, options)
    return Rule(
        f"{', '.join(before)} or {last}",
        is_whole if kind is int else lambda x: isinstance(x, kind),
        lambda x: x in options,
    )


def a(*roles: type) -> Rule:
    """An instance of one of these classes."""
    names = (f"{'an' if role.__name__[0] in 'AEIOU' else 'a'} {role.__name__}" for role in roles)
    return Rule(" or ".join(names), lambda x: isinstance(x, roles))


def optional(rule: Rule) -> Rule:
    """The rule, or None."""
    return Rule(
        f"{rule.what}, or None", lambda x: x is None or rule.is_kind(x), lambda x: x is None or rule.holds(x)
    )


def multiple(name: str, value: int | None, of: str, size: int) -> None:
    """Raise a `ValueError` unless the argument `name`, if there is one, is a multiple of the argument `of`."""
    if value is not None and whole(value) % whole(size):
        raise ValueError(f"'{name}' must be a multiple of '{of}' ({size}): {shown(value)}")


def shown(value: object) -> str:
    """A value on one short line."""
    if isinstance(value, Tensor):
        grad = " that requires grad (detach it)" if value.requires_grad else ""
        return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}{grad}"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python prints no whole number of more than 4300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
