"""One candidate for each unit, at the least cost under budgets: a knapsack, and guesses where nothing was run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import final

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.layers.head_groups import AnyPipeline, HeadGroups, Heads
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.tools.bench import repeated

DENSE = "dense"  # the name of dense attention among those of candidates


@final
@frozen
class Unit:
    """Some consecutive KV heads of a layer, with the query heads that belong to them."""

    layer: int
    heads: Heads
    kv_heads: int  # of the whole layer

    def __str__(self) -> str:
        return (
            f"{self.layer}"
            if len(self.heads) == self.kv_heads
            else f"{self.layer}:{self.heads[0]}-{self.heads[-1]}"
        )

    @property
    def share(self) -> float:
        """Its part of the layer's heads."""
        return len(self.heads) / self.kv_heads

    @classmethod
    def of_layer(cls, layer: int, kv_heads: int, groups: int) -> list[Unit]:
        """A layer in so many groups of KV heads, as equal as can be."""
        cuts = [kv_heads * group // groups for group in range(groups + 1)]
        return [cls(layer, tuple(range(a, b)), kv_heads) for a, b in pairwise(cuts)]

    def part(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its heads of q `[B, Hq, M, D]`, k and v `[B, Hkv, N, D]`; views."""
        first, last, size = self.heads[0], self.heads[-1] + 1, q.shape[1] // k.shape[1]
        return q[:, first * size : last * size], k[:, first:last], v[:, first:last]

    def alone(self, pipeline: AnyPipeline) -> LayerPipeline:
        """The attention of the layer if only this unit is sparse."""
        others = tuple(head for head in range(self.kv_heads) if head not in self.heads)
        return HeadGroups({self.heads: pipeline, others: None}) if others else pipeline


Key = tuple[Unit, str]
"""A unit, and the name of what attends there."""


@final
@frozen
class Evaluation:
    """One candidate on the q, k and v of one unit."""

    density: float
    error: float  # relative L1 distance of the output from dense attention's


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of a call, after calls that compile and warm up: the median of some on a GPU, else the least.

    On a GPU the calls follow one another as they do in a model, so that the host's time counts only where the GPU
    would wait for it.
    """
    call()
    if device.type == "cuda":
        call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        marks[-1].synchronize()
        spans = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return float(statistics.median(spans[1:]))  # the host has no lead in the first one yet
    return min(repeated(call, 2, device))


@final
@frozen
class Line:
    """Milliseconds as `overhead + slope * density`, neither below 0."""

    overhead: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The line that fits pairs of density and milliseconds best, by least squares."""
        from scipy.optimize import nnls

        density, ms = np.array(points, dtype=float).T
        (overhead, slope), _ = nnls(np.stack((np.ones_like(density), density), axis=1), ms)
        return cls(float(overhead), float(slope))

    def at(self, density: float) -> float:
        return self.overhead + self.slope * density


@final
@frozen(eq=False)
class Costs:
    """Cost of each candidate in each unit, from its density there and its line of time over density."""

    density: Mapping[Key, float]
    lines: Mapping[str, Line]  # by candidate; of a whole layer, since groups of heads may differ in size
    dense_ms: float  # of a whole layer
    minimise: str  # "time" or "density"

    @classmethod
    def of(
        cls, evaluations: Mapping[Unit, Mapping[str, Evaluation]], times: Mapping[Key, float], minimise: str
    ) -> Costs:
        """Of densities of all units and times of some, in which dense attention has the name "dense"."""
        density = {
            (unit, name): evaluation.density
            for unit, some in evaluations.items()
            for name, evaluation in some.items()
        }
        names = {name for _, name in times if name != DENSE}
        return cls(
            density,
            {
                name: Line.through(
                    [(density[unit, name], ms / unit.share) for (unit, of), ms in times.items() if of == name]
                )
                for name in names
            },
            statistics.fmean(ms for (_, name), ms in times.items() if name == DENSE),
            minimise,
        )

    def ms(self, unit: Unit, name: str) -> float:
        """Predicted milliseconds of a candidate, or of "dense", in one unit."""
        whole = self.dense_ms if name == DENSE else self.lines[name].at(self.density[unit, name])
        return unit.share * whole

    def __call__(self, unit: Unit, name: str) -> float:
        """The cost to minimise: milliseconds, or density as a share of a whole layer."""
        if self.minimise == "time":
            return self.ms(unit, name)
        return unit.share * (1.0 if name == DENSE else self.density[unit, name])


@final
@frozen
class Option:
    """One candidate for one unit: what it costs (milliseconds, or density) and its KL in nats."""

    name: str
    cost: float
    losses: tuple[float, ...]  # one for each budget, none below 0; none at all where they were not measured


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
        # One node is usual. A limit of time would make plans depend on the machine.
        options={"mip_rel_gap": 1e-3, "node_limit": 1000},
    )
    if solved.x is None:
        raise ValueError(f"no choice of candidates fits the budgets {tuple(budgets)}: {solved.message}")
    taken = [options[i] for i in np.flatnonzero(solved.x > 0.5)]
    assert len(taken) == len(units)  # the first constraint
    return taken


_EXPONENT = 2.0  # a KL grows with the square of a small change; the losses that are known may say otherwise
_LEAST_ERROR = 1e-3  # errors below are all the same
_FIRM = 4.0  # as many losses say as much of the noise as what is assumed


def hoped_losses(
    known: Mapping[Key, float], errors: Mapping[Key, float], families: Mapping[str, str], least: float
) -> dict[Key, float]:
    """Optimistic KL of every candidate in every unit: one standard deviation below the estimate.

    Errors order the settings of one preset in one layer. They do not compare layers or presets. The same error
    raises the KL more in some layers than in others, and `s2o` has the smallest error and the highest KL at
    answers. So the logarithm of a KL is modelled as a sum of four terms. These are a number for the unit, one for
    the preset, a multiple of the logarithm of the error, and a constant. If nothing were known, all numbers but
    the constant would be 0, and the multiple 2, give or take 1. The model is fitted by Bayesian linear regression:
    least squares over the known losses with one more row for each number. The variance of an estimate is that of
    the noise plus that of the fit. So hope is greatest where least is known of a unit or a preset. The noise is
    what the fit leaves of the known losses. The fewer are known, the closer it is to a factor of e.

    Args:
        known: losses of some units and candidates. At least one.
        errors: relative L1 distances of all units and candidates from dense attention.
        families: the preset of each candidate.
        least: losses below this one are all the same.
    """
    units = {unit: number for number, unit in enumerate(dict.fromkeys(unit for unit, _ in errors))}
    presets = {preset: len(units) + number for number, preset in enumerate(dict.fromkeys(families.values()))}
    exponent = len(units) + len(presets)

    def rows(keys: list[Key]) -> np.ndarray:
        table = np.zeros((len(keys), exponent + 2))
        for row, (unit, name) in zip(table, keys, strict=True):
            row[[units[unit], presets[families[name]]]] = 1.0
            row[exponent:] = np.log(max(errors[unit, name], _LEAST_ERROR)), 1.0
        return table

    seen, every = rows(list(known)), rows(list(errors))
    beyond = np.log(np.maximum(list(known.values()), least)) - _EXPONENT * seen[:, exponent]
    spread = np.linalg.inv(seen.T @ seen + np.diag([1.0] * (exponent + 1) + [0.0]))
    fit = spread @ (seen.T @ beyond)
    likely = every @ fit + _EXPONENT * every[:, exponent]
    noise = (_FIRM + beyond @ (beyond - seen @ fit)) / (_FIRM + len(beyond) - 1)
    deviation = np.sqrt(noise * (1.0 + np.einsum("ki,ij,kj->k", every, spread, every)))
    # Rounded, so that the last bits of another machine's arithmetic do not change a plan.
    return dict(zip(errors, np.exp((likely - deviation).round(6)).tolist(), strict=True))


Losses = tuple[float, ...]
"""One for each budget."""

WORTH = 0.02  # of the cost must be promised, or the model is not run again, nor another plan verified
_NOTHING = 1e-4  # of a budget; losses below are not told apart


@final
@frozen(eq=False)
class GuidedChoice:
    """The cheapest plan under budgets, when there are many candidates and running the model with each takes long.

    A plan is chosen as if guesses of losses were true. The network is run with the candidates of that choice that
    were not run yet, and the estimates are updated. This repeats until the estimates promise little more than the
    known losses. What is chosen at last was measured.

    Args:
        dense: what dense attention costs in each unit.
        costs: of candidates in units. One that is missing here, or costs as much as dense attention, is not taken.
        errors: of attention, relative L1 distances from dense attention. At least of all that `costs` has.
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
            # One candidate of each unit: the cheapest of the first, the next one of the next, and so on.
            some = enumerate(self._cheaper.values())
            self._known.update(self.run([names[i % len(names)] for i, names in some if names]))
        while True:
            known = choose(self._options(self._known), budgets)
            promised = choose(self._options(self._guesses(budgets) | self._known), budgets)
            taken = [(unit, option.name) for unit, option in zip(self.dense, promised, strict=True)]
            new = [key for key in taken if key[1] != DENSE and key not in self._known]
            if not new or _cost(known) <= (1 + WORTH) * _cost(promised):
                return known
            self._known.update(self.run(new))

    def all_dense(self) -> list[Option]:
        """Dense attention in each unit."""
        return [Option(DENSE, cost, (0.0, 0.0)) for cost in self.dense.values()]

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
