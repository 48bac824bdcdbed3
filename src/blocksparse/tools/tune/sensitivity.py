"""Effects of each candidate on each unit: on its attention, and on predictions with that unit alone sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from attrs import asdict, field, frozen
from torch import Tensor

from blocksparse.execute.auto import AutoExecutor
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.schedule import LayerPipeline, Schedule, text_config
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.order.permutation import Identity
from blocksparse.pipeline import Pipeline
from blocksparse.presets.candidate import Candidate, TuneError
from blocksparse.score.scorer import NoScorer
from blocksparse.select.top_k import Threshold
from blocksparse.spec import AttentionSpec
from blocksparse.tools.tune.cost import DENSE, Evaluation, Unit, milliseconds
from blocksparse.tools.tune.journal import Journal, Work
from blocksparse.tools.tune.prompts import TunePrompt
from blocksparse.tools.tune.reading import Call, Loss, Reading, on_attention

# A selector that says beforehand that it keeps everything would be left out for dense attention.
EVERYTHING: AnyPipeline = Pipeline(Identity(), NoScorer(128), Threshold(-1.0), AutoExecutor(dense_below=0))
"""Keeps every block, so what it loses is the noise of another kernel."""

EVALUATION = 0.1  # of a dense reading, about; only the estimate of the time left rests on it


@final
@frozen(eq=False)
class Bench:
    """A model, and the measurements that were made with it so far."""

    network: Any
    journal: Journal
    work: Work
    positions: int  # of the text at which predictions are compared
    _read: dict[int, Reading] = field(factory=dict, init=False)

    def attached(self, layers: Mapping[int, LayerPipeline | None], recorder: DensityRecorder | None = None) -> Any:
        """The model with these layers sparse, at any length."""
        from blocksparse.hosts.transformers import attach

        schedule = Schedule(None, layers=layers)
        return attach(self.network, schedule, min_tokens=1, min_queries=1, recorder=recorder, min_window=None)

    def sparse_layers(self, prompt: TunePrompt, layers: int) -> list[int]:
        """Layers that attend as a pipeline may: causal, without a window or another mask, a softcap or sinks."""

        def measure() -> list[int]:
            recorder, plain = DensityRecorder(), set[int]()

            def see(call: Call) -> None:
                if call.plain:
                    plain.add(call.layer)

            attached = self.attached(dict.fromkeys(range(layers), EVERYTHING), recorder)
            with attached, on_attention(self.network, see), torch.inference_mode():
                self.network(prompt.ids.to(self.network.device), use_cache=False, logits_to_keep=1)
            if not (found := sorted(plain & set(recorder.sparse_calls()))):
                reasons = {why for calls in recorder.dense_calls().values() for why in calls}
                reasons |= {"softcap or attention sinks, which tune does not compare"} if not plain else set()
                raise TuneError(
                    f"no layer of the model can be sparse. Its attention is dense: {', '.join(reasons)}."
                )
            return found

        found: list[int] = self.journal.once("layers that can be sparse", measure)
        return found

    def reading(self, prompt: TunePrompt, *, keep_outputs: bool) -> Reading:
        """A dense reading, made when it is first needed; of those with outputs of layers only the last is held."""
        if id(prompt) not in self._read:
            for other in [other for other, reading in self._read.items() if reading.outputs]:
                del self._read[other]
            self._read[id(prompt)] = Reading.of(
                self.network, prompt, positions=self.positions, keep_outputs=keep_outputs
            )
        return self._read[id(prompt)]

    def holds_outputs(self, prompt: TunePrompt) -> bool:
        """Whether a run of the prompt may start from any layer without reading the prompt again."""
        return id(prompt) in self._read and bool(self._read[id(prompt)].outputs)

    def evaluations(
        self, number: int, prompt: TunePrompt, candidates: Mapping[Unit, Sequence[Candidate]]
    ) -> dict[Unit, dict[str, Evaluation]]:
        """Density and error of candidates on each unit's q, k and v of one dense reading of the prompt.

        Args:
            number: of the prompt, which tells it from others in the journal.
        """

        def key(unit: Unit, candidate: Candidate) -> str:
            return f"evaluation {number} {unit} {candidate}"

        missing = {
            unit: [x for x in some if not self.journal.knows(key(unit, x))] for unit, some in candidates.items()
        }

        def see(call: Call) -> None:
            for unit, some in missing.items():
                if unit.layer != call.layer or not some:
                    continue
                part = unit.part(call.q, call.k, call.v)
                dense = dense_attention(*part, AttentionSpec(scale=call.scale))
                for candidate in some:
                    trace = candidate.pipeline().trace(*part, scale=call.scale)
                    evaluation = Evaluation(float(trace.density().mean()), _distance(trace.output.out, dense))
                    self.journal.note(key(unit, candidate), asdict(evaluation))
                    self.work.did("comparing attention", EVALUATION)

        known = sum(map(len, candidates.values())) - sum(map(len, missing.values()))
        self.work.did("comparing attention", EVALUATION * known, now=False)
        if any(missing.values()):
            self._read_with(prompt, see)
        return {
            unit: {str(x): Evaluation(**self.journal[key(unit, x)]) for x in some}
            for unit, some in candidates.items()
        }

    def times(
        self, prompt: TunePrompt, candidates: Mapping[Unit, Sequence[Candidate]], batch: int = 1
    ) -> dict[tuple[Unit, str], float]:
        """Milliseconds of candidates on some units; those of the whole layer's own attention are named "dense".

        Args:
            batch: how many times a call has the prompt.
        """

        def key(unit: Unit, name: str) -> str:
            return f"time {unit} {name}" + (f" of {batch} prompts" if batch > 1 else "")

        names = {unit: [DENSE, *map(str, some)] for unit, some in candidates.items()}
        missing = {unit: [x for x in some if not self.journal.knows(key(unit, x))] for unit, some in names.items()}

        def see(call: Call) -> None:
            for unit in (unit for unit in candidates if unit.layer == call.layer):
                whole = tuple(x.repeat(batch, 1, 1, 1) for x in (call.q, call.k, call.v))
                part = unit.part(*whole)
                calls: dict[str, Callable[[], Any]] = {DENSE: partial(call.own, *whole)}
                calls |= {str(x): partial(x.pipeline(), *part, scale=call.scale) for x in candidates[unit]}
                for name in missing[unit]:
                    self.journal.note(key(unit, name), milliseconds(calls[name], call.q.device))
                    self.work.did("timing", 3 * EVALUATION)

        if any(missing.values()):
            self._read_with(prompt, see)
        self.work.is_over("timing")
        return {(unit, name): self.journal[key(unit, name)] for unit, some in names.items() for name in some}

    def losses(self, number: int, prompt: TunePrompt, unit: Unit, candidate: Candidate) -> tuple[float, float]:
        """KL of one unit over the text and at answers with this candidate while all else is dense.

        What is lost with every block kept, to another kernel, is subtracted.

        Args:
            number: of the prompt.
        """
        key = f"loss {number} {unit} {candidate}"
        now = not self.journal.knows(key)

        def measure(pipeline: AnyPipeline) -> dict[str, Any]:
            reading = self.reading(prompt, keep_outputs=True)
            with self.attached({unit.layer: unit.alone(pipeline)}):
                return asdict(reading.losses(unit.layer))

        noise = self.journal.once(f"loss {number} {unit} everything", partial(measure, EVERYTHING))
        loss = self.journal.once(key, lambda: measure(candidate.pipeline()))
        self.work.did("running the model", self.part_of_a_reading(unit), now=now)
        return Loss(**loss).less(Loss(**noise))

    def part_of_a_reading(self, unit: Unit) -> float:
        """The work of a run from this layer on, in dense readings."""
        layers = int(text_config(self.network).num_hidden_layers)
        return 0.2 + (layers - unit.layer) / layers

    def _read_with(self, prompt: TunePrompt, see: Callable[[Call], None]) -> None:
        with on_attention(self.network, see), torch.inference_mode():
            self.network(prompt.ids.to(self.network.device), use_cache=False, logits_to_keep=1)


def _distance(out: Tensor, dense: Tensor) -> float:
    """Relative L1, in float64."""
    distance = (out.double() - dense.double()).abs().sum() / dense.double().abs().sum()
    return float(distance)
