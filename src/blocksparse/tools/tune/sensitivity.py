"""Effects of each candidate on each unit: on its attention, and on predictions with that unit alone sparse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from attrs import asdict, field, frozen
from torch import Tensor, nn

from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.schedule import Schedule, text_config
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.presets.named import Candidate, TuneError
from blocksparse.spec import AttentionSpec
from blocksparse.tools.demo.model import sees_later_tokens, unlike_at_the_end
from blocksparse.tools.demo.watch import EVERYTHING, QKV, OwnAttention, watch
from blocksparse.tools.tune.choice import DENSE, Evaluation, Unit, milliseconds
from blocksparse.tools.tune.journal import Journal, Work
from blocksparse.tools.tune.prompts import TunePrompt


@final
@frozen
class Loss:
    """KL and accuracy drop of a prompt against dense attention."""

    text: float  # KL of next-token distributions in nats, mean over positions of the text
    answers: float  # the same over the tokens of answers; 0 if there are none
    found: int  # answers of which every token is the likeliest one

    def less(self, noise: Loss) -> tuple[float, float]:
        """Both KLs less those of another kernel that keeps everything; the result is at least 0."""
        return max(0.0, self.text - noise.text), max(0.0, self.answers - noise.answers)


@final
@frozen(eq=False)
class Reading:
    """A prompt, what dense attention predicts in it, and the outputs of the model's layers if they were kept."""

    network: Any
    prompt: TunePrompt
    at: Tensor  # [P] int64, positions at which predictions are compared: those of answers first
    dense: Tensor  # [P, V] fp32, log-probabilities of the next token
    outputs: tuple[Any, ...]  # of each decoder layer; empty if they were not kept
    found: int  # answers that dense attention finds

    @classmethod
    @torch.inference_mode()
    def of(cls, network: Any, prompt: TunePrompt, *, positions: int, keep_outputs: bool) -> Reading:
        """Read `prompt` densely.

        Args:
            positions: how many positions of the text to compare.
            keep_outputs: also keep the output of each layer, so that `losses` may start from any layer. Not of
                models whose layers share keys.
        """
        if "logits_to_keep" not in inspect.signature(network.forward).parameters:
            raise TuneError(
                f"{type(network).__name__} gives no logits of single positions (logits_to_keep). `tune` takes "
                "causal language models of transformers."
            )
        device = network.device
        prompt = TunePrompt(prompt.ids.to(device), prompt.answers)
        at = torch.cat((prompt.answers_at(), prompt.text_at(positions))).to(device)
        outputs: list[Any] = []
        skips = keep_outputs and not _layers_share_keys(text_config(network))
        hooks = [
            layer.register_forward_hook(lambda _, __, out: outputs.append(out))
            for layer in (decoder_layers(network) if skips else ())
        ]
        try:
            logits = _logits(network, prompt, at)
        finally:
            for hook in hooks:
                hook.remove()
        dense = logits.log_softmax(-1)
        found = _found(dense, prompt)
        # Of prompts that are read again and again, one is held at a time; of others, many are.
        return cls(network, prompt, at, dense if keep_outputs else dense.cpu(), tuple(outputs), found)

    @torch.inference_mode()
    def losses(self, first: int = 0) -> Loss:
        """Read again with what is attached to the model now, from layer `first` on; what is before is dense."""
        with self._from(first):
            again = _logits(self.network, self.prompt, self.at).log_softmax(-1)
        dense = self.dense.to(again.device)
        # Where dense attention rules a token out, it adds nothing: 0 times infinity would be NaN.
        terms = dense.exp() * (dense - again)
        each = terms.masked_fill_(dense == float("-inf"), 0.0).sum(-1).double()
        answers = len(self.prompt.answers_at())
        if not bool(each.isfinite().all()):
            raise TuneError("the model gives numbers that are not finite with sparse attention or without it")
        return Loss(  # no KL is below 0, but for rounding
            text=max(0.0, float(each[answers:].mean())),
            answers=max(0.0, float(each[:answers].mean())) if answers else 0.0,
            found=_found(again, self.prompt),
        )

    @contextmanager
    def _from(self, first: int) -> Iterator[None]:
        """Layers before `first` give what they gave before, without any work, if outputs were kept."""
        before = decoder_layers(self.network)[: first if self.outputs else 0]
        own = [vars(layer).get("forward") for layer in before]  # None where it is the method of the class
        for layer, output in zip(before, self.outputs, strict=False):
            layer.forward = partial(_again, output)
        try:
            yield
        finally:
            for layer, forward in zip(before, own, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward


@final
@frozen(eq=False)
class Call:
    """A call of attention by a model."""

    layer: int
    q: Tensor  # [B, Hq, M, D], with RoPE applied
    k: Tensor  # [B, Hkv, N, D]
    v: Tensor  # [B, Hkv, N, Dv]
    scale: float
    own: OwnAttention  # the model's own function, of q, k and v
    plain: bool  # whether it has neither a softcap nor attention sinks


def decoder_layers(network: Any) -> list[nn.Module]:
    """The decoder layers of a transformers model, in order."""
    count = int(text_config(network).num_hidden_layers)
    for module in (network.get_decoder() or network).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise TuneError(
        f"{type(network).__name__} does not keep its {count} layers in a list, so single layers cannot be tuned. "
        "Its class is not supported."
    )


def _layers_share_keys(config: Any) -> bool:
    """Whether later layers take keys of earlier ones, as in Gemma 3n, so that the earlier ones must run."""
    sources = getattr(config, "kv_source_layers", None) or ()
    return bool(getattr(config, "num_kv_shared_layers", 0)) or any(
        source != layer for layer, source in enumerate(sources)
    )


@contextmanager
def on_attention(network: Any, see: Callable[[Call], None]) -> Iterator[None]:
    """Show `see` each call of the attention function that `network` uses now, before it is made."""

    def on_qkv(layer: int, qkv: QKV, options: dict[str, Any], own: OwnAttention) -> None:
        scale = options.get("scaling")
        plain = all(options.get(name) is None for name in ("softcap", "s_aux", "sinks"))
        see(Call(layer, *qkv, qkv[0].shape[-1] ** -0.5 if scale is None else scale, own, plain))

    with watch(network, on_qkv=on_qkv):
        yield


def _again(output: Any, *_: Any, **__: Any) -> Any:
    # Copied, because the next layer may add to it in place.
    if isinstance(output, Tensor):
        return output.clone()
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in output)


def _logits(network: Any, prompt: TunePrompt, at: Tensor) -> Tensor:
    """`[P, V]` fp32. No cache is used, because layers that are left out would not write to it."""
    logits: Tensor = network(prompt.ids, use_cache=False, logits_to_keep=at).logits
    return logits[0].float()


def _found(predicted: Tensor, prompt: TunePrompt) -> int:
    likeliest, found, at = predicted.argmax(-1), 0, 0
    for start, stop in prompt.answers:
        found += bool((likeliest[at : at + stop - start] == prompt.ids[0, start:stop]).all())
        at += stop - start
    return found


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

    def attached(self, schedule: Schedule, recorder: DensityRecorder | None = None) -> Any:
        """The model with this schedule, at any length."""
        from blocksparse.hosts.transformers import attach

        return attach(self.network, schedule, min_tokens=1, min_queries=1, recorder=recorder, min_window=None)

    def sparse_layers(self, prompt: TunePrompt) -> dict[int, int]:
        """Number of KV heads of each layer that attends as a pipeline may.

        Such a layer is causal, without a window or another mask, a softcap or sinks.
        """

        def measure() -> list[tuple[int, int]]:
            self._refuse_not_causal()
            recorder, plain = DensityRecorder(), dict[int, int]()

            def see(call: Call) -> None:
                if call.plain:
                    plain[call.layer] = call.k.shape[1]

            attached = self.attached(Schedule(EVERYTHING), recorder)
            with attached, on_attention(self.network, see), torch.inference_mode():
                self.network(prompt.ids.to(self.network.device), use_cache=False, logits_to_keep=1)
            if not (found := sorted(plain.keys() & recorder.sparse_calls().keys())):
                reasons = {why for calls in recorder.dense_calls().values() for why in calls}
                reasons |= {"softcap or attention sinks, which tune does not compare"} if not plain else set()
                raise TuneError(
                    f"no layer of the model can be sparse. Its attention is dense: {', '.join(reasons)}."
                )
            if found[0] < 0:
                raise TuneError(
                    f"the attention of {type(self.network).__name__} does not say in which layer it is, so a plan "
                    "cannot name its layers. Attach one pipeline to all of them."
                )
            return [(layer, plain[layer]) for layer in found]

        return dict(self.journal.once("KV heads of layers that can be sparse", measure))

    @torch.inference_mode()
    def _refuse_not_causal(self) -> None:
        """Refuse a model that is causal only when attached: dense attention would be another model.

        PaliGemma sees its whole prompt where no token types tell the answer from the rest.
        """
        ids = unlike_at_the_end(self.network.device)
        if sees_later_tokens(self.network(ids, use_cache=False).logits):
            raise TuneError(
                f"{type(self.network).__name__} is not causal: its first tokens see later ones. `tune` takes "
                "decoders, for which some configs need is_decoder=True."
            )

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
                    error = (trace.output.out.double() - dense.double()).abs().sum() / dense.double().abs().sum()
                    evaluation = Evaluation(float(trace.density().mean()), float(error))
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
            with self.attached(Schedule(None, layers={unit.layer: unit.alone(pipeline)})):
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
