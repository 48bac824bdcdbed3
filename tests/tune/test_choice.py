"""The knapsack against every choice there is, and the loop that makes a plan keep its budget."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("scipy")

from blocksparse.tune.choice import Option, choose
from blocksparse.tune.cost import Line
from blocksparse.tune.plan import Try
from blocksparse.tune.prefilter import worth_running
from blocksparse.tune.verify import plan_that_fits


def drawn(seed: int, units: int = 5, options: int = 4) -> list[list[Option]]:
    draw = random.Random(seed)
    return [
        [
            Option("dense", 1.0, (0.0, 0.0)),
            *(
                Option(f"{unit}-{i}", draw.random(), (draw.random() ** 4, draw.random() ** 4))
                for i in range(options - 1)
            ),
        ]
        for unit in range(units)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_is_cheaper(seed: int) -> None:
    units, budgets = drawn(seed), (random.Random(seed).choice([0.0, 0.01, 0.3, 2.0]), 0.5)
    taken = choose(units, budgets)
    assert [option in unit for option, unit in zip(taken, units, strict=True)] == [True] * len(units)

    def fits(options: tuple[Option, ...] | list[Option]) -> bool:
        return all(sum(o.losses[i] for o in options) <= 1.000001 * budget for i, budget in enumerate(budgets))

    assert fits(taken)
    least = min(sum(o.cost for o in options) for options in itertools.product(*units) if fits(options))
    assert sum(option.cost for option in taken) == pytest.approx(least, abs=1e-6)


def test_tiny_budgets_are_kept() -> None:
    """KL budgets are far below a solver's absolute tolerance when losses are small."""
    units = [[Option("dense", 1.0, (0.0,)), Option("sparse", 0.5, (1e-8,))] for _ in range(4)]
    assert [option.name for option in choose(units, [2.5e-8])].count("sparse") == 2


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="no choice of candidates fits the budgets"):
        choose([[Option("sparse", 0.5, (1.0,))]], [0.5])


@pytest.mark.parametrize("grows", [0.5, 1.0, 2.5])
def test_what_a_plan_really_loses_keeps_the_budget_and_uses_it(grows: float) -> None:
    """Losses of single layers add up to less or more than what they lose together."""
    units = [
        [Option("dense", 1.0, (0.0, 0.0)), *(Option(f"{i}", 1 - i / 20, (i / 1000, 0.0)) for i in range(1, 20))]
    ] * 6

    def measure(taken: list[Option]) -> Try:
        text = grows * sum(option.losses[0] for option in taken)
        return Try(0.5, text, 0.0, 0, 0.0)

    taken, tried, tries = plan_that_fits(units, (0.05, 0.1), measure, rounds=8)
    assert tried.text_kl == grows * sum(option.losses[0] for option in taken)
    assert 0.04 <= tried.text_kl <= 0.05
    assert tried in tries
    assert len(tries) <= 8


@pytest.mark.slow
def test_what_keeps_one_budget_is_no_bound_while_the_other_one_is_broken() -> None:
    """Seen on a model: text fitted by a hair until answers were cut down, and was then over its budget near it."""
    draw = random.Random(0)
    units = [
        [
            Option("dense", 1.0, (0.0, 0.0)),
            *(Option(f"{i}", draw.random() / 2, (draw.random(), draw.random())) for i in range(6)),
        ]
        for _ in range(30)
    ]
    seen: list[Try] = []

    def measure(taken: list[Option]) -> Try:
        text, answers = (sum(option.losses[i] for option in taken) for i in (0, 1))
        seen.append(Try(0.5, (1.03 if seen else 0.99) * text, 1.1 * answers, 0, 0.0))
        return seen[-1]

    taken, tried, tries = plan_that_fits(units, (4.0, 4.0), measure, rounds=6)
    assert tries == seen
    assert tries[0].text_kl <= 4 < tries[1].text_kl
    assert tries[0].answer_kl > 4
    assert tried.text_kl <= 4
    assert tried.answer_kl <= 4
    assert sum(option.name == "dense" for option in taken) < 15


def test_a_plan_that_never_fits_becomes_dense() -> None:
    units = [[Option("dense", 1.0, (0.0, 0.0)), Option("sparse", 0.1, (0.0, 0.0))]] * 3

    def measure(taken: list[Option]) -> Try:
        sparse = sum(option.name == "sparse" for option in taken)
        return Try(0.5, float(sparse), 0.0, 0, 0.0)

    taken, tried, _ = plan_that_fits(units, (0.05, 0.1), measure, rounds=3)
    assert [option.name for option in taken] == ["dense"] * 3
    assert tried.text_kl == 0


def test_families_take_turns_because_errors_do_not_compare_presets() -> None:
    costs = {"a1": 0.1, "a2": 0.2, "a3": 0.3, "a worse": 0.25, "b1": 0.15, "b2": 0.35, "dear": 1.0}
    errors = {"a1": 0.2, "a2": 0.09, "a3": 0.05, "a worse": 0.11, "b1": 0.9, "b2": 0.4, "dear": 0.01}
    families = {name: name[0] for name in costs}
    assert worth_running(costs, errors, families, keep=2, dense=1.0) == ["b1", "a3"]
    assert worth_running(costs, errors, families, keep=4, dense=1.0) == ["b1", "a2", "a3", "b2"]
    assert worth_running(costs, errors, families, keep=9, dense=1.0) == ["a1", "b1", "a2", "a3", "b2"]
    assert worth_running(costs, errors, families, keep=3, dense=0.05) == []


def test_times_grow_with_density_and_never_fall() -> None:
    line = Line.through([(0.1, 3.0), (0.5, 5.0), (0.9, 7.0)])
    assert line.at(0.3) == pytest.approx(4.0)
    falling = Line.through([(0.1, 5.0), (0.9, 1.0)])
    assert falling.at(0.9) >= falling.at(0.1) >= 0
