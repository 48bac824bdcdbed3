"""Many cases in one test: where each is over in a moment, a test for each would mostly be pytest's work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

Test = Callable[..., None]


def each(name: str, values: Iterable[Any], shown: Callable[[Any], str] = str) -> Callable[[Test], Test]:
    """A test goes through all `values` of an argument; a failure names the cases that fail. One may be skipped.

    Other arguments are pytest's, and the same in all cases: none may change what the next case meets.
    """
    cases = tuple(values)
    assert cases, f"a test without any {name} cannot fail"

    def over(test: Test) -> Test:
        @functools.wraps(test)
        def through_all(**given: Any) -> None:
            failed: list[tuple[str, Exception]] = []
            skipped: list[pytest.skip.Exception] = []
            for value in cases:
                torch.manual_seed(0)  # as for a test of its own
                try:
                    test(**given, **{name: value})
                except pytest.skip.Exception as why:
                    skipped.append(why)
                except Exception as error:
                    failed.append((shown(value), error))
            if failed:
                first, error = failed[0]
                error.add_note(f"{name} = {first} fails, and of {len(cases)} cases in all these too:")
                error.add_note(", ".join(which for which, _ in failed[1:21]) or "none")
                raise error
            if len(skipped) == len(cases):
                raise skipped[0]

        signature = inspect.signature(test)
        rest = [x for x in signature.parameters.values() if x.name != name]
        through_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return through_all

    return over
