"""What strategies share: checked prompts, units, plans that are measured on held prompts, and the last plan."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
from attrs import asdict, define, field, frozen

import blocksparse
from blocksparse.layers.head_groups import AnyPipeline, HeadGroups, Heads
from blocksparse.layers.schedule import LayerPipeline, Schedule
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.presets.named import Candidate, TuneError
from blocksparse.presets.plan import AtLength, Evidence, Fingerprint, Part, Plan, Try
from blocksparse.tools.demo.watch import EVERYTHING
from blocksparse.tools.tune.choice import DENSE, WORTH, Costs, Option, Unit
from blocksparse.tools.tune.journal import Journal, Report, Work
from blocksparse.tools.tune.prompts import LONG, TunePrompt, by_length, hash_of
from blocksparse.tools.tune.sensitivity import Bench, Loss

_LOST = 0.02  # of the answers that dense attention finds; one may always be lost
_MORE_ROUNDS = 8  # before a plan is dense because none fitted


Verified = dict[int, tuple[Loss, float]]
"""Means over the held prompts of about one length, by its tokens: the loss with its noise, whose `found` is a sum,
and the density, over layers and query heads, with 1 for dense layers."""


@final
@frozen(eq=False)
class Verifier:
    """Measures whole plans on held prompts."""

    bench: Bench
    held: Sequence[TunePrompt]
    _verified: dict[str, Verified] = field(factory=dict, init=False)  # by a hash of the plan

    def noise(self, sparse: Iterable[int]) -> Verified:
        """Everything kept in all layers that can be sparse."""
        return self.of("everything", dict.fromkeys(sorted(sparse), EVERYTHING))

    def answers(self) -> dict[int, int]:
        """Number of answers that the prompts of each length ask for."""
        return {
            tokens: sum(len(self.held[i].answers) for i in some) for tokens, some in by_length(self.held).items()
        }

    def dense_found(self) -> dict[int, int]:
        """Number of answers that dense attention finds."""

        def measure() -> list[int]:
            return [self.bench.reading(prompt, keep_outputs=False).found for prompt in self.held]

        found: list[int] = self.bench.journal.once("found by dense attention", measure)
        return {tokens: sum(found[i] for i in some) for tokens, some in by_length(self.held).items()}

    def of(self, plan: str, layers: Mapping[int, LayerPipeline]) -> Verified:
        """A plan with these layers sparse; `plan` tells it from others."""
        name = hashlib.sha256(plan.encode()).hexdigest()[:16]
        if name in self._verified:
            return self._verified[name]
        rows = []
        for number, prompt in enumerate(self.held):
            key = f"plan {name} held {number}"
            if now := not self.bench.journal.knows(key):
                self.bench.journal.note(key, self._measure(prompt, layers))
            rows.append(self.bench.journal[key])
            self.bench.work.did("verifying", 2.0, now=now)
        found = self._verified[name] = dict[int, tuple[Loss, float]]()
        for tokens, some in by_length(self.held).items():
            loss = Loss(
                statistics.fmean(rows[i]["text"] for i in some),
                # Prompts without an answer say nothing about answers.
                statistics.fmean([rows[i]["answers"] for i in some if self.held[i].answers] or [0.0]),
                sum(rows[i]["found"] for i in some),
            )
            found[tokens] = loss, statistics.fmean(rows[i]["density"] for i in some)
        return found

    def _measure(self, prompt: TunePrompt, layers: Mapping[int, LayerPipeline]) -> dict[str, Any]:
        reading, recorder = self.bench.reading(prompt, keep_outputs=False), DensityRecorder()
        with self.bench.attached(Schedule(None, layers=layers), recorder):
            loss = reading.losses()
        if dense := sorted(set(layers) & set(recorder.dense_calls())):
            raise TuneError(
                f"layer {dense[0]} was dense in a held prompt, though it was sparse in another one. "
                "Hold longer prompts."
            )
        return {**asdict(loss), "density": recorder.mean_density()}


@final
@define
class Search:
    """One budget: by which factor to change it, so that what is truly lost comes just under it."""

    budget: float
    factor: float = 1.0
    _fits: float = 0.0  # the greatest factor that was seen to fit
    _fails: float = float("inf")  # the least that was not

    def fits(self, true: float) -> bool:
        """Whether a plan with this measured KL is within the budget."""
        return true <= self.budget

    def saw(self, true: float, predicted: float, *, others_fit: bool) -> None:
        """Take into account the measured and the predicted KL of the plan for `budget * factor`.

        If it is within this budget but not within another one, nothing changes, since a plan within both may have
        a higher or a lower KL.
        """
        ratio = self.budget / max(true, 1e-12)
        if self.fits(true):
            if not others_fit:
                return
            self._fits = max(self._fits, self.factor)
            self.factor *= min(ratio, 2.0)
        else:
            if predicted > 0:
                self.factor = min(self.factor, predicted / self.budget)  # a greater one did not bind
            self._fails = min(self._fails, self.factor)
            self._fits = self._fits if self._fits < self._fails else 0.0  # that one lost little without it
            self.factor *= max(0.9 * ratio, 0.1)
        if not self._fits < self.factor < self._fails and self._fits:
            self.factor = (self._fits * self._fails) ** 0.5 if self._fits < self._fails else self._fails / 2


def plan_that_fits(
    choice: Callable[[Sequence[float]], list[Option]],
    dense: list[Option],
    budgets: Sequence[float],
    measure: Callable[[list[Option]], Try],
    rounds: int,
) -> tuple[list[Option], Try, list[Try]]:
    """The cheapest of the verified plans that keep the budgets of text and answers, its figures, and all tries.

    At every length a plan must also find the answers that dense attention finds, less 2 % of them or one. A plan
    that does not counts as one whose KL at answers is a quarter above the budget.

    Losses of single layers do not add up exactly. So the budgets for the solver are tightened or loosened, and the
    plan is chosen and measured again, `rounds` times. If none of these plans fits, this goes on for a few more; at
    last it is `dense`. It ends early where another plan would hardly be cheaper.
    """
    searches = [Search(budget) for budget in budgets]
    tries: list[Try] = []
    best: tuple[float, list[Option], Try] | None = None
    last = rounds + _MORE_ROUNDS
    for round_ in range(last + 1):
        if round_ >= rounds and best is not None:
            break
        taken = dense if round_ == last else choice([search.budget * search.factor for search in searches])
        cost = sum(option.cost for option in taken)
        if best is not None and cost > (1 - WORTH) * best[0]:
            break
        tried = measure(taken)
        tries.append(tried)
        losses = [tried.text_kl, tried.answer_kl]
        if any(each.dense_found - each.found > max(1.0, _LOST * each.dense_found) for each in tried.lengths):
            losses[1] = max(losses[1], 1.25 * budgets[1])
        fits = all(search.fits(true) for search, true in zip(searches, losses, strict=True))
        for number, (search, true) in enumerate(zip(searches, losses, strict=True)):
            search.saw(true, sum(option.losses[number] for option in taken), others_fit=fits)
        if fits and (best is None or cost < best[0]):
            best = cost, taken, tried
    assert best is not None  # the last try is dense, whose KL is 0
    return best[1], best[2], tries


POSITIONS = 384  # of a prompt's text, at which predictions are compared unless the caller says otherwise
_TIMED_UNITS = 4
# A window of w of N tokens has 1 - (1 - w / N)^2 of the causal work. With nine tenths, the most that `tune` takes,
# w is .68 N, so a prompt of this share of N shows what the window drops.
_SEEN = LONG


@final
@frozen(eq=False)
class Session:
    """One run of tuning."""

    bench: Bench
    model: Fingerprint
    units: Sequence[Unit]  # the units with their own choice, in order
    prompts: Sequence[TunePrompt]
    verifier: Verifier
    about: Mapping[str, Any]
    batch: int  # prompts in a call, when times are measured

    @classmethod
    def begin(
        cls,
        network: Any,
        prompts: Sequence[TunePrompt],
        held: Sequence[TunePrompt],
        *,
        journal: Path,
        positions: int,
        report: Report,
        head_groups: int = 1,
        batch: int = 1,
    ) -> Session:
        """Check everything, and open the journal."""
        for what, some in (("prompts", prompts), ("held", held)):
            if not some:
                raise TuneError(f"'{what}' must have at least one prompt")
        if {hash_of([prompt]) for prompt in prompts} & {hash_of([prompt]) for prompt in held}:
            raise TuneError("'held' must have other prompts than 'prompts', or nothing is verified. Split them.")
        longest, seen = (_longest(some).ids.shape[1] for some in (prompts, held))
        if seen < _SEEN * longest:
            raise TuneError(
                f"the longest of 'held' must have {_SEEN:.0%} of the tokens of the longest of 'prompts' at least, "
                f"or it does not show what windows drop: {seen} of {longest}. Hold a longer prompt."
            )
        if network.training:
            raise TuneError("the model must not be in training, where dropout draws numbers. Call eval() first.")
        model, device = Fingerprint.of(network), network.device
        if head_groups > model.kv_heads:
            raise TuneError(f"'head_groups' must be at most {model.kv_heads}, the model's KV heads: {head_groups}")
        try:
            versions = {name: version(name) for name in ("torch", "transformers", "scipy", "cattrs")}
        except PackageNotFoundError as error:
            raise TuneError(f"{error.name} is not installed: pip install -e '.[tune]' in a checkout") from None
        # Nothing else is here, so that other candidates, budgets and strategies use the same measurements.
        about = {
            "model": model.weights,
            "dtype": str(network.dtype).removeprefix("torch."),
            "prompts": hash_of(prompts),
            "held": hash_of(held),
            "positions": positions,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type),
            "versions": {"blocksparse": blocksparse.__version__, **versions},
        }
        bench = Bench(network, Journal.open(journal, about), Work(report, {}), positions)
        layers = bench.sparse_layers(_longest(prompts))
        # A plan knows one number of KV heads, so layers with fewer, as in Gemma 4, are not split.
        units = [
            unit
            for layer, kv_heads in layers.items()
            for unit in Unit.of_layer(layer, kv_heads, head_groups if kv_heads == model.kv_heads else 1)
        ]
        return cls(bench, model, units, prompts, Verifier(bench, held), about, batch)

    @property
    def longest(self) -> TunePrompt:
        """The longest prompt, the first of several."""
        return _longest(self.prompts)

    def timed_units(self) -> list[Unit]:
        """Some units, spread evenly, whose times stand for all."""
        return list(self.units[:: max(1, len(self.units) // _TIMED_UNITS)][:_TIMED_UNITS])

    def verified(self, names: Sequence[str], candidates: Mapping[str, Candidate], costs: Costs) -> Try:
        """Measured KL on held prompts of a plan, named unit by unit."""
        found = self.verifier.of("\n".join(names), self._layers(names, candidates))
        noise = self.verifier.noise({unit.layer for unit in self.units})
        answers, dense_found = self.verifier.answers(), self.verifier.dense_found()
        lengths = []
        for tokens, (loss, density) in found.items():
            text_kl, answer_kl = map(_short, loss.less(noise[tokens][0]))
            counts = answers[tokens], dense_found[tokens], loss.found
            lengths.append(AtLength(tokens, _short(density), text_kl, answer_kl, *counts))
        ms = sum(costs.ms(unit, name) for unit, name in zip(self.units, names, strict=True))
        return Try(
            lengths[-1].density,
            max(each.text_kl for each in lengths),
            max(each.answer_kl for each in lengths),
            sum(each.found for each in lengths),
            _short(ms),
            tuple(lengths),
        )

    def plan(
        self,
        taken: Sequence[Option],
        candidates: Mapping[str, Candidate],
        costs: Costs,
        tried: Try,
        tries: Sequence[Try],
        *,
        strategy: str,
        budget: tuple[float | None, float | None],
    ) -> Plan:
        """The plan with all evidence; layers that no pipeline can attend in are dense."""
        parts = {}
        for unit, option in zip(self.units, taken, strict=True):
            whole = len(unit.heads) == unit.kv_heads
            text_kl, answer_kl = map(_short, option.losses) if option.losses else (None, None)
            parts[unit.layer, unit.heads] = Part(
                unit.layer,
                None if whole else unit.heads,
                candidates.get(option.name),
                1.0 if option.name == DENSE else _short(costs.density[unit, option.name]),
                text_kl,
                answer_kl,
                _short(costs.ms(unit, option.name)),
            )
        for layer in set(range(self.model.layers)) - {unit.layer for unit in self.units}:
            parts[layer, ()] = Part(layer, None, None, 1.0, 0.0, 0.0, 0.0)
        noise = [loss for loss, _ in self.verifier.noise({unit.layer for unit in self.units}).values()]
        every = [*self.prompts, *self.verifier.held]
        evidence = Evidence(
            strategy=strategy,
            minimise=costs.minimise,
            text_kl_budget=budget[0],
            answer_kl_budget=budget[1],
            tokens=tuple(sorted({prompt.ids.shape[1] for prompt in every})),
            prompts=self.about["prompts"],
            held=self.about["held"],
            answers=sum(self.verifier.answers().values()),
            dense_found=sum(self.verifier.dense_found().values()),
            noise_text_kl=_short(max(loss.text for loss in noise)),
            noise_answer_kl=_short(max(loss.answers for loss in noise)),
            dense_ms=_short(sum(costs.ms(unit, DENSE) for unit in self.units)),
            batch=self.batch,
            plan=tried,
            tries=tuple(tries),
            candidates=len(candidates),
            dtype=self.about["dtype"],
            device=self.about["device"],
            versions=self.about["versions"],
        )
        self.bench.work.ends()
        return Plan(self.model, tuple(parts[key] for key in sorted(parts)), evidence)

    def _layers(self, names: Sequence[str], candidates: Mapping[str, Candidate]) -> dict[int, LayerPipeline]:
        """The layers that are not wholly dense, and what attends in them."""
        groups: dict[int, dict[Heads, AnyPipeline | None]] = {}
        for unit, name in zip(self.units, names, strict=True):
            groups.setdefault(unit.layer, {})[unit.heads] = None if name == DENSE else candidates[name].pipeline()
        layers: dict[int, LayerPipeline] = {}
        for layer, of_heads in groups.items():
            only, *more = of_heads.values()
            if more and any(pipeline is not None for pipeline in of_heads.values()):
                layers[layer] = HeadGroups(of_heads)
            elif only is not None:
                layers[layer] = only
        return layers


def _longest(prompts: Sequence[TunePrompt]) -> TunePrompt:
    return max(prompts, key=lambda prompt: prompt.ids.shape[1])


def _short(number: float) -> float:
    """Five digits that count, for people to read."""
    return float(f"{number:.5g}")
