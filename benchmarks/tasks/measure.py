"""One method on all tasks of one length, and on windows of text: scores, KL, perplexity, density and time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from benchmarks.tasks.methods import Method
from benchmarks.tasks.sample import Sample
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.tools.demo.measure import perplexity
from blocksparse.tools.demo.model import Model
from blocksparse.tools.demo.watch import watch
from blocksparse.tools.tune.prompts import TunePrompt
from blocksparse.tools.tune.sensitivity import Reading

_TOKENS_AT_ONCE = 262144  # of prompts that are read in one batch, on a GPU


@final
@frozen
class Result:
    """What one method gave at one length."""

    preset: str
    setting: str
    tokens: int
    scores: Mapping[str, Sequence[float]]  # by task, one for each sample
    density: float  # mean over layers and windows; dense layers count as 1
    kl: float  # nats, mean over windows; the noise of kernels is not subtracted
    perplexity: float
    attention_ms: float | None = None  # of one window, summed over layers; None until it is measured


@contextmanager
def attached(model: Model, method: Method, recorder: DensityRecorder | None = None) -> Iterator[None]:
    """The model reads by the method, at any length."""
    if method.attention is None:
        yield
    else:
        with attach(model.network, method.attention, min_tokens=1, min_queries=2, recorder=recorder):
            yield


@torch.inference_mode()
def replies(model: Model, method: Method, samples: Sequence[Sample]) -> list[str]:
    """Greedy continuations of samples that are equally long; only reading is sparse, writing is dense."""
    tokens, written = len(samples[0].ids), [""] * len(samples)
    batch = max(1, _TOKENS_AT_ONCE // tokens) if model.device.type == "cuda" else 1
    # Those that write equally much stand together, of whatever task they are.
    order = sorted(range(len(samples)), key=lambda i: samples[i].new_tokens)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        ids = torch.tensor([samples[i].ids for i in part], device=model.device)
        with attached(model, method):
            read = model.network(ids, use_cache=True, logits_to_keep=1)
        token, tokens_so_far = read.logits[:, -1:].argmax(-1), []
        for _ in range(max(samples[i].new_tokens for i in part)):
            tokens_so_far.append(token)
            read = model.network(token, past_key_values=read.past_key_values, use_cache=True, logits_to_keep=1)
            token = read.logits[:, -1:].argmax(-1)
        for i, reply in zip(part, torch.cat(tokens_so_far, 1).tolist(), strict=True):
            written[i] = model.tokenizer.decode(reply[: samples[i].new_tokens], skip_special_tokens=True)
    return written


@final
@frozen(eq=False)
class Texts:
    """Windows of text that dense attention has read."""

    readings: Sequence[Reading]

    @classmethod
    def of(cls, model: Model, windows: Sequence[Tensor], positions: int) -> Texts:
        """Windows are `[1, N]`."""
        return cls(
            [
                Reading.of(model.network, TunePrompt(ids), positions=positions, keep_outputs=False)
                for ids in windows
            ]
        )


@torch.inference_mode()
def measure(model: Model, method: Method, samples: Mapping[str, Sequence[Sample]], texts: Texts) -> Result:
    """Everything about one method but its time."""
    losses, perplexities, recorder = [], [], DensityRecorder()
    for reading in texts.readings:
        with attached(model, method, recorder):
            losses.append(reading.losses().text)
        ids = reading.prompt.ids
        with attached(model, method):
            hidden = model.network.model(ids, use_cache=False).last_hidden_state
        counted = torch.ones(ids.shape[1], dtype=torch.bool, device=ids.device)
        perplexities.append(perplexity(model.network, hidden, ids, counted))
    flat = [sample for some in samples.values() for sample in some]
    scores = (s.score(reply) for s, reply in zip(flat, replies(model, method, flat) if flat else (), strict=True))
    return Result(
        method.preset,
        method.setting,
        texts.readings[0].prompt.ids.shape[1],
        {task: [next(scores) for _ in some] for task, some in samples.items()},
        recorder.mean_density(),
        statistics.fmean(losses),
        statistics.fmean(perplexities),
    )


@torch.inference_mode()
def attention_ms(model: Model, method: Method, texts: Texts, *, batch: int, repeats: int) -> float:
    """The median time of attention in all layers, over windows and repeats; a call has a window `batch` times."""
    windows = [reading.prompt.ids for reading in texts.readings]
    times = []
    for ids in (windows[0], *(ids for ids in windows for _ in range(repeats))):  # the first one warms up
        with attached(model, method), watch(model.network) as sight:
            model.network.model(ids.repeat(batch, 1), use_cache=False)
            times.append(1000 * sight.seconds())
    return statistics.median(times[1:])
