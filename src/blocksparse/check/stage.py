"""What stages declare in their classes: the types that they take and give, and where queries may be cut.

The types are the type parameters of a role, in the first line of a class. `class TopCdf(Selector[BlockMass,
BlockMask])` needs a `BlockMass` and gives a `BlockMask`. Type checkers such as mypy check these types before
anything runs. A pipeline checks them when it is made, and checks the values when it is called.
"""

from __future__ import annotations

import operator
from functools import cache, reduce
from math import lcm
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin

import attrs


class Declared(NamedTuple):
    """A type (or a union of types, any of which will do) and the class of the stage that declares it."""

    stage: type
    value: type | UnionType


def declared(stage: object, role: type, index: int) -> tuple[Declared, ...]:
    """The types that `stage` declares as type parameter number `index` of `role`; values must be of all of them.

    A wrapper may leave the type open: `Ranked(inner)` needs what `inner` needs. Then the types are those that the
    stages in its fields declare. The result is empty if nothing is declared, and then there is nothing to check.
    """
    cls: type = type(stage)
    said = _said(cls, role, index)
    if not isinstance(said, TypeVar):
        return () if said is None else (Declared(cls, said),)
    return tuple(each for part in parts_of(stage, role) for each in declared(part, role, index))


def parts_of(stage: object, role: type) -> list[Any]:
    """The stages of a role that a stage holds in its fields."""
    kind: type = type(stage)
    return [part for name in _fields(kind) if isinstance(part := getattr(stage, name), role)]


@cache  # calls of pipelines ask
def _fields(kind: Any) -> tuple[str, ...]:
    # A stage may be a dataclass, which holds none of ours.
    return tuple(each.name for each in attrs.fields(kind)) if attrs.has(kind) else ()


@cache
def _said(cls: type, role: type, index: int) -> type | UnionType | TypeVar | None:
    """Type parameter number `index` of `role` in the nearest class that gives it, or as a subclass fills it in."""
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        parent: Any = get_origin(base) or base
        given = get_args(base)
        said = None
        if parent is role:
            said = _asked(given[index]) if given else None
        elif role in getattr(parent, "__mro__", ()):
            said = _said(parent, role, index)
            parameters = getattr(parent, "__parameters__", ())
            # Without arguments the variable stays open, and `declared` looks at the fields of the stage.
            if given and said in parameters:
                said = _asked(given[parameters.index(said)])
        if said is not None:
            return said
    return None


def _asked(said: Any) -> type | UnionType | TypeVar | None:
    """A type parameter in a form that `isinstance` takes; None for `Any`, which restricts nothing."""
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
    """Refuse a stage that does not take what another stage gives, by what both declare."""
    for need in needed:
        if given and not any(all(issubclass(one, need.value) for one in _each(gift.value)) for gift in given):
            raise TypeError(
                f"{need.stage.__name__} needs {a_name(need.value)}, and {given[-1].stage.__name__} gives "
                f"{a_name(given[-1].value)}{_meaning(need.value)}"
            )


def check_got(taker: object, role: type, index: int, value: object) -> None:
    """Refuse a value that the stage `taker` does not take as type parameter number `index` of its `role`."""
    cls: type = type(taker)
    said = _said(cls, role, index)
    if isinstance(said, type) and isinstance(value, said):  # a fast way out, as this runs in every call
        return
    for stage, need in declared(taker, role, index):
        if not isinstance(value, need):
            raise TypeError(
                f"{stage.__name__} needs {a_name(need)}, and got {a_name(type(value))}{_meaning(need)}"
            )


def check_gave(promised: tuple[Declared, ...], value: object) -> None:
    """Refuse a value if it is not of the types that the stage which gave it has promised."""
    for stage, promise in promised:
        if not isinstance(value, promise):
            raise TypeError(
                f"{stage.__name__} must give {a_name(promise)}, and gave {a_name(type(value))}. "
                "Correct its declaration or its result."
            )


def _each(value: type | UnionType) -> tuple[type, ...]:
    return get_args(value) or (value,)


def a_name(value: type | UnionType) -> str:
    names = (one.__name__ for one in _each(value))
    return " or ".join(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}" for name in names)


def _meaning(value: type | UnionType) -> str:
    """The first line of the docstring of a type, as the end of an error message; empty if there is none."""
    lines = (value.__doc__ or "").strip().splitlines()
    if not lines or not isinstance(value, type):
        return ""
    line = lines[0].rstrip(".")
    return f": {a_name(value)} is {line[:1].lower()}{line[1:]}"


class Stage:
    """One of the first three stages, which choose the blocks of a call.

    Attributes:
        replayable: whether calls on a GPU may be replayed without the Python of this stage, as `Pipeline` says. It
            is for stages of users. True promises three things. The class is a frozen one of attrs. Its Python
            looks at no contents of tensors. It launches only PyTorch's functions, none compiled by torch.compile,
            and kernels of this library. It makes all its tensors from those that it gets, by these functions. A
            stage that takes one from elsewhere, `torch.tensor` included, or draws random numbers, runs in each
            call.
        by_row: whether a call may be cut anywhere: each row chooses by itself. Or why it may not, in words that
            follow the name of the class.
    """

    replayable: ClassVar[bool] = False
    by_row: ClassVar[bool | str] = False

    def alignment(self, causal: bool) -> int:
        """Number of tokens at whose multiples a call may be cut, so that each part chooses as the whole call.

        A part of a causal call has the keys up to its own end, and gets the number of tokens that follow as
        `remaining`. A part of another call has all keys. Schemes of `distributed` cut calls so.

        Raises:
            ValueError: a part may choose otherwise. The message has the reason, if the stage defines one.
        """
        name = type(self).__name__
        if self.by_row is True:
            return 1
        if self.by_row:
            raise ValueError(f"'{name}' {self.by_row}")
        raise ValueError(
            f"{name} does not say where queries may be cut, as a method 'alignment' of {name} would. Define it."
        )


def of_parts(causal: bool, *stages: Stage) -> int:
    """The alignment of stages together."""
    return lcm(*(stage.alignment(causal) for stage in stages))


def by_position(stage: object, causal: bool) -> int:
    """The alignment of a rule that asks where queries stand."""
    if not causal:
        raise ValueError(
            f"'{type(stage).__name__}' needs the positions of queries, and a part of a call that is not causal "
            "does not know them. Call with causal=True."
        )
    return 1
