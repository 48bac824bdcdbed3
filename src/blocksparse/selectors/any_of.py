"""Keep what any of several rules of position keeps, in one go."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import final

from attrs import field, frozen, validators
from torch import Tensor

from blocksparse.kernels.within_reach import NOWHERE, Places
from blocksparse.scorers.grid import Grid
from blocksparse.selectors.position_selector import PositionSelector


def _to_tuple(rules: Iterable[PositionSelector]) -> tuple[PositionSelector, ...]:
    return tuple(rules)


@final
@frozen(eq=False)
class AnyOf(PositionSelector):
    """The rules as one: `AnyOf([Band(256), Sink(32)])` keeps what `Band(256) | Sink(32)` does, in fewer launches.

    `OnTiles` takes it, as any rule of position.
    """

    rules: tuple[PositionSelector, ...] = field(
        converter=_to_tuple,
        validator=[
            validators.min_len(1),
            validators.deep_iterable(validators.instance_of(PositionSelector)),
        ],
    )

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
