"""`tune` and `sparge_search` find a plan for a model, by its predictions or by errors of its layers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, final

from attrs import evolve, field, frozen

from blocksparse.check.validators import one_of, positive, size
from blocksparse.presets.named import Candidate, TuneError
from blocksparse.presets.plan import Plan
from blocksparse.tools.tune.choice import DENSE, Costs, Evaluation, GuidedChoice, Key, Losses, Option, Unit
from blocksparse.tools.tune.journal import Report
from blocksparse.tools.tune.prompts import TunePrompt, by_length
from blocksparse.tools.tune.sensitivity import EVALUATION
from blocksparse.tools.tune.session import POSITIONS, Session, plan_that_fits


def _grid(preset: str, argument: str, *values: Any, band: int | None = None, **rest: Any) -> list[Candidate]:
    return [Candidate(preset, {argument: value, **rest}, band) for value in values]


DEFAULT_CANDIDATES: tuple[Candidate, ...] = (
    *_grid("s2o", "tau", 0.03, 0.1, 0.3, S=128),
    Candidate("s2o", {"tau": 0.1, "S": 64}),
    Candidate("s2o", {"tau": 0.03, "S": 64, "band": 64}),
    Candidate("s2o", {"tau": 0.03, "S": 512, "block": 128}),
    Candidate("s2o", {"tau": 0.01, "S": 1024, "block": 128, "band": 128}),
    *_grid("xattention", "mass", 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, band=64, block=64),
    *_grid("xattention", "mass", 0.85, 0.9, 0.95, 0.97, band=128, stride=8, block=128, pattern="sum"),
    *_grid("auto", "alpha", 0.014, 0.02, 0.025, 0.034, 0.045, 0.056, 0.066, 0.1, 0.14),
    *_grid("mean_pooling", "mass", 0.8, 0.9, 0.94, 0.97, 0.985, 0.995, band=128, block=64),
    *_grid("mean_pooling", "mass", 0.9, 0.94, 0.97, 0.98, 0.99, band=128, block=128),
    *_grid("pbs_attn", "mass", 0.75, 0.9, band=128, block=64),
    *_grid("a_shape", "local", 256, 1024, 2048, 4096, sink=64),
)
"""What is tried unless the caller names candidates: few families, many settings; docs/start/tune.md explains."""


_MOST = 0.9  # of a layer's work; a window that keeps more hardly shows here what it drops of longer prompts
_RUNS = 8  # of the model with each unit, at most about; only the estimate of the time left rests on it


@final
@frozen
class Budget:
    """Limits on the KL of a plan on held prompts, in nats, less the noise of kernels."""

    text_kl: float = field(default=0.03, validator=positive)  # mean KL of next-token distributions over the text
    answer_kl: float = field(default=0.1, validator=positive)  # the same at the tokens of answers
    tries: int = field(
        default=6, validator=size, kw_only=True
    )  # plans that are verified, unless none of them fits


def tune(
    network: Any,
    prompts: Sequence[TunePrompt],
    held: Sequence[TunePrompt],
    *,
    journal: Path,
    budget: Budget = Budget(),
    candidates: Sequence[Candidate] = DEFAULT_CANDIDATES,
    minimise: str = "time",
    batch: int = 1,
    head_groups: int = 1,
    positions: int = POSITIONS,
    report: Report = lambda *_: None,
) -> Plan:
    """Choose one candidate, or dense attention, for each layer of a transformers model.

    Each candidate is tried on the q, k and v of each layer. With some of them the model is run with that layer
    alone sparse, and the KL of its predictions from dense attention's is recorded. A solver takes one for each
    layer, at the least cost that the budget allows; it also says which candidates may be worth a run. The whole
    plan is measured on held prompts, and the solver's budget is changed until the measured KL of the plan fits.

    Args:
        network: a causal language model of transformers, on the device and in the dtype in which it will run.
        prompts: what candidates are compared on. The longest of them gives q, k, v and times.
        held: other prompts, which whole plans are verified on.
        journal: a file that gets every measurement. A run that was killed continues from it. A run with the same
            model and prompts but, say, another budget reuses its measurements.
        budget: the limits on the plan's KL.
        candidates: what may attend in a layer. Dense attention always may. A candidate that keeps 90 % of the work
            of a layer or more is never taken there. It saves little, and a window that suffices here may not in
            longer prompts.
        minimise: "time" or "density". Time is predicted for this device at the longest prompt.
        batch: how many prompts a call will have. Times are those of such calls.
        head_groups: into how many groups the KV heads of each layer are split. Each gets its own choice. Layers
            with fewer KV heads than others, as in Gemma 4, are not split.
        positions: at how many positions of a prompt's text predictions are compared.
        report: is called with the progress.

    Raises:
        TuneError: the model or the prompts cannot be used, or the journal is that of another run.
        TypeError, ValueError: another argument is of a wrong kind.
    """
    one_of("time", "density").check(minimise=minimise)
    size.check(batch=batch, head_groups=head_groups, positions=positions)
    if not candidates:
        raise TuneError("'candidates' must have at least one candidate")
    by_name = {str(candidate): candidate for candidate in candidates}
    every = tuple(by_name.values())
    session = Session.begin(
        network,
        prompts,
        held,
        journal=journal,
        positions=positions,
        report=report,
        head_groups=head_groups,
        batch=batch,
    )
    bench, units, work = session.bench, session.units, session.bench.work
    timed = session.timed_units()
    work.todo |= {
        "comparing attention": EVALUATION * len(units) * len(by_name),
        "timing": 3 * EVALUATION * len(timed) * (len(by_name) + 1),
        "running the model": _RUNS * sum(map(bench.part_of_a_reading, units)) * len(prompts),
        "verifying": 2.0 * len(held) * (budget.tries + 1),
    }
    work.begins()
    evaluations = bench.evaluations(prompts.index(session.longest), session.longest, dict.fromkeys(units, every))
    costs = Costs.of(evaluations, bench.times(session.longest, dict.fromkeys(timed, every), batch), minimise)
    errors = {
        (unit, name): evaluation.error for unit, some in evaluations.items() for name, evaluation in some.items()
    }
    choice = GuidedChoice(
        {unit: costs(unit, DENSE) for unit in units},
        {(unit, name): costs(unit, name) for unit, name in errors if evaluations[unit][name].density < _MOST},
        errors,
        {name: candidate.preset for name, candidate in by_name.items()},
        partial(_losses, session, by_name),
    )

    taken, tried, tries = plan_that_fits(
        choice,
        choice.all_dense(),
        (budget.text_kl, budget.answer_kl),
        lambda taken: session.verified([option.name for option in taken], by_name, costs),
        budget.tries,
    )
    return session.plan(
        taken, by_name, costs, tried, tries, strategy="kl", budget=(budget.text_kl, budget.answer_kl)
    )


def _losses(session: Session, candidates: Mapping[str, Candidate], some: Sequence[Key]) -> dict[Key, Losses]:
    """KL over the text and at answers, less that of everything kept, of the length where its mean is greatest."""
    found: dict[Key, dict[int, Losses]] = {key: {} for key in some}
    bench = session.bench
    # One prompt after another, because outputs of layers are held of only one: of which they are, comes first.
    for number, prompt in sorted(enumerate(session.prompts), key=lambda one: not bench.holds_outputs(one[1])):
        for unit, name in some:
            found[unit, name][number] = bench.losses(number, prompt, unit, candidates[name])
    lengths = by_length(session.prompts).values()
    asking = [[i for i in numbers if session.prompts[i].answers] for numbers in lengths]
    return {
        key: (
            max(statistics.fmean(each[i][0] for i in numbers) for numbers in lengths),
            max((statistics.fmean(each[i][1] for i in numbers) for numbers in asking if numbers), default=0.0),
        )
        for key, each in found.items()
    }


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

    This is SpargeAttn's own search (arXiv 2502.18137, section 3.6). First comes the pair of tau and theta with the
    fewest blocks among those whose error is below `l1`. With that pair comes the greatest lambda whose error is
    below `l2`. A layer without such a pair is dense. The plan's loss on held prompts is measured and put into its
    evidence, and bounds nothing.

    Args:
        network, prompts, held, journal, positions, report: as for `tune`.
        bounds: l1 and l2 of the paper.
        lambdas: of each, `pv_skip` of `TritonExecutor`. If None, a grid on a GPU, and none elsewhere, since only
            that executor leaves products with values out.
    """
    size.check(positions=positions)
    skips = (LAMBDAS if network.device.type == "cuda" else ()) if lambdas is None else tuple(sorted(lambdas)[::-1])
    session = Session.begin(network, prompts, held, journal=journal, positions=positions, report=report)
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
    # The model never runs with one layer sparse alone, so only dense attention's loss is known.
    taken = [Option(name, costs(unit, name), (0.0, 0.0) if name == DENSE else ()) for unit, name in chosen.items()]
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
