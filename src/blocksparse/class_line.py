"""What a stage's class line says that it needs and gives, for those who compose without a type checker.

`class TopCdf(Selector[BlockMass, BlockMask])` needs a `BlockMass` and gives a `BlockMask`. mypy reads that line
before anything runs; a pipeline reads it when it is made, and then holds each stage to it.
"""

from __future__ import annotations

import operator
from functools import cache, reduce
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import attrs


class Declared(NamedTuple):
    """A type, or several of which any will do, and the stage whose class line names it."""

    stage: object
    value: type | UnionType


def declared(stage: object, role: type, place: int) -> tuple[Declared, ...]:
    """What `stage` declares in place `place` of the type parameters of `role`; all of it holds.

    Where a wrapper leaves the type open (`Ranked(inner)` needs what `inner` needs), its parts are asked. Empty
    where nothing is declared: such a stage is not checked before it runs.
    """
    cls: type = type(stage)
    said = _said(cls, role, place)
    if not isinstance(said, TypeVar):
        return () if said is None else (Declared(stage, said),)
    parts = [getattr(stage, attribute.name) for attribute in attrs.fields(cls)] if attrs.has(cls) else []
    return tuple(each for part in parts if isinstance(part, role) for each in declared(part, role, place))


@cache
def _said(cls: type, role: type, place: int) -> type | UnionType | TypeVar | None:
    """What the nearest class line that names `role` has in a place, with what later ones put for its variables."""
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        parent: Any = get_origin(base) or base
        given = get_args(base)
        said = None
        if parent is role:
            said = _asked(given[place]) if given else None
        elif role in getattr(parent, "__mro__", ()):
            said = _said(parent, role, place)
            parameters = getattr(parent, "__parameters__", ())
            # Without arguments a variable stays open, and the parts of the stage are asked.
            if given and said in parameters:
                said = _asked(given[parameters.index(said)])
        if said is not None:
            return said
    return None


def _asked(said: Any) -> type | UnionType | TypeVar | None:
    """A type of a class line as one that values can be asked for; None where it says nothing, as `Any` does."""
    if isinstance(said, TypeVar):
        return said
    origin = get_origin(said)
    if origin is Annotated:
        return _asked(get_args(said)[0])
    if origin in (Union, UnionType):
        parts = [_asked(part) for part in get_args(said)]
        return reduce(operator.or_, parts) if all(isinstance(part, type) for part in parts) else None
    said = origin or said
    return said if isinstance(said, type) and said is not Any else None


def check_takes(needed: tuple[Declared, ...], given: tuple[Declared, ...]) -> None:
    """Refuse a stage that does not take what another one gives.

    Raises:
        TypeError: says what is needed, and what is given.
    """
    for need in needed:
        if given and not any(all(issubclass(one, need.value) for one in _each(gift.value)) for gift in given):
            raise TypeError(
                f"{_name(need.stage)} needs {a_name(need.value)}, and {_name(given[-1].stage)} gives "
                f"{a_name(given[-1].value)}{_meaning(need.value)}"
            )


def check_got(taker: object, role: type, place: int, value: object) -> None:
    """Refuse a value that `taker` does not take.

    Raises:
        TypeError: says what is needed, and what it is.
    """
    cls: type = type(taker)
    said = _said(cls, role, place)
    if isinstance(said, type) and isinstance(value, said):  # every call comes here
        return
    for stage, need in declared(taker, role, place):
        if not isinstance(value, need):
            raise TypeError(f"{_name(stage)} needs {a_name(need)}, and got {a_name(type(value))}{_meaning(need)}")


def check_gave(promised: tuple[Declared, ...], value: object) -> None:
    """Refuse what a stage gave if it is not what its class line promises.

    Raises:
        TypeError: says what was promised, and what came.
    """
    for stage, promise in promised:
        if not isinstance(value, promise):
            raise TypeError(f"{_name(stage)} must give {a_name(promise)}, and gave {a_name(type(value))}")


def _name(stage: object) -> str:
    return type(stage).__name__


def _each(value: type | UnionType) -> tuple[type, ...]:
    return get_args(value) or (value,)


def a_name(value: type | UnionType) -> str:
    names = (one.__name__ for one in _each(value))
    return " or ".join(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}" for name in names)


def _meaning(value: type | UnionType) -> str:
    """What a value is, in the words of its docstring's first line; empty where it has none."""
    lines = (value.__doc__ or "").strip().splitlines()
    if not lines or not isinstance(value, type):
        return ""
    line = lines[0].rstrip(".")
    return f": {a_name(value)} is {line[:1].lower()}{line[1:]}"
