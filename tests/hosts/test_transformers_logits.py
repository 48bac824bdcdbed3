"""Layers with a window, a softcap or sinks: sparse or exactly dense, against the model's own attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers
from attrs import evolve
from tests.hosts.test_transformers import (
    DENSE_LIMIT,
    LAYERS,
    MODELS,
    SPARSE,
    WINDOW,
    all_dense,
    all_sparse,
    assert_same_logits,
    attached,
    in_chunks,
    make,
    tokens,
)
from tests.largest import Largest
from tests.machine import needs_gpu
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import eager_attention_forward

from blocksparse import AutoExecutor, CpuExecutor, Everything, GatherExecutor, Ranked, TritonExecutor
from blocksparse.check.per_head import read, read_changed_again
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.hosts.transformers.mask_request import mask_of
from blocksparse.hosts.transformers.own_function import refused_of
from blocksparse.hosts.transformers.prompt_mask import PromptMask
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline, Schedule
from blocksparse.observe import Audit

# Softcaps and attention sinks


each_model = pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
CPU: Any = CpuExecutor()
RANKED = evolve(DENSE_LIMIT, selector=Ranked(Everything()), executor=GatherExecutor(0.0))


def with_sinks(name: str) -> Any:
    """The model, with sinks that take much of the weight, unlike for each head."""
    model = make(name)
    for layer in model.model.layers if name == "gpt_oss" else ():
        layer.self_attn.sinks.copy_(torch.tensor([-1.0, 0.5, 2.0, 4.0]))
    return model


@each_model
@pytest.mark.parametrize("length", [65, 129])
@pytest.mark.parametrize("executor", [DENSE_LIMIT.executor, CPU, AutoExecutor()], ids=lambda x: type(x).__name__)
def test_the_pipeline_attends_with_them(executor: Any, length: int, name: str) -> None:
    """One layer of the two has a window, too."""
    recorder, ids = DensityRecorder(), tokens(length, batch=2)
    pipeline = evolve(DENSE_LIMIT, executor=executor)
    assert_same_logits(with_sinks(name), lambda model: model(ids).logits, recorder, pipeline)
    if isinstance(executor, AutoExecutor):
        assert all_dense(recorder, "every block is kept")
    else:
        assert all_sparse(recorder)


@needs_gpu
@each_model
@pytest.mark.parametrize("dense", [False, True])
def test_long_prompts_on_a_gpu(dense: bool, name: str) -> None:
    """Whole and in chunks; dense layers take the kernel too."""
    model, ids = with_sinks(name).cuda(), tokens(500, batch=2).cuda()
    pipeline: Any = evolve(DENSE_LIMIT, executor=TritonExecutor())
    expected = model(ids).logits
    recorder = DensityRecorder()
    with attached(model, recorder, Schedule(None if dense else pipeline)):
        torch.testing.assert_close(model(ids).logits, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)
    assert all_dense(recorder, "no pipeline for this layer") if dense else all_sparse(recorder)


@each_model
def test_dense_with_a_reason_where_nothing_else_works(name: str) -> None:
    model, ids = with_sinks(name), tokens(100, batch=2)
    unknown = "it knows no softcap and no attention sinks"  # one of the layers has a window beside them
    cases: list[tuple[LayerPipeline | Schedule, dict[str, Any], str]] = [
        (Schedule(None), {}, "no pipeline for this layer"),
        (DENSE_LIMIT, {"min_tokens": 101}, "fewer than min_tokens"),
        (DENSE_LIMIT, {"min_queries": 101}, "fewer than min_queries"),
        (RANKED, {}, unknown),
    ]
    for pipeline, given, reason in cases:
        recorder = DensityRecorder()
        assert_same_logits(model, lambda model: model(ids).logits, recorder, pipeline, **given)
        assert recorder.sparse_calls() == {}
        for calls in recorder.dense_calls().values():
            (why,) = calls
            assert why.endswith(reason)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral"])
def test_in_groups_of_heads_and_under_audits(name: str) -> None:
    """An audit of each call finds that nothing is lost, or makes layers dense that lose something."""
    model, ids = with_sinks(name), tokens(100, batch=2)
    expected, audit = model(ids).logits, Audit(rows=50, every=1)
    groups = HeadGroups({(1,): None, (0,): evolve(DENSE_LIMIT, executor=CPU)})
    assert_same_logits(model, lambda model: model(ids).logits, None, groups)
    assert_same_logits(model, lambda model: model(ids).logits, None, DENSE_LIMIT, audit=audit)
    assert len(audit.layers()) == LAYERS
    for layer in audit.layers():
        assert layer.covered_mass is not None
        assert abs(layer.covered_mass.value - 1) < 1e-5
    falls_back = Audit(rows=50, every=1, max_error=1e-6, fall_back=True)
    with attached(model, None, evolve(SPARSE, executor=CPU), audit=falls_back):
        for _ in range(2):
            model(ids)
            falls_back.layers()
        actual = model(ids).logits
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


# Writes into sinks; no version tells of those that are unseen.
UNSEEN: dict[str, Callable[[Tensor], object]] = {
    "data": lambda sinks: sinks.data.mul_(-2),
    "numpy": lambda sinks: np.copyto(sinks.detach().numpy(), [3, -1, 2, 0]),
}
CHANGES: dict[str, Callable[[Tensor], object]] = {
    **UNSEEN,
    "write": lambda sinks: sinks.mul_(-2),
    "nothing": lambda sinks: sinks.fill_(-float("inf")),
    "other data": lambda sinks: setattr(sinks, "data", -2 * sinks.data),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_sinks_that_change_are_read_again(change: Callable[[Tensor], object]) -> None:
    model, ids = with_sinks("gpt_oss"), tokens(100)
    with attached(model, recorder := DensityRecorder()) as attachment:
        before = model(ids).logits
        for layer in model.model.layers:
            change(layer.self_attn.sinks)
        after = model(ids).logits
        attachment.detach()
        expected = model(ids).logits
    assert recorder.sparse_calls() == {0: 2, 1: 2}
    torch.testing.assert_close(after, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert not torch.allclose(before, after, atol=1e-2)


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_attaching_again_reads_sinks_again(change: Callable[[Tensor], object]) -> None:
    """Those on a GPU are remembered, and no version tells of such a write."""
    model = with_sinks("gpt_oss")
    sinks = model.model.layers[0].self_attn.sinks
    before = read(sinks).numbers
    change(sinks)
    assert read(sinks).numbers == before != tuple(sinks.tolist())
    with attached(model, DensityRecorder()):
        assert read(sinks).numbers == tuple(sinks.tolist())


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_sinks_of_a_served_model_are_read_again_if_they_change(change: Callable[[Tensor], object]) -> None:
    """A server loads new weights into the same memory, and has nothing to attach again."""
    changed, same = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([1.0, 4.0])
    never_read = torch.ones(3)
    before = read(changed), read(same)
    change(changed)
    read_changed_again([changed, same, never_read])
    assert read(changed).numbers == tuple(changed.tolist()) != before[0].numbers
    assert read(same) is before[1]


def test_tensors_of_inference_mode_are_read_in_each_call() -> None:
    """No version tells of any write to one."""
    with torch.inference_mode():
        sinks = torch.tensor([0.5, -1.0])
        before = read(sinks)
        sinks.mul_(2)
        assert (before.numbers, read(sinks).numbers) == ((0.5, -1.0), (1.0, -2.0))


def test_what_cannot_be_read_is_left_to_the_model() -> None:
    q, k, v = (torch.randn(1, n, 50, 8) for n in (4, 2, 2))
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("gemma2", {"softcap": torch.tensor(3.0)}, "softcap"),
        ("gpt_oss", {"s_aux": torch.zeros(2)}, "attention sinks"),
    )
    mask = PromptMask((1, 1, 50, 50), 50, q.device)  # of a causal prompt
    for name, given, reason in cases:
        model, recorder = make(name), DensityRecorder()
        with attached(model, recorder) as attachment:
            attend = transformers.AttentionInterface._global_mapping[attachment.key]
            attend(model.model.layers[0].self_attn, q, k, v, mask, scaling=0.3, **given)
        assert recorder.dense_calls()[0][reason] == 1


@pytest.mark.parametrize(
    ("name", "before", "given"),
    [
        ("llama", "eager", "softcap s_aux sinks position_bias"),
        ("llama", "sdpa", "softcap s_aux sinks"),
        ("gemma2", "eager", "s_aux sinks position_bias"),
        ("gpt_oss", "eager", "softcap sinks position_bias"),
    ],
)
def test_options_that_the_plain_model_leaves_out_are_refused(name: str, before: str, given: str) -> None:
    """transformers hands down what the whole model is given."""
    model, ids = make(name), tokens(60)
    model.set_attn_implementation(before)
    with attached(model, DensityRecorder()):
        for option in given.split():
            with pytest.raises(ValueError, match=f"Attention passes {option!r} on, which it or a pipeline may"):
                model(ids, **{option: torch.ones(4)})
        model(ids, **dict.fromkeys(given.split()))


class Helped(nn.Module):
    """It passes an option on from a method of its own."""

    def more(self) -> Any:
        return {"s_aux": None}

    def forward(self, *args: Any) -> Any:
        return eager_attention_forward(self, *args, **self.more())


def test_an_option_of_a_method_is_the_own_one_of_a_class() -> None:
    assert refused_of(Helped, eager=True) == {"softcap", "sinks", "position_bias"}


def test_a_position_bias_that_sdpa_reads_counts() -> None:
    model, ids, recorder = make("llama"), tokens(60), DensityRecorder()
    model.set_attn_implementation("sdpa")
    bias = torch.randn(1, 4, 60, 60)
    assert_same_logits(model, lambda model: model(ids, position_bias=bias).logits, recorder, SPARSE)
    assert all_dense(recorder, "position bias")


def test_gradients_of_sinks_are_dense() -> None:
    model, recorder, ids = with_sinks("gpt_oss"), DensityRecorder(), tokens(60)
    model.requires_grad_(False)
    sinks = [layer.self_attn.sinks.requires_grad_() for layer in model.model.layers]
    with torch.enable_grad():
        expected = torch.autograd.grad(model(ids).logits.square().mean(), sinks)
        with attached(model, recorder):
            actual = torch.autograd.grad(model(ids).logits.square().mean(), sinks)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    assert all_dense(recorder, "gradients")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@each_model
def test_compiled_models_are_dense_there(name: str) -> None:
    model, ids = with_sinks(name), tokens(60)
    expected = model(ids, use_cache=False).logits
    with attached(model, recorder := DensityRecorder()):
        compiled: Any = torch.compile(model, backend="eager")
        actual = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert recorder.sparse_calls() == {}


# Sliding windows


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
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("padding", [0, 9])
def test_layers_that_are_compiled_for_any_length_know_their_window(name: str, padding: int) -> None:
    """Whose size is then a symbol, as that of the mask is."""
    model, ids, recorder = make(name), tokens(100, batch=2), DensityRecorder()
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    expected = model(ids, attention_mask=mask).logits
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    with attached(model, recorder, min_window=WINDOW):
        actual = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[:, padding:], expected[:, padding:], atol=2e-4, rtol=1e-4)
    assert recorder.sparse_calls() == dict.fromkeys(
        range(LAYERS), 1 + bool(padding)
    )  # two prompts of a padded batch


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_are_dense_with_a_reason_where_nothing_else_pays_or_works(name: str) -> None:
    """Exactly, and only in the layers that have one."""
    model, ids = make(name), tokens(100, batch=2)
    sliding = range(LAYERS) if name == "mistral" else [0]
    cases: list[tuple[LayerPipeline | Schedule, dict[str, Any], str]] = [
        (DENSE_LIMIT, {"min_window": None}, "sliding window"),
        (DENSE_LIMIT, {"min_window": WINDOW + 1}, "a sliding window of fewer than min_window"),
        (Schedule(DENSE_LIMIT, dense=sliding), {}, "no pipeline for this layer"),
        (RANKED, {}, "GatherExecutor: it knows no sliding window, and this call has one of 48 tokens"),
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


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("sparse", [True, pytest.param(False, marks=pytest.mark.slow)])
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
