"""`tune` finds a plan for a model: sensitivity of layers, then a knapsack, then verification."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from attrs import field, frozen

from blocksparse.tune.bound import above_0
from blocksparse.tune.candidate import DEFAULT_CANDIDATES, Candidate
from blocksparse.tune.choice import Option
from blocksparse.tune.cost import Costs
from blocksparse.tune.errors import TuneError
from blocksparse.tune.plan import Plan
from blocksparse.tune.prefilter import worth_running
from blocksparse.tune.progress import Report
from blocksparse.tune.prompts import TunePrompt
from blocksparse.tune.sensitivity import PROBE
from blocksparse.tune.session import POSITIONS, Session
from blocksparse.tune.unit import DENSE, Unit
from blocksparse.tune.verify import plan_that_fits
from blocksparse.validators import one_of, optional, size

KEPT_ON_A_CPU = 6  # candidates of a layer: a run of the model takes seconds there, and a tenth of one on a GPU


@final
@frozen
class Budget:
    """What a plan may lose on held prompts, in nats, less the noise of kernels."""

    text_kl: float = field(default=0.03, validator=above_0)  # mean KL of next-token distributions over the text
    answer_kl: float = field(default=0.1, validator=above_0)  # the same at the tokens of answers
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
    keep: int | None = None,
    positions: int = POSITIONS,
    report: Report = lambda *_: None,
) -> Plan:
    """Choose one candidate, or dense attention, for each layer of a transformers model.

    Each candidate is tried on the q, k and v of each layer. With those that do well, the model is run with that
    layer alone sparse, and the KL of its predictions from dense attention's is recorded. Of these, a solver takes
    one for each layer, at the least cost that the budget allows. The whole plan is measured on held prompts, and
    the solver's budget is changed until what the plan really loses fits.

    Args:
        network: a causal language model of transformers, on the device and in the dtype in which it will run.
        prompts: what candidates are compared on; the longest of them gives q, k, v and times.
        held: other prompts, which whole plans are verified on.
        journal: a file that gets every measurement. A run that was killed goes on from there, and a run with
            the same model and prompts but another budget, say, takes what it needs from there.
        budget: what the plan may lose.
        candidates: what may attend in a layer; dense attention always may.
        minimise: "time", as predicted for this device at the length of the longest prompt; or "density".
        batch: how many prompts a call will have; times are those of such calls.
        head_groups: into how many groups the KV heads of each layer are split; each gets a choice of its own.
        keep: with how many candidates for each layer, or group of heads, the model is run. None is 6 on a CPU, and
            on a GPU all that are not beaten by another setting of their preset.
        positions: at how many positions of a prompt's text predictions are compared.
        report: is called with the progress.

    Raises:
        TuneError: the model or the prompts cannot be used, or the journal is that of another run.
        TypeError, ValueError: another argument is of a wrong kind.
    """
    one_of("time", "density").check(minimise=minimise)
    size.check(batch=batch, head_groups=head_groups, positions=positions)
    optional(size).check(keep=keep)
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
    if keep is None:
        keep = len(every) if network.device.type == "cuda" else KEPT_ON_A_CPU
    timed = session.timed_units()
    run = sum(map(bench.part_of_a_reading, units)) * len(prompts)
    work.todo |= {
        "comparing attention": PROBE * len(units) * len(by_name),
        "timing": 3 * PROBE * len(timed) * (len(by_name) + 1),
        "running the model": run * (keep + 1),
        "verifying": 2.0 * len(held) * (budget.tries + 1),
    }
    work.begins()
    probes = bench.probes(prompts.index(session.longest), session.longest, dict.fromkeys(units, every))
    costs = Costs.of(probes, bench.times(session.longest, dict.fromkeys(timed, every), batch), minimise)
    kept = {
        unit: worth_running(
            {name: costs(unit, name) for name in by_name},
            {name: probe.error for name, probe in probes[unit].items()},
            {name: candidate.preset for name, candidate in by_name.items()},
            keep,
            costs(unit, DENSE),
        )
        for unit in units
    }
    work.todo["running the model"] = len(prompts) * sum(
        bench.part_of_a_reading(unit) * (len(names) + 1) for unit, names in kept.items()
    )
    options = {unit: [Option(DENSE, costs(unit, DENSE), (0.0, 0.0))] for unit in units}
    for (unit, name), losses in _losses(session, prompts, kept, by_name).items():
        options[unit].append(Option(name, costs(unit, name), losses))
    taken, tried, tries = plan_that_fits(
        list(options.values()),
        (budget.text_kl, budget.answer_kl),
        lambda taken: session.verified([option.name for option in taken], by_name, costs),
        budget.tries,
    )
    return session.plan(
        taken, by_name, costs, tried, tries, strategy="kl", budget=(budget.text_kl, budget.answer_kl)
    )


def _losses(
    session: Session,
    prompts: Sequence[TunePrompt],
    kept: Mapping[Unit, Sequence[str]],
    candidates: Mapping[str, Candidate],
) -> dict[tuple[Unit, str], tuple[float, ...]]:
    """KL over the text and at answers of units and candidates, less that of everything kept: means of prompts."""
    text: dict[tuple[Unit, str], list[float]] = {}
    answers: dict[tuple[Unit, str], list[float]] = {}
    # One prompt after another, because only one prompt's outputs of layers are held.
    for number, prompt in enumerate(prompts):
        for unit, names in kept.items():
            if not names:
                continue
            noise = session.bench.loss(number, prompt, unit, None)
            for name in names:
                of_text, of_answers = session.bench.loss(number, prompt, unit, candidates[name]).less(noise)
                text.setdefault((unit, name), []).append(of_text)
                if prompt.answers:
                    answers.setdefault((unit, name), []).append(of_answers)
    return {key: (statistics.fmean(text[key]), statistics.fmean(answers.get(key) or [0.0])) for key in text}
