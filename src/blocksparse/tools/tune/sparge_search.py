"""SpargeAttn's own search (arXiv 2502.18137, section 3.6): tau and theta under an error bound, then lambda."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, final

from attrs import evolve, field, frozen

from blocksparse.check.validators import positive
from blocksparse.presets.named import Candidate
from blocksparse.presets.plan import Plan
from blocksparse.tools.tune.choice import DENSE, Costs, Evaluation, Option, Unit
from blocksparse.tools.tune.journal import Report
from blocksparse.tools.tune.prompts import TunePrompt
from blocksparse.tools.tune.sensitivity import EVALUATION
from blocksparse.tools.tune.session import POSITIONS, Session

# The paper searches grids and prints none.
GRID: tuple[Candidate, ...] = tuple(
    Candidate("sparge", {"mass": tau, "theta": theta})
    for tau, theta in product((0.7, 0.8, 0.9, 0.95, 0.98), (-1.0, 0.3, 0.5, 0.6))
)
LAMBDAS = (-4.0, -6.0, -8.0, -10.0, -14.0)  # the boldest first


@final
@frozen
class ErrorBounds:
    """Relative L1 distance of a layer's output from dense attention's, as a mean over prompts."""

    l1: float = field(default=0.08, validator=positive)  # section 4.1, Llama 3.1
    l2: float = field(default=0.09, validator=positive)  # the same


def sparge_search(
    network: Any,
    prompts: Sequence[TunePrompt],
    held: Sequence[TunePrompt],
    *,
    journal: Path,
    bounds: ErrorBounds = ErrorBounds(),
    lambdas: Sequence[float] | None = None,
    positions: int = POSITIONS,
    report: Report = lambda *_: None,
) -> Plan:
    """Choose tau and theta for each layer, then lambda, by the error of that layer's output alone.

    First the pair of tau and theta with the fewest blocks among those whose error is below `l1`; then, with that
    pair, the greatest lambda whose error is below `l2`. A layer without such a pair is dense. The plan's loss on
    held prompts is measured and put into its evidence, and bounds nothing.

    Args:
        network, prompts, held, journal, positions, report: as for `tune`.
        bounds: l1 and l2 of the paper.
        lambdas: of each, `pv_skip` of `TritonExecutor`. If None, a grid on a GPU, and none elsewhere, since only
            that executor leaves products with values out.
    """
    skips = (LAMBDAS if network.device.type == "cuda" else ()) if lambdas is None else tuple(sorted(lambdas)[::-1])
    session = Session.begin(
        network,
        prompts,
        held,
        journal=journal,
        positions=positions,
        report=report,
    )
    bench, units = session.bench, session.units
    bench.work.todo |= {
        "comparing attention": EVALUATION * len(units) * len(prompts) * (len(GRID) + len(skips)),
        "timing": 6 * EVALUATION * len(units),
        "verifying": 4.0 * len(held),
    }
    bench.work.begins()
    first = _means(session, dict.fromkeys(units, GRID))
    by_name = {str(candidate): candidate for candidate in GRID}
    chosen: dict[Unit, str] = {}
    for unit in units:
        below = [name for name, evaluation in first[unit].items() if evaluation.error < bounds.l1]
        chosen[unit] = min(below, key=lambda name: first[unit][name].density, default=DENSE)

    bold = {
        unit: [evolve(by_name[name], pv_skip=skip) for skip in skips]
        for unit, name in chosen.items()
        if name != DENSE
    }
    if skips and bold:
        second = _means(session, bold)
        for unit, some in bold.items():
            by_name |= {str(candidate): candidate for candidate in some}
            first[unit] |= second[unit]
            fits = (str(candidate) for candidate in some if second[unit][str(candidate)].error < bounds.l2)
            chosen[unit] = next(fits, chosen[unit])

    names = list(chosen.values())
    own = {unit: [by_name[name]] if name != DENSE else [] for unit, name in chosen.items()}
    costs = Costs.of(first, bench.times(session.longest, own), "density")
    tried = session.verified(names, by_name, costs)
    taken = [Option(name, costs(unit, name), (0.0, 0.0)) for unit, name in chosen.items()]
    return session.plan(taken, by_name, costs, tried, [tried], strategy="sparge", budget=(None, None))


def _means(session: Session, candidates: Mapping[Unit, Sequence[Candidate]]) -> dict[Unit, dict[str, Evaluation]]:
    """Density and error of candidates, means over the prompts."""
    of_prompts = [
        session.bench.evaluations(number, prompt, candidates) for number, prompt in enumerate(session.prompts)
    ]
    return {
        unit: {
            str(x): Evaluation(
                statistics.fmean(evaluations[unit][str(x)].density for evaluations in of_prompts),
                statistics.fmean(evaluations[unit][str(x)].error for evaluations in of_prompts),
            )
            for x in some
        }
        for unit, some in candidates.items()
    }
