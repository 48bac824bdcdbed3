"""One row of the table: a model reads a text with a fact planted in it, and answers a question about the fact."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.functional import cross_entropy

from blocksparse.check.validators import UserError
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.inputs import MAX_HEAD_DIM
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.schedule import base_model, logits_of
from blocksparse.spec import AttentionOptions
from blocksparse.tools.bench import executor_of
from blocksparse.tools.demo.model import Model
from blocksparse.tools.demo.watch import QKV, watch

_CITIES = ("Berlin", "Cairo", "Dublin", "Lima", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Tokyo", "Vienna")


@final
@frozen(eq=False)
class Prompt:
    """Tokens to read, and what they ask for."""

    ids: Tensor  # [1, N] int64
    is_text: Tensor  # [N] bool, the tokens that come from the text: perplexity is over these
    needle: str
    question: str
    answer: str
    needle_at: int  # token at which the needle starts

    def is_answered_by(self, reply: str) -> bool:
        """Whether the reply, without white space around it, begins with the answer."""
        return reply.startswith(self.answer)


def build(tokenizer: Any, text: str, *, tokens: int, depth: float, seed: int = 0) -> Prompt:
    """A prompt of exactly `tokens` tokens: the start of `text`, the needle at `depth` in it, the question.

    Args:
        depth: share of the text before the needle, in [0, 1]. The needle goes to the paragraph end before it.
        seed: chooses the city and the number of the needle.
    """
    choose = random.Random(seed)
    city, answer = choose.choice(_CITIES), str(choose.randrange(10_000, 100_000))
    needle = f"The magic number for {city} is {answer}."
    question = f"Question: What is the magic number for {city}?\nAnswer: The magic number for {city} is"

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer.encode(part, add_special_tokens=False)
        return ids

    start_ids: list[int] = tokenizer.encode("")  # what the model expects at the start of every text, if anything
    needle_ids, question_ids = encode(needle + "\n\n"), encode("\n\n" + question)
    room = tokens - len(start_ids) - len(needle_ids) - len(question_ids)
    if room < 1:
        raise UserError(f"'--tokens' must be over {tokens - room}, the length of fact and question: {tokens}")
    # Ten characters a token is more than any prose needs, so this is the same start as of the whole text.
    text_ids = encode(text[: 10 * room])[:room]
    if len(text_ids) < room:
        raise UserError(
            f"the text has {len(text_ids)} tokens, and {room} are needed. Choose a smaller '--tokens'."
        )

    place = round(depth * room)
    while 0 < place < room and "\n" not in tokenizer.decode(text_ids[place - 1]):
        place -= 1
    parts = (  # tokens, and whether they come from the text
        (start_ids, False),
        (text_ids[:place], True),
        (needle_ids, False),
        (text_ids[place:], True),
        (question_ids, False),
    )
    ids = torch.tensor([[token for part, _ in parts for token in part]])
    is_text = torch.tensor([comes for part, comes in parts for _ in part])
    return Prompt(ids, is_text, needle, question, answer, len(start_ids) + place)


_ANSWER_TOKENS = 8
_WARM_UP = 512
_CHUNK = 128  # logits of more are so large that the system maps and clears their memory each time


@final
@frozen
class MethodResult:
    """Results of one method. Times are in seconds."""

    method: str
    first_token_s: float  # from the prompt to the first answer token
    attention_s: float  # of that, spent in attention, summed over layers
    density: float  # work as a share of dense attention's, mean over layers and heads
    perplexity: float  # of the text
    reply: str
    right: bool
    executor: str  # which one ran, why not the faster ones, and which layers stayed dense
    compile_s: float  # the first call of the pipeline, before the clock starts
    pipeline: str  # as Python, to paste
    qkv: QKV | None = field(default=None, eq=False, repr=False)
    asked: AttentionOptions = field(factory=AttentionOptions, eq=False, repr=False)  # in the call of `qkv`


@torch.inference_mode()
def measure(
    model: Model,
    prompt: Prompt,
    method: str,
    pipeline: AnyPipeline | None,
    *,
    warm_up: QKV | None = None,
    keep_layer: int | None = None,
    on_layer: Callable[[], None] | None = None,
) -> MethodResult:
    """Read the prompt once with `pipeline` (None is the model's own dense attention), then answer densely.

    Args:
        warm_up: one layer's q, k, v of this prompt, for the pipeline to compile on. Dense attention, or a
            pipeline without them, reads the start of the prompt first.
        keep_layer: the layer whose q, k, v and options the row keeps.
        on_layer: called after each layer's attention.
    """
    network, ids, recorder = model.network, prompt.ids.to(model.device), DensityRecorder()
    begin, executor = time.perf_counter(), "sdpa"
    if pipeline is None or warm_up is None:
        base_model(network)(ids[:, :_WARM_UP])
        _wait(model.device)
    else:
        if (widest := max(x.shape[3] for x in warm_up)) > MAX_HEAD_DIM:
            raise UserError(
                f"the head dim of {model.name} is {widest}, above {MAX_HEAD_DIM}, so its attention stays dense. "
                "Demonstrate another model."
            )
        trace = pipeline.trace(*warm_up)
        _wait(model.device)
        executor = executor_of(pipeline, trace)
    compile_s = time.perf_counter() - begin

    # The prompt is longer than attach's own limit for dense attention, or the user wants it sparse all the same.
    everywhere: dict[str, Any] = {"min_tokens": 1, "min_queries": 1, "recorder": recorder}
    sparse = nullcontext() if pipeline is None else attach(network, pipeline, **everywhere)
    with sparse, watch(network, keep_layer=keep_layer, on_call=on_layer) as sight:
        begin = time.perf_counter()
        read = base_model(network)(ids, use_cache=True)
        token = _next(network, read.last_hidden_state)
        _wait(model.device)
        first_token_s = time.perf_counter() - begin
        attention_s = sight.seconds()
    dense, left = recorder.dense_calls(), sorted(set(recorder.dense_calls()) - set(recorder.sparse_calls()))
    if left:
        reasons = ", ".join(sorted({because for layer in left for because in dense[layer]}))
        some = f"dense in layers {', '.join(map(str, left))} ({reasons})"
        executor = f"{executor}; {some}" if recorder.sparse_calls() else f"dense in all layers ({reasons})"

    return MethodResult(
        method,
        first_token_s,
        attention_s,
        recorder.mean_density(),
        perplexity(network, read.last_hidden_state, ids, prompt.is_text.to(model.device)),
        reply := answer(model, token, read.past_key_values),
        prompt.is_answered_by(reply),
        executor,
        compile_s,
        repr(pipeline),
        sight.kept,
        sight.asked,
    )


def perplexity(network: Any, hidden: Tensor, ids: Tensor, counted: Tensor) -> float:
    """Perplexity of the tokens `counted` `[N]` of `ids` `[1, N]`, from `hidden` `[1, N, C]`, in small parts."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    target = ids[0, 1:].masked_fill(~counted[1:], -100)
    for start in range(0, len(target), _CHUNK):
        part = target[start : start + _CHUNK]
        logits = logits_of(network, hidden[0, start : start + len(part)])
        total += cross_entropy(logits, part, ignore_index=-100, reduction="sum").double()
    return float((total / counted[1:].sum()).exp())


def answer(model: Model, token: Tensor, cache: Any) -> str:
    """The first line, less its full stop, of the greedy continuation from `token` `[1, 1]` after `cache`."""
    tokens = [token]
    for _ in range(_ANSWER_TOKENS - 1):
        read = base_model(model.network)(tokens[-1], past_key_values=cache, use_cache=True)
        tokens.append(_next(model.network, read.last_hidden_state))
    text: str = model.tokenizer.decode(torch.cat(tokens, dim=1)[0], skip_special_tokens=True)
    return text.strip().split("\n")[0].rstrip(".")


def _next(network: Any, hidden: Tensor) -> Tensor:
    return logits_of(network, hidden[:, -1:]).argmax(-1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
