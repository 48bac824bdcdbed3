"""Layers with a sliding window: sparse or exactly dense within it, against the model's own attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from attrs import evolve
from tests.hosts.test_transformers import (
    DENSE_LIMIT,
    LAYERS,
    MODELS,
    SPARSE,
    WINDOW,
    all_sparse,
    assert_same_logits,
    attached,
    in_chunks,
    make,
    tokens,
)
from tests.hosts.test_transformers_logits import assert_same_in_groups_and_audited
from tests.largest import Largest
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from blocksparse import CpuExecutor, Everything, GatherExecutor, Ranked
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.hosts.transformers.mask_request import mask_of
from blocksparse.hosts.transformers.prompt_mask import PromptMask
from blocksparse.layers.schedule import LayerPipeline, Schedule

CPU: Any = CpuExecutor()


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_the_pipeline_attends_within_windows(name: str, length: int) -> None:
    recorder = DensityRecorder()
    ids = tokens(length, batch=2)
    assert_same_logits(make(name), lambda model: model(ids).logits, recorder)
    assert all_sparse(recorder)
    # In a window all blocks of it are its whole density, whatever lies outside.
    assert float((recorder.density()[0] - 1).abs().max()) < 1e-9 or length > WINDOW
    assert_same_logits(make(name), lambda model: model(ids).logits, recorder, evolve(DENSE_LIMIT, executor=CPU))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("padding", [0, 9])
def test_layers_that_are_compiled_for_any_length_know_their_window(name: str, padding: int) -> None:
    """Whose size is then a symbol, as that of the mask is."""
    model, ids, recorder = make(name), tokens(100, batch=2), DensityRecorder()
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    expected = model(ids, attention_mask=mask).logits
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    with attached(model, recorder, min_window=WINDOW):
        actual = model(ids, attention_mask=mask).logits
    torch.compiler.reset()
    torch.testing.assert_close(actual[:, padding:], expected[:, padding:], atol=2e-4, rtol=1e-4)
    assert recorder.sparse_calls() == dict.fromkeys(
        range(LAYERS), 1 + bool(padding)
    )  # two prompts of a padded batch


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_are_dense_with_a_reason_where_nothing_else_pays_or_works(name: str) -> None:
    """Exactly, and only in the layers that have one."""
    model, ids = make(name), tokens(100, batch=2)
    sliding = range(LAYERS) if name == "mistral" else [0]
    ranked = evolve(DENSE_LIMIT, selector=Ranked(Everything()), executor=GatherExecutor(0.0))
    cases: list[tuple[LayerPipeline | Schedule, dict[str, Any], str]] = [
        (DENSE_LIMIT, {"min_window": None}, "sliding window"),
        (DENSE_LIMIT, {"min_window": WINDOW + 1}, "a sliding window of fewer than min_window"),
        (Schedule(DENSE_LIMIT, dense=sliding), {}, "no pipeline for this layer"),
        (ranked, {}, "GatherExecutor: it knows no sliding window, and this call has one of 48 tokens"),
    ]
    for pipeline, given, reason in cases:
        recorder, options = DensityRecorder(), {"min_window": WINDOW} | given
        assert_same_logits(model, lambda model: model(ids).logits, recorder, pipeline, **options)
        assert recorder.dense_calls() == {layer: Counter({reason: 1}) for layer in sliding}
        assert recorder.sparse_calls() == {layer: 1 for layer in range(LAYERS) if layer not in sliding}


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("padding", [0, 20])
def test_min_tokens_counts_what_the_cache_of_a_window_dropped(name: str, padding: int) -> None:
    """The layers with a window go sparse with the others, in the chunk that ends at token 75 and later."""
    model, ids, recorder = make(name), tokens(150 + padding), DensityRecorder()
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    with attached(model, recorder, SPARSE, min_tokens=75, min_window=WINDOW):
        in_chunks(model, ids, [25 + padding, 25, 25, 25, 25, 25], mask=mask)
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 4)
    assert recorder.dense_calls() == {x: {"fewer than min_tokens": 2} for x in range(LAYERS)}


def test_a_short_window_is_the_reason_however_few_keys_a_chunk_sees() -> None:
    model, ids, recorder = make("mistral"), tokens(150), DensityRecorder()
    with attached(model, recorder, SPARSE, min_tokens=100, min_window=WINDOW + 1):
        in_chunks(model, ids, [30] * 5)
    reasons = {"fewer than min_tokens": 1, "a sliding window of fewer than min_window": 4}
    assert recorder.dense_calls() == dict.fromkeys(range(LAYERS), reasons)


def test_limits_of_windows_are_whole_numbers() -> None:
    for wrong, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        given: Any = wrong
        with pytest.raises(error, match="'min_window' must be a whole number, at least 1, or None: "):
            attach(make("mistral"), DENSE_LIMIT, min_window=given)


def test_windows_under_audits_and_in_groups_of_heads() -> None:
    ids = tokens(100, batch=2)
    assert_same_in_groups_and_audited(make("mistral"), ids, {(0,): None, (1,): DENSE_LIMIT})


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("sparse", [True, False])
def test_peak_memory_is_flat(name: str, sparse: bool) -> None:
    """Of layers with a window: nothing that is sparse, dense or eager grows with the square of a prompt."""
    config, largest = MODELS[name](), {}
    config.layer_types = ["sliding_attention"] * LAYERS
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    pipeline: Any = evolve(DENSE_LIMIT, executor=CPU)
    for length in (256, 512):
        ids = tokens(length)
        schedule = Schedule(pipeline if sparse else None)
        with attach(model, schedule, min_tokens=16, min_window=16), Largest() as seen:
            actual = model(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(actual, model(ids, use_cache=False).last_hidden_state, rtol=1e-4, atol=1e-4)
        largest[length] = seen.numbers
    assert largest[512] <= 2.1 * largest[256]


@pytest.mark.parametrize("kind", ["window", "chunks", "both sides", "other window"])
@pytest.mark.parametrize(("q_offset", "kv_offset"), [(0, 0), (60, 41)])
def test_only_requests_for_windows_are_taken_for_them(kind: str, q_offset: int, kv_offset: int) -> None:
    """Chunks of attention and windows to both sides come with a size, too."""
    functions = {
        "window": sliding_window_causal_mask_function(20),
        "chunks": chunked_causal_mask_function(20, torch.zeros(2, dtype=torch.int64)),
        "both sides": sliding_window_bidirectional_mask_function(20),
        "other window": sliding_window_causal_mask_function(19),
    }
    request: dict[str, Any] = {
        "batch_size": 2, "q_length": 50, "kv_length": q_offset + 50 - kv_offset, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": functions[kind], "local_size": 20,
    }  # fmt: skip
    mask: Any = mask_of(**request, device=torch.device("cpu"))
    assert isinstance(mask, PromptMask)
    assert mask.window == (20 if kind == "window" else None)
    assert (mask.request is None) == (kind == "window")
    want = sdpa_mask(**request, allow_is_causal_skip=False)
    assert torch.equal(mask.made(), want.expand(mask.made().shape))
    for start, stop in ((0, 7), (13, 50)):
        seen, rows = mask.columns(start, stop), want[:, :, start:stop]
        assert torch.equal(mask.rows(start, stop, seen).expand(rows[..., seen].shape), rows[..., seen])
        assert int(rows.sum()) == int(rows[..., seen].sum())


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_padded_chunks_beyond_the_window(name: str) -> None:
    """A cache hands over the last keys of each layer alone, and the padding of the whole prompt."""
    recorder, ids, mask = DensityRecorder(), tokens(150, batch=2), torch.ones(2, 150, dtype=torch.int64)
    mask[0, :33] = 0

    def run(model: Any) -> Tensor:
        return in_chunks(model, ids, [40, 45, 35, 30], mask=mask)[mask.bool()]

    assert_same_logits(make(name), run, recorder, evolve(DENSE_LIMIT, executor=CPU))
    # Prompt by prompt, and both at once where the keys of a layer hold no padding any more.
    assert recorder.sparse_calls() == {0: 5, 1: 5 if name == "mistral" else 7}
