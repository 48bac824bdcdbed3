"""Many cases in one test: a failure names the case that it happened in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """What fails inside says `what` it was tried with."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {', '.join(map(str, what))}")
        raise
