"""Where the queries of a call may be cut, as stages say it of themselves."""

from __future__ import annotations

from math import lcm
from typing import Protocol


class Cut(Protocol):
    """A stage."""

    def alignment(self, causal: bool) -> int:
        """How many tokens the ends of parts of the queries must be a multiple of."""


def unknown(stage: object) -> ValueError:
    """The error of a stage that does not say where queries may be cut."""
    name = type(stage).__name__
    return ValueError(f"{name} does not say where queries may be cut, as a method 'alignment' of {name} would")


def of_parts(causal: bool, *stages: Cut) -> int:
    """The alignment of stages together.

    Raises:
        ValueError: as of one of them.
    """
    return lcm(*(stage.alignment(causal) for stage in stages))


def by_position(stage: object, causal: bool) -> int:
    """The alignment of a rule that asks where queries stand.

    Raises:
        ValueError: the call is not causal.
    """
    if not causal:
        raise ValueError(
            f"'{type(stage).__name__}' asks where queries stand, which a part of a call that is not causal forgets"
        )
    return 1
