"""One method on one model at one length: scores, KL by kind of text, density, and time to first token."""

from __future__ import annotations

import ast
import builtins
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from benchmarks.model import without_attention
from benchmarks.tasks.sample import Sample
from blocksparse.check.validators import UserError
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.layers.schedule import Schedule, schedule_of
from blocksparse.presets.named import names_function, read
from blocksparse.tools.demo.model import Model

DENSE, BOUND = "dense", "no attention"
"""Rows that are not pipelines: the model's own attention, and the model without any, the bound of speedups."""


@final
@frozen(eq=False)
class Windows:
    """Windows of text of one kind, and what dense attention predicts in them."""

    kind: str
    ids: Sequence[Tensor]  # [1, N] each
    at: Tensor  # [P], positions that are compared, evenly spread
    dense: Sequence[Tensor]  # [P, V] fp32 log-probabilities each

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Model, kind: str, text: str, *, tokens: int, count: int, positions: int) -> Windows:
        """`count` windows spread evenly over `text`; fewer where it is shorter."""
        ids = model.tokenizer.encode(text[: 12 * tokens * count], add_special_tokens=False)
        if len(ids) < tokens:
            raise SystemExit(
                f"the {kind} text has {len(ids)} tokens, and a window needs {tokens}: leave --kinds out"
            )
        count = min(count, len(ids) // tokens)
        starts = [(len(ids) - tokens) * i // max(1, count - 1) for i in range(count)]
        windows = [torch.tensor([ids[s : s + tokens]], device=model.device) for s in starts]
        at = torch.linspace(0, tokens - 2, positions, dtype=torch.float64).round().long().to(model.device)
        return cls(kind, windows, at, [predicted(model, window, at) for window in windows])

    @torch.inference_mode()
    def kl(self, model: Model) -> list[float]:
        """KL of what the model predicts now from what it predicts densely, in nats, a mean for each window."""
        found = []
        for window, dense in zip(self.ids, self.dense, strict=True):
            now = predicted(model, window, self.at)
            terms = dense.exp().mul_(dense - now).masked_fill_(dense == float("-inf"), 0.0)
            found.append(float(terms.sum(-1, dtype=torch.float64).mean()))
        return found


def predicted(model: Model, ids: Tensor, at: Tensor) -> Tensor:
    """Log-probabilities of the next token at the positions `at`, `[P, V]` fp32."""
    logits: Tensor = model.network(ids, use_cache=False, logits_to_keep=at).logits[0]
    return logits.float().log_softmax(-1)


def pipeline_of(method: str) -> Schedule:
    """The pipelines of a method: a Python expression of `blocksparse`'s names, or text as `--preset` takes.

    A name that neither Python nor `blocksparse` has is a module, which is imported: `my_stages.mine(0.9)`.

    Raises:
        UserError: the expression fails, or is no pipeline.
    """
    try:
        if names_function(method):
            return schedule_of(read(method, "--methods"))
        names: dict[str, Any] = dict(vars(bs))
        for node in ast.walk(ast.parse(method, mode="eval")):
            if isinstance(node, ast.Name) and node.id not in names and not hasattr(builtins, node.id):
                names[node.id] = import_module(node.id)
        return schedule_of(eval(method, names))
    except (SyntaxError, ImportError, NameError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"'--methods' must be presets as in \"auto('fast')\", or functions of yours in the current folder or "
            f"PYTHONPATH as in 'my_stages.mine(0.9)': {method}: {error}"
        ) from None


@contextmanager
def attending(model: Model, method: str, recorder: DensityRecorder | None = None) -> Iterator[None]:
    """The model attends by `method`, which `pipeline_of` takes, as users attach."""
    if method == DENSE:
        yield
    elif method == BOUND:
        with without_attention(model.network):
            yield
    else:
        with attach(model.network, pipeline_of(method), recorder=recorder):
            yield


@torch.inference_mode()
def scores(
    model: Model, method: str, samples: Mapping[str, Sequence[Sample]], *, at_once: int
) -> dict[str, list[float]]:
    """Scores of greedy answers, by task. Prompts of one length are prefilled `at_once` tokens at a time."""
    flat = [(task, i, sample) for task, some in samples.items() for i, sample in enumerate(some)]
    flat.sort(key=lambda entry: entry[2].new_tokens)
    found = {task: [0.0] * len(some) for task, some in samples.items()}
    size = max(1, at_once // len(flat[0][2].ids)) if flat else 1
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        ids = torch.tensor([sample.ids for _, _, sample in part], device=model.device)
        with attending(model, method):
            read = model.network(ids, use_cache=True, logits_to_keep=1)
        token, written = read.logits[:, -1:].argmax(-1), []
        for step in range(max(sample.new_tokens for _, _, sample in part)):
            written.append(token)
            if step + 1 < part[-1][2].new_tokens:
                read = model.network(token, past_key_values=read.past_key_values, use_cache=True, logits_to_keep=1)
                token = read.logits[:, -1:].argmax(-1)
        for (task, i, sample), reply in zip(part, torch.cat(written, 1).tolist(), strict=True):
            found[task][i] = sample.score(model.tokenizer.decode(reply[: sample.new_tokens]))
        del read
    return found


@torch.inference_mode()
def losses(
    model: Model, method: str, windows: Sequence[Windows]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """KL of each window and the mean density, both by kind of text."""
    kl, density = {}, {}
    for some in windows:
        recorder = DensityRecorder()
        with attending(model, method, recorder):
            kl[some.kind] = some.kl(model)
        density[some.kind] = 1.0 if method == DENSE else recorder.mean_density()
    return kl, density


@torch.inference_mode()
def ttft_ms(model: Model, method: str, ids: Tensor, repeats: int) -> float:
    """Median time of a prefill of `ids` `[1, N]` with a cache, up to the choice of the next token."""
    times = []
    with attending(model, method):
        for _ in range(repeats + 2):
            _wait(ids)
            start = time.perf_counter()
            model.network(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])  # two prefills compile and warm up


def versions() -> dict[str, Any]:
    """What the figures were measured with."""
    import platform

    import transformers

    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    )
    found = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        import triton

        found["triton"] = triton.__version__
    return {**found, "python": platform.python_version(), "blocksparse": bs.__version__}


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
