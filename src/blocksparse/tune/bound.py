"""A bound for what tuning may lose."""

from __future__ import annotations

from attrs import Attribute

from blocksparse.checks.validators import shown
from blocksparse.plans.errors import TuneError


def above_0(_: object, attribute: Attribute[float], value: object) -> None:
    """Refuse anything but a finite number above 0, for a field of attrs.

    Raises:
        TuneError: `value` is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise TuneError(f"'{attribute.name}' must be a number above 0: {shown(value)}")
