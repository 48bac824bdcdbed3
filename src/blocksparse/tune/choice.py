"""One candidate for each unit, at the least cost under budgets: a multiple-choice knapsack, solved exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from attrs import frozen


@final
@frozen
class Option:
    """One candidate for one unit: what it costs (milliseconds, or density) and what it loses (KL, in nats)."""

    name: str
    cost: float
    losses: tuple[float, ...]  # one for each budget, none below 0


def choose(units: Sequence[Sequence[Option]], budgets: Sequence[float]) -> list[Option]:
    """The option of every unit with which the costs add up to the least, and the losses to at most the budgets.

    Raises:
        ValueError: nothing fits; give every unit an option without loss.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    options = [option for unit in units for option in unit]
    column = np.arange(len(options))
    row = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    one_each = csr_array((np.ones(len(options)), (row, column)), shape=(len(units), len(options)))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for number, budget in enumerate(budgets):
        # In units of the budget, because the solver's tolerance is absolute.
        losses = np.array([option.losses[number] for option in options])
        if budget > 0:
            # One option above 1 never fits, and the solver takes no coefficients that are much larger.
            with np.errstate(over="ignore"):
                share = np.minimum(losses / budget, 2)
            constraints.append(LinearConstraint(share[None], -np.inf, 1))
        else:
            constraints.append(LinearConstraint((losses > 0).astype(float)[None], -np.inf, 0))
    costs = np.array([option.cost for option in options])
    solved = milp(
        costs / max(float(costs.max()), 1e-30),
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        raise ValueError(f"no choice of candidates fits the budgets {tuple(budgets)}: {solved.message}")
    taken = [options[i] for i in np.flatnonzero(solved.x > 0.5)]
    assert len(taken) == len(units)  # the first constraint
    return taken
