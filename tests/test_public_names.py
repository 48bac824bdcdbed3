"""What signatures of the public surface mention, users can import from it, but for what kernels alone read."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import blocksparse as bs
import blocksparse.observe
import blocksparse.testing
import blocksparse.tools.tune

MODULES = [bs, bs.observe, bs.testing, bs.tools.tune]


def public(module: ModuleType) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if not (name.startswith("_") or inspect.ismodule(x))}


ONLY_FOR_TYPES = {"FlexBlockMask": object}  # imported by type checkers alone
OFFERED = {
    f"{x.__module__}.{x.__qualname__}" for module in MODULES for x in public(module).values() if inspect.isclass(x)
}


def functions(thing: Any) -> Iterator[Any]:
    """A function, or the public methods and properties of a class with what makes an instance."""
    if inspect.isfunction(thing):
        yield thing
    elif inspect.isclass(thing):
        for base in (x for x in thing.__mro__ if x.__module__.startswith("blocksparse")):
            for name, x in vars(base).items():
                if not name.startswith("_") or name in ("__init__", "__call__"):
                    x = getattr(x, "fget", None) or getattr(x, "func", None) or getattr(x, "__func__", x)
                    if inspect.isfunction(x):
                        yield x


def mentioned(thing: Any) -> set[str]:
    # attrs writes `__init__` in a module of its own, with the names that the class and its converters know.
    homes = [x.__module__ for x in (thing.__mro__ if inspect.isclass(thing) else ())]
    modules = [x for name, x in sys.modules.items() if name.startswith("blocksparse.")]
    known = {
        name: x
        for each in (*modules, *(sys.modules[x] for x in reversed(homes)))
        for name, x in vars(each).items()
    }
    known |= ONLY_FOR_TYPES
    hints = (typing.get_type_hints(each, known | each.__globals__).values() for each in functions(thing))
    written = (f"{hint!r} {getattr(hint, '__bound__', None)!r}" for some in hints for hint in some)
    return {name for text in written for name in re.findall(r"\bblocksparse(?:\.\w+)+", text)}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_signatures_mention_what_can_be_imported(module: ModuleType) -> None:
    missing = {
        f"{name} mentions {each}"
        for name, x in public(module).items()
        for each in mentioned(x) - OFFERED
        if not ("._" in each or ".kernels." in each)
    }
    assert not missing, "\n".join(sorted(missing))


def test_all_names_are_listed() -> None:
    assert sorted(bs.__all__) == sorted(public(bs))
