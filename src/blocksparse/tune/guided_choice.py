"""`GuidedChoice` chooses a plan, and runs the model with those candidates only that a plan might take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

from attrs import field, frozen

from blocksparse.tune.choice import Option, choose
from blocksparse.tune.guess import hoped_losses
from blocksparse.tune.unit import DENSE, Key, Unit

Losses = tuple[float, ...]
"""One for each budget."""

_WORTH = 0.01  # of the cost must be promised, or the model is not run again
_NOTHING = 1e-4  # of a budget; losses below are not told apart


@final
@frozen(eq=False)
class GuidedChoice:
    """The cheapest plan under budgets, when there are many candidates and running the model with each takes long.

    A plan is chosen as if guesses of losses were true. The model is run with those of its candidates that it was
    not run with, guesses are made anew, and so on, until they promise hardly more than what is known. What is
    chosen at last was measured.

    Args:
        dense: what dense attention costs in each unit.
        costs: of candidates in units. One that is missing here, or costs as much as dense attention, is not taken.
        errors: of attention, relative L1 distances from dense attention; at least of all that `costs` has.
        families: the preset of each candidate.
        run: runs the model with these candidates, each alone in its unit, and says what they lose.
    """

    dense: Mapping[Unit, float]
    costs: Mapping[Key, float]
    errors: Mapping[Key, float]
    families: Mapping[str, str]
    run: Callable[[Sequence[Key]], Mapping[Key, Losses]]
    _cheaper: dict[Unit, list[Key]] = field(init=False)  # than dense attention, by unit, the cheapest first
    _known: dict[Key, Losses] = field(factory=dict, init=False)

    @_cheaper.default
    def _cheaper_than_dense(self) -> dict[Unit, list[Key]]:
        some: dict[Unit, list[Key]] = {unit: [] for unit in self.dense}
        for key in sorted(self.costs, key=lambda key: (self.costs[key], self.errors[key])):
            # Where dense attention gives nothing but zeros, as in a pruned head, the error is NaN.
            if self.costs[key] < self.dense[key[0]] and math.isfinite(self.errors[key]):
                some[key[0]].append(key)
        return some

    def __call__(self, budgets: Sequence[float]) -> list[Option]:
        """An option for each unit, in order, whose losses add up to at most the budgets, in nats.

        The model may be run again for other budgets. What is known of it is kept.
        """
        if not self._known:
            self._known.update(self.run(self._first()))
        while True:
            known = choose(self._options(self._known), budgets)
            promised = choose(self._options(self._guesses(budgets) | self._known), budgets)
            taken = [(unit, option.name) for unit, option in zip(self.dense, promised, strict=True)]
            new = [key for key in taken if key[1] != DENSE and key not in self._known]
            if not new or _cost(known) <= (1 + _WORTH) * _cost(promised):
                return known
            self._known.update(self.run(new))

    def all_dense(self) -> list[Option]:
        """Dense attention in each unit."""
        return [Option(DENSE, cost, (0.0, 0.0)) for cost in self.dense.values()]

    def _first(self) -> list[Key]:
        """One candidate of each unit: the cheapest of the first, the next one of the next, and so on."""
        return [some[number % len(some)] for number, some in enumerate(self._cheaper.values()) if some]

    def _guesses(self, budgets: Sequence[float]) -> dict[Key, Losses]:
        errors = {key: self.errors[key] for some in self._cheaper.values() for key in some}
        if not errors:
            return {}
        each = [
            hoped_losses({k: v[i] for k, v in self._known.items()}, errors, self.families, _NOTHING * budget)
            for i, budget in enumerate(budgets)
        ]
        return {key: tuple(hoped[key] for hoped in each) for key in errors}

    def _options(self, losses: Mapping[Key, Losses]) -> list[list[Option]]:
        """Dense attention and the candidates whose losses are given, for each unit."""
        return [
            [dense, *(Option(key[1], self.costs[key], losses[key]) for key in some if key in losses)]
            for dense, some in zip(self.all_dense(), self._cheaper.values(), strict=True)
        ]


def _cost(options: Sequence[Option]) -> float:
    return sum(option.cost for option in options)
