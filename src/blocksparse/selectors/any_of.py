"""Keep what any of several rules of position keeps, in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, final

from attrs import Attribute, field, frozen
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.selectors.places import NOWHERE, Places
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.validators import shown


def _to_tuple(rules: Iterable[PositionSelector]) -> Sequence[PositionSelector]:
    return tuple(rules) if isinstance(rules, Iterable) else rules


@final
@frozen(eq=False)
class AnyOf(PositionSelector):
    """The rules as one: `AnyOf([Band(256), Sink(32)])` keeps what `Band(256) | Sink(32)` does, in fewer launches.

    `OnTiles` takes it, as any rule of position.
    """

    rules: Sequence[PositionSelector] = field(converter=_to_tuple)

    @rules.validator
    def _are_of_position(self, _: Attribute[Any], rules: object) -> None:
        if not isinstance(rules, tuple) or not all(isinstance(rule, PositionSelector) for rule in rules):
            raise TypeError(f"'rules' must hold rules of position, as Band(256) is one: {shown(rules)}")
        if not rules:
            raise ValueError("'rules' must hold at least one rule of position: ()")

    def where(self, grid: Grid) -> Tensor:
        return reduce(or_, (rule.where(grid) for rule in self.rules))

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        places: Places = NOWHERE
        others: list[PositionSelector] = []
        for rule in self.rules:
            added, rest = rule.parts()
            both = places.joined(added)
            if both is None:
                others.append(rule)
            else:
                places, others = both, [*others, *rest]
        return places, tuple(others)
