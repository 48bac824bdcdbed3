"""What stages are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs


def arguments(stage: object) -> dict[str, Any]:
    """The values from which a stage, or a pipeline, was made, by the names of its arguments."""
    cls: Any = type(stage)
    return (
        {each.alias: getattr(stage, each.name) for each in attrs.fields(cls) if each.init}
        if attrs.has(cls)
        else {}
    )


def all_in(stage: object) -> Iterator[object]:
    """A pipeline or a stage, and every object inside it."""
    yield stage
    for part in arguments(stage).values():
        yield from all_in(part)
