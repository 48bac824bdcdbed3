"""The measured KL of a whole plan, on prompts that it was not tuned on, and the budgets to try next."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from attrs import asdict, define, frozen

from blocksparse.layers.schedule import LayerPipeline
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.presets.candidate import TuneError
from blocksparse.presets.plan import Try
from blocksparse.tools.tune.choice import Option
from blocksparse.tools.tune.prompts import TunePrompt, by_length
from blocksparse.tools.tune.reading import Loss
from blocksparse.tools.tune.sensitivity import EVERYTHING, Bench

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
    layers: int  # of the model

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
        rows = []
        for number, prompt in enumerate(self.held):
            key = f"plan {name} held {number}"
            if now := not self.bench.journal.knows(key):
                self.bench.journal.note(key, self._measure(prompt, layers))
            rows.append(self.bench.journal[key])
            self.bench.work.did("verifying", 2.0, now=now)
        found: Verified = {}
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
        with self.bench.attached(layers, recorder):
            loss = reading.losses()
        if dense := sorted(set(layers) & set(recorder.dense_calls())):
            raise TuneError(f"layer {dense[0]} was dense in a held prompt, though it was sparse in another one")
        sparse = float(recorder.density()[sorted(layers)].mean(-1).sum()) if layers else 0.0
        return {**asdict(loss), "density": (sparse + self.layers - len(layers)) / self.layers}


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

    def saw(self, true: float, *, others_fit: bool) -> None:
        """Take into account the measured KL of the plan for `budget * factor`.

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
            self._fails = min(self._fails, self.factor)
            self.factor *= max(0.8 * ratio, 0.1)
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
    last it is `dense`.
    """
    searches = [Search(budget) for budget in budgets]
    tries: list[Try] = []
    best: tuple[float, list[Option], Try] | None = None
    last = rounds + _MORE_ROUNDS
    for number in range(last + 1):
        if number >= rounds and best is not None:
            break
        taken = dense if number == last else choice([search.budget * search.factor for search in searches])
        tried = measure(taken)
        tries.append(tried)
        losses = [tried.text_kl, tried.answer_kl]
        if any(each.dense_found - each.found > max(1.0, _LOST * each.dense_found) for each in tried.lengths):
            losses[1] = max(losses[1], 1.25 * budgets[1])
        fits = all(search.fits(true) for search, true in zip(searches, losses, strict=True))
        for search, true in zip(searches, losses, strict=True):
            search.saw(true, others_fit=fits)
        cost = sum(option.cost for option in taken)
        if fits and (best is None or cost < best[0]):
            best = cost, taken, tried
    assert best is not None  # the last try is dense, whose KL is 0
    return best[1], best[2], tries
