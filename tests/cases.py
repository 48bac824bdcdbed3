"""Many cases in one test: where each is over in a moment, a test for each would mostly be pytest's work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

Test = Callable[..., None]


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    """Rows of a table that the fast loop leaves out."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def each(name: str, values: Iterable[Any], shown: Callable[[Any], str] = str) -> Callable[[Test], Test]:
    """A test goes through all `values` of an argument; a failure names the cases that fail. One may be skipped.

    Other arguments are pytest's, and the same in all cases: none may change what the next case meets.
    """
    cases = tuple(values)
    assert cases, f"a test without any {name} cannot fail"

    def over(test: Test) -> Test:
        @functools.wraps(test)
        def through_all(**given: Any) -> None:
            _go_through(test, given, [({name: value}, shown(value)) for value in cases])

        return _without(through_all, test, name)

    return over


def each_of_group(*names: str, groups: Iterable[Any]) -> Callable[[Test], Test]:
    """A test for each of `groups`: `pytest.param`s of `{shown: values of the names}`, as `grouped` makes them."""

    def over(test: Test) -> Test:
        @pytest.mark.parametrize("group", groups)
        @functools.wraps(test)
        def through_all(group: dict[str, tuple[Any, ...]], **given: Any) -> None:
            _go_through(test, given, [(dict(zip(names, x, strict=True)), shown) for shown, x in group.items()])

        return _without(through_all, test, *names, also="group")

    return over


def grouped(
    cases: Iterable[tuple[tuple[Any, ...], str]], group: Callable[..., str], is_slow: Callable[..., bool]
) -> list[Any]:
    """Groups for `each_of_group`, of values and how they are shown; a group has slow cases alone, or none."""
    groups: dict[tuple[str, bool], dict[str, tuple[Any, ...]]] = {}
    for values, shown in cases:
        groups.setdefault((group(*values), is_slow(*values)), {})[shown] = values
    return [
        pytest.param(found, id=f"{name}-more" if slow else name, marks=[pytest.mark.slow] if slow else [])
        for (name, slow), found in groups.items()
    ]


def _go_through(test: Test, given: dict[str, Any], cases: list[tuple[dict[str, Any], str]]) -> None:
    failed: list[tuple[str, Exception]] = []
    skipped: list[BaseException] = []
    for values, shown in cases:
        torch.manual_seed(0)  # as for a test of its own
        try:
            test(**given, **values)
        except pytest.skip.Exception as why:
            skipped.append(why)
        except Exception as error:
            failed.append((shown, error))
    if failed:
        first, why_first = failed[0]
        why_first.add_note(f"the case {first} fails, and of {len(cases)} in all these too:")
        why_first.add_note(", ".join(which for which, _ in failed[1:21]) or "none")
        raise why_first
    if len(skipped) == len(cases):
        raise skipped[0]


def _without(through_all: Test, test: Test, *names: str, also: str | None = None) -> Test:
    """With the arguments that pytest has to give."""
    signature = inspect.signature(test)
    rest = [x for x in signature.parameters.values() if x.name not in names]
    if also is not None:
        rest.insert(0, inspect.Parameter(also, inspect.Parameter.POSITIONAL_OR_KEYWORD))
    through_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    return through_all
