"""`generate_batch`: requests of many lengths in one batch, with a paged cache."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from tests.hosts.test_transformers import LAYERS, SPARSE, attached, make, tokens
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blocksparse.hosts.transformers import DensityRecorder, attach

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers about its own configuration
OLD = "cache" not in inspect.signature(sdpa_attention_forward).parameters
new = pytest.mark.skipif(OLD, reason="an older transformers")
PROMPTS = [tokens(n)[0].tolist() for n in (70, 33, 90)]


def generated(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    how = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes: dict[str, Any] = {"num_blocks": 20, "max_batch_tokens": 256}
    batching = transformers.ContinuousBatchingConfig(auto_switch_to_flash=False, **sizes)
    answers = model.generate_batch(prompts, generation_config=how, continuous_batching_config=batching)
    return [answer.generated_tokens for _, answer in sorted(answers.items())]


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    forward = "blocksparse.hosts.transformers.adapter.sdpa_attention_forward"
    monkeypatch.setattr(forward, lambda module, query, key, value, mask: None)
    with pytest.raises(ValueError, match=r"continuous batching needs transformers 5\.23 or later: 5"):
        attach(model, SPARSE, continuous_batching=True)
    assert model.config._attn_implementation == "eager"


@pytest.mark.slow
@new
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_requests_are_sparse_one_by_one(name: str) -> None:
    """In the dense limit they get the model's tokens; sparse, the first ones are those of each prompt alone."""
    model, recorder = make(name), DensityRecorder()
    model.set_attn_implementation("sdpa")
    expected = generated(model)
    with attached(model, recorder, continuous_batching=True):
        assert generated(model) == expected
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 3)
    assert recorder.dense_calls() == {layer: {"decode": 2} for layer in range(LAYERS)}
    recorder.clear()
    with attached(model, recorder, SPARSE, continuous_batching=True):
        answers = generated(model)
    assert float(recorder.density().max()) < 0.7
    with attached(model, None, SPARSE):
        first = [int(model(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in PROMPTS]
    assert [answer[0] for answer in answers] == first
    assert model.config._attn_implementation == "sdpa"
    assert generated(model) == expected


@new
def test_other_calls_and_other_models_are_as_before() -> None:
    model, other, recorder, ids = make("llama"), make("qwen3"), DensityRecorder(), tokens(60)
    for each in (model, other):
        each.set_attn_implementation("sdpa")
    expected = [each(ids).logits for each in (model, other)]

    def unchanged() -> bool:
        found: list[Tensor] = [each(ids).logits for each in (model, other)]
        return all(map(torch.equal, found, expected))

    below = attach(other, SPARSE, min_tokens=1, recorder=recorder, continuous_batching=True)
    with attach(model, SPARSE, min_tokens=1, recorder=recorder, continuous_batching=True):
        assert unchanged()
        assert copy.deepcopy(model).config._attn_implementation == "sdpa"
        below.detach()
        assert unchanged()
    assert recorder.sparse_calls() == recorder.dense_calls() == {}
    first = attach(model, SPARSE)
    with attach(model, SPARSE, continuous_batching=True), pytest.raises(RuntimeError, match="below a later"):
        first.detach()
    first.detach()
    assert model.config._attn_implementation == "sdpa"
