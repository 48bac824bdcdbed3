"""Every situation of a transformers model, against eager attention of the same model."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.machine import needs_gpu
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

import transformers
from tests.hosts.small_models import small_model
from tests.specs import asked
from tests.stages import ByReference
from tests.tiny_model import tiny_llama
from transformers import AttentionInterface, Cache, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama import modeling_llama

import blocksparse as bs
from blocksparse.hosts.transformers import Attachment, DensityRecorder, attach
from blocksparse.hosts.transformers.prompt_mask import PromptMask
from blocksparse.layers.head_groups import AnyPipeline, HeadGroups
from blocksparse.layers.schedule import LayerPipeline, Schedule
from blocksparse.spec import AttentionSpec
from blocksparse.testing import every_preset, make_qkv

DENSE_LIMIT: AnyPipeline = bs.Pipeline(
    bs.SegmentKeySort(S=64), bs.MeanPoolScorer(32), bs.Everything(), bs.ReferenceExecutor()
)
SPARSE: AnyPipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())

LAYERS, HEADS, WINDOW, VOCABULARY = 2, 4, 48, 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, **ALTERNATING, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **ALTERNATING, head_dim=8, query_pre_attn_scalar=8),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **ALTERNATING, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=HEADS),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES | LATENT | {"num_key_value_heads": HEADS, "first_k_dense_replace": LAYERS}
    ),
}
SPARSE_MODELS = ("llama", "qwen3", "deepseek_v3")
"""Models in which nothing stands against a pipeline."""


def random_model(build: Any, config: Any, std: float = 0.1) -> Any:
    """With weights large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    model = build(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=std)
    return model


def make(name: str, **other: Any) -> Any:
    config = MODELS[name]()
    config.update(other)
    return random_model(transformers.AutoModelForCausalLM.from_config, config, std=0.3)


def tokens(length: int, *, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


each_cache = pytest.mark.parametrize("room", [None, 500], ids=["dynamic", "static"])


def in_chunks(
    model: Any,
    ids: Tensor,
    sizes: list[int] | int,
    cache: int | Cache | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """The logits of `ids`, a chunk at a time, over a cache: a static one for so many tokens, or a dynamic one.

    `mask` `[B, N]` is of all tokens: a chunk gets it up to its own end.
    """
    if cache is None:
        cache = DynamicCache(config=model.config)
    elif isinstance(cache, int):
        cache = StaticCache(config=model.config, max_cache_len=cache)
    logits, done = [], 0
    for chunk in ids.split(sizes, dim=1):
        done += chunk.shape[1]
        seen = None if mask is None else mask[:, :done]
        logits.append(model(chunk, attention_mask=seen, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1)


def attached(
    model: Any, recorder: DensityRecorder | None, pipeline: LayerPipeline | Schedule = DENSE_LIMIT, **options: Any
) -> Attachment:
    limits: dict[str, Any] = {"min_tokens": 16, "min_queries": 2, "min_window": 16}
    return attach(model, pipeline, recorder=recorder, **limits | options)


def assert_same_logits(
    model: Any,
    run: Callable[[Any], Tensor],
    recorder: DensityRecorder | None,
    pipeline: LayerPipeline | Schedule = DENSE_LIMIT,
    **options: Any,
) -> None:
    """`run` gives what eager attention gives, within fp32 rounding."""
    expected = run(model)
    with attached(model, recorder, pipeline, **options):
        actual = run(model)
    assert_close(actual, expected)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def all_sparse(recorder: DensityRecorder, calls: int = 1) -> bool:
    return recorder.sparse_calls() == dict.fromkeys(range(LAYERS), calls) and recorder.dense_calls() == {}


def all_dense(recorder: DensityRecorder, reason: str, calls: int = 1) -> bool:
    expected = {layer: Counter({reason: calls}) for layer in range(LAYERS)}
    return recorder.sparse_calls() == {} and recorder.dense_calls() == expected


# ---- prefill goes sparse


@pytest.mark.parametrize("name", SPARSE_MODELS)
@each_cache
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "ones"])
def test_unaligned_chunks_are_sparse_and_add_up(name: str, room: int | None, masked: bool) -> None:
    recorder, model, ids = DensityRecorder(), make(name), tokens(150, batch=2)
    run = partial(
        in_chunks, ids=ids, sizes=[37, 64, 49], cache=room, mask=torch.ones_like(ids) if masked else None
    )
    assert_same_logits(model, run, recorder)
    assert all_sparse(recorder, calls=3)
    with attached(model, DensityRecorder()):
        torch.testing.assert_close(run(model), model(ids).logits, atol=1e-3, rtol=1e-4)


def test_chunks_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = make("llama"), DensityRecorder()
    made = "blocksparse.hosts.transformers.mask_request.sdpa_mask"
    monkeypatch.setattr(made, lambda **request: pytest.fail(f"a mask is made for {request}"))
    with attached(model, recorder):
        in_chunks(model, tokens(96), [32, 32, 32])
    assert all_sparse(recorder, calls=3)


def test_chunks_have_the_density_of_the_prompt() -> None:
    model, whole, chunked = make("llama"), DensityRecorder(), DensityRecorder()
    ids = tokens(128)
    with attached(model, whole, SPARSE):
        model(ids)
    with attached(model, chunked, SPARSE):
        in_chunks(model, ids, [64, 64])
    torch.testing.assert_close(chunked.density(), whole.density(), atol=0.02, rtol=0)


# ---- generate


def generate(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    out: Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, **kwargs)
    return out


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    "how", [{}, {"prefill_chunk_size": 23}, {"cache_implementation": "static"}], ids=["plain", "chunked", "static"]
)
def test_generate_gives_the_same_tokens(name: str, how: dict[str, Any]) -> None:
    if name == "deepseek_v3" and how.get("cache_implementation"):
        pytest.skip("one case of MLA is enough")
    model, ids = make(name), tokens(80, batch=2)
    kwargs = how | {"attention_mask": torch.ones_like(ids)}
    expected = generate(model, ids, **kwargs)
    recorder = DensityRecorder()
    with attached(model, recorder):
        actual = generate(model, ids, **kwargs)
    assert torch.equal(actual, expected)
    if name in SPARSE_MODELS:
        prefills = 4 if "prefill_chunk_size" in how else 1
        assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), prefills)
        assert all(reasons == Counter(decode=5) for reasons in recorder.dense_calls().values())


# ---- every preset


def small(preset: Callable[..., AnyPipeline]) -> AnyPipeline:
    """The preset in blocks of 64 where it has a size to choose, on the executor that runs everything."""
    sizes = {"block": 64} if "block" in inspect.signature(preset).parameters else {}
    return preset(**sizes, executor=bs.ReferenceExecutor())


@pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
@pytest.mark.parametrize("M", [300, 130])
def test_every_preset_attends_in_a_model_as_when_called(preset: Callable[..., AnyPipeline], M: int) -> None:
    model, recorder, pipeline = make("llama"), DensityRecorder(), small(preset)
    q, k, v = make_qkv(B=2, Hq=HEADS, Hkv=2, M=M, N=300, D=16)
    with attached(model, recorder, pipeline) as attachment:
        request: dict[str, Any] = {"batch_size": 2, "q_length": M, "kv_length": 300, "device": q.device}
        mask = AttentionMaskInterface._global_mapping[attachment.key](**request, q_offset=300 - M)
        attend = AttentionInterface._global_mapping[attachment.key]
        out, weights = attend(model.model.layers[1].self_attn, q, k, v, mask, scaling=0.2)
    expected = pipeline.trace(q, k, v, scale=0.2)
    assert weights is None
    assert torch.equal(out, expected.output.out.transpose(1, 2))
    torch.testing.assert_close(recorder.density()[1], expected.density().mean(0))
    assert recorder.sparse_calls() == {1: 1}


# ---- everything else is dense and exact


@pytest.mark.parametrize("boolean", [False, True], ids=["added", "bool"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_masks_of_the_caller_are_dense(name: str, boolean: bool) -> None:
    model, recorder = make(name), DensityRecorder()
    ids = tokens(40)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril() & (torch.rand(40, 40) < 0.7) | torch.eye(40).bool()
    added = torch.zeros(1, 1, 40, 40).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = model(ids, attention_mask=added).logits  # eager takes no bool mask
    with attached(model, recorder):
        actual = model(ids, attention_mask=allowed[None, None] if boolean else added).logits
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    assert all_dense(recorder, "mask")


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2", "gpt_oss"])
@each_cache
def test_chunks_that_grow_out_of_the_window(name: str, room: int | None) -> None:
    recorder = DensityRecorder()
    run = partial(in_chunks, ids=tokens(95, batch=2), sizes=[20, 25, 30, 20], cache=room)
    assert_same_logits(make(name), run, recorder)
    if name != "mistral":
        assert all_sparse(recorder, calls=4)


@pytest.mark.parametrize("name", MODELS)
@each_cache
def test_decoding_is_dense(name: str, room: int | None) -> None:
    recorder = DensityRecorder()
    run = partial(in_chunks, ids=tokens(60, batch=2), sizes=[57, 1, 1, 1], cache=room)
    assert_same_logits(make(name), run, recorder)
    assert all(reasons["decode"] == 3 for reasons in recorder.dense_calls().values())


def test_calls_that_are_just_long_enough_are_sparse() -> None:
    model, recorder = make("llama"), DensityRecorder()
    with attach(model, SPARSE, min_tokens=60, min_queries=60, recorder=recorder):
        model(tokens(60))
    assert all_sparse(recorder)


@each_cache
def test_short_chunks_are_dense_and_aligned_to_the_last_key(room: int | None) -> None:
    recorder, run = DensityRecorder(), partial(in_chunks, ids=tokens(60, batch=2), sizes=[50, 7, 3], cache=room)
    assert_same_logits(make("llama"), run, recorder, min_queries=8)
    assert recorder.sparse_calls() == {0: 1, 1: 1}
    assert recorder.dense_calls()[0] == Counter({"fewer than min_queries": 2})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("trained", ["", "layers.1.self_attn.q_proj"], ids=["all weights", "some weights"])
def test_a_training_step_is_dense_whatever_is_checkpointed(reentrant: bool, trained: str) -> None:
    """Reentrant checkpointing runs the forward pass without gradients, so grad mode does not tell."""
    recorder, ids = DensityRecorder(), tokens(60)

    def step(model: Any, **options: Any) -> list[Tensor]:
        for name, weight in model.named_parameters():
            weight.requires_grad_(trained in name)
        if options:
            model.gradient_checkpointing_enable(options)
            model.enable_input_require_grads()  # as PEFT does for adapters
        with torch.enable_grad():
            loss = model.train()(ids, labels=ids, use_cache=False).loss
            loss.backward()
        return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    expected = step(make("llama"))
    with attached(model := make("llama"), recorder, SPARSE):
        actual = step(model, use_reentrant=reentrant)
        model.eval()
        model(ids)  # an evaluation between two steps
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert all(set(calls) <= {"gradients", "training"} for calls in recorder.dense_calls().values())
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 1)


@pytest.mark.parametrize("trained", ["lm_head", "layers.0.mlp", "layers.1.self_attn.o_proj", "outside"])
def test_layers_below_what_is_trained_are_dense_in_eval_mode(trained: str) -> None:
    """As where a head is trained on a frozen model, or behind it: no query of these layers needs a gradient."""
    recorder, ids, model = DensityRecorder(), tokens(60), make("llama")
    outside = torch.ones((), requires_grad=True)
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name)

    def step() -> Tensor:
        with torch.enable_grad():
            wanted = [weight for weight in model.parameters() if weight.requires_grad] or [outside]
            return torch.autograd.grad(model(ids, labels=ids).loss * outside, wanted)[0]

    expected = step()
    with attached(model, recorder, SPARSE):
        actual = step()
        assert all_dense(recorder, "gradients")
        model(ids)  # without gradients
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 1)


class Elsewhere(torch.autograd.Function):
    """Reentrant checkpointing of another package."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Any:
        ctx.run, ctx.x = run, x
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.run(x), x, *grads)


@pytest.mark.parametrize("reentrant", [False, True, None], ids=["not reentrant", "reentrant", "elsewhere"])
def test_a_checkpointed_call_is_dense_in_eval_mode(reentrant: bool | None) -> None:
    """As where prompts are tuned through a frozen model."""
    recorder, ids = DensityRecorder(), tokens(60)

    def gradient(model: Any) -> Tensor:
        embedded: Tensor = model.get_input_embeddings()(ids).detach().requires_grad_()

        def forward(x: Tensor) -> Tensor:
            logits: Tensor = model(inputs_embeds=x, use_cache=False).logits
            return logits

        with torch.enable_grad():
            logits: Tensor = (
                cast(Any, Elsewhere).apply(forward, embedded)
                if reentrant is None
                else torch.utils.checkpoint.checkpoint(forward, embedded, use_reentrant=reentrant)
            )
            logits.square().mean().backward()
        assert embedded.grad is not None
        return embedded.grad

    expected = gradient(make("llama"))
    with attached(model := make("llama"), recorder, SPARSE):
        actual = gradient(model)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert all_dense(recorder, "gradients", calls=2)


@pytest.mark.parametrize(
    ("dropout", "said"), [(0.0, "training (call model.eval() for inference)"), (0.5, "dropout")]
)
def test_a_model_in_training_is_dense_and_says_why(
    dropout: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, recorder = make("llama").train(), DensityRecorder()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    with attached(model, recorder):
        model(tokens(60))
    assert all_dense(recorder, said.split()[0])
    assert f"2 x {said}" in caplog.text


@pytest.mark.parametrize("cached", [False, True], ids=["mixed dtypes", "one dtype"])
@pytest.mark.parametrize("recorded", [False, True])
def test_autocast_is_that_of_dense_attention(cached: bool, recorded: bool) -> None:
    """Rotary embeddings widen queries and keys, a cache the values too; without one they come in bf16."""
    model, ids = make("llama"), tokens(100, batch=2)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids, use_cache=cached).logits
        with attach(model, DENSE_LIMIT, min_tokens=1, recorder=DensityRecorder() if recorded else None):
            actual = model(ids, use_cache=cached).logits
    assert float((actual - exact).abs().max()) < 2 * float((expected - exact).abs().max())


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("by_config", [False, True], ids=["argument", "config"])
def test_output_attentions_are_those_of_eager(name: str, by_config: bool) -> None:
    """Also of GPT-2, whose layers never hear that somebody asks."""
    model, recorder, ids = make(name), DensityRecorder(), tokens(60)
    model.config.output_attentions = by_config
    asked = {} if by_config else {"output_attentions": True}
    expected = model(ids, **asked).attentions
    with attached(model, recorder):
        actual = model(ids, **asked).attentions
    assert len(actual) == LAYERS
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert all_dense(recorder, "output_attentions")


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bidirectional_modules_are_dense(name: str) -> None:
    model, recorder, ids = make(name), DensityRecorder(), tokens(40)
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    assert_same_logits(model, lambda m: m(ids).logits, recorder)
    assert all_dense(recorder, "not causal")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "broken"])
def test_compiled_chunks_are_sparse(whole: bool) -> None:
    """In one graph, or in parts: what a mask says survives a break. Detached, the compiled model is as before."""
    model, recorder, eager = make("llama"), DensityRecorder(), DensityRecorder()
    run = partial(in_chunks, ids=tokens(60), sizes=[40, 20])
    if not whole:
        model.model.layers[0].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    plain = run(model)
    with attached(model, eager, SPARSE):
        expected = run(model)
    compiled = torch.compile(model, backend="aot_eager" if whole else "eager", fullgraph=whole)
    with attached(model, recorder, SPARSE):
        torch.testing.assert_close(run(compiled), expected, atol=2e-4, rtol=1e-4)
    assert recorder.sparse_calls() == {0: 2, 1: 2}
    torch.testing.assert_close(recorder.density(), eager.density())
    if whole:
        torch.testing.assert_close(run(compiled), plain, atol=2e-4, rtol=1e-4)
        assert recorder.sparse_calls() == {0: 2, 1: 2}


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_model_that_is_dense_says_so(cache: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without a cache transformers makes masks inside of what is compiled; a log tells it when it is detached."""
    model, recorder = tiny_llama(num_hidden_layers=1), DensityRecorder()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), attach(model, SPARSE, recorder=recorder):
        compiled(torch.randint(16, (1, 600)), use_cache=cache)
    assert bool(recorder.sparse_calls()) == cache
    assert ("compiled" in caplog.text) != cache


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("padding", [0, 17])
def test_generate_compiles_chunks_of_a_static_cache(padding: int) -> None:
    """As it does by itself on a GPU: it makes the masks outside of what it compiles."""
    model, ids = make("llama", num_hidden_layers=1), tokens(80, batch=2)
    mask, recorder = torch.ones_like(ids), DensityRecorder()
    mask[0, :padding] = 0
    how: dict[str, Any] = {"cache_implementation": "static", "prefill_chunk_size": 23, "attention_mask": mask}
    expected = generate(model, ids, **how)
    compiling = transformers.generation.CompileConfig(backend="eager")
    compiling._compile_all_devices = True
    with attached(model, recorder):
        actual = generate(model, ids, compile_config=compiling, **how)
    assert torch.equal(actual, expected)
    assert recorder.sparse_calls()[0] >= 3


@needs_gpu
@each_cache
@pytest.mark.parametrize("min_queries", [2, 1000], ids=["sparse", "dense"])
def test_chunks_on_a_gpu(room: int | None, min_queries: int) -> None:
    wide = SIZES | {"hidden_size": 256}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**wide)
    model: Any = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model = model.to("cuda", torch.bfloat16).eval()
    run = partial(in_chunks, model, tokens(450, batch=2).cuda(), [130, 200, 119, 1], room)
    expected, recorder = run().float(), DensityRecorder()
    pipeline = bs.Pipeline(bs.SegmentKeySort(S=128), bs.MeanPoolScorer(64), bs.Everything(), bs.TritonExecutor())
    with attach(model, pipeline, min_tokens=1, min_queries=min_queries, recorder=recorder):
        actual = run().float()
    assert recorder.sparse_calls() == ({0: 3, 1: 3} if min_queries == 2 else {})
    assert float((actual - expected).abs().max()) < 0.03 * float(expected.abs().max())


# ---- layers, recorder, attaching


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(None, layers={1: SPARSE}),
        Schedule(SPARSE, dense=[0]),
        Schedule(DENSE_LIMIT, layers={-1: SPARSE}, dense=[-2]),
    ],
    ids=["single", "all but the first", "from the end"],
)
def test_layers_may_differ(schedule: Schedule) -> None:
    model, ids, recorder = make("llama"), tokens(128), DensityRecorder()
    with attach(model, schedule, min_tokens=1, recorder=recorder):
        model(ids)
    assert recorder.sparse_calls() == {1: 1}
    assert recorder.dense_calls() == {0: Counter({"no pipeline for this layer": 1})}
    density = recorder.density()
    assert bool(density[0].isnan().all())
    torch.testing.assert_close(density[1], torch.full((HEADS,), 15 / 36, dtype=torch.float64))


@pytest.mark.parametrize("recorded", [False, True])
def test_head_groups_attend_in_every_layer(recorded: bool) -> None:
    model, ids, recorder = make("llama"), tokens(128), DensityRecorder()
    everything = HeadGroups({(1,): DENSE_LIMIT, (0,): None})
    assert_same_logits(model, lambda model: model(ids).logits, recorder if recorded else None, everything)
    recorder.clear()
    with attach(model, HeadGroups({(1,): SPARSE, (0,): None}), min_tokens=1, recorder=recorder):
        model(ids)
    assert all_sparse(recorder)
    by_layer = torch.tensor([1, 1, 15 / 36, 15 / 36], dtype=torch.float64)
    torch.testing.assert_close(recorder.density(), by_layer.expand(LAYERS, HEADS))


class _FirstBlockOnly(ByReference):
    """Stops after the first block of each row."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, spec: AttentionSpec, *_: Any
    ) -> bs.AttentionOutput:
        visited = bs.BlockMask(mask.keep & (torch.arange(mask.grid.cols) == 0), mask.grid)
        return replace(bs.ReferenceExecutor()(q, k, v, visited, asked(visited, spec.scale)), visit=visited)


def test_an_early_stop_counts_in_the_density() -> None:
    model, recorder = make("llama"), DensityRecorder()
    stops: AnyPipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.Everything(), _FirstBlockOnly())
    with attached(model, recorder, stops):
        model(tokens(128))
    torch.testing.assert_close(recorder.density(), torch.full((LAYERS, HEADS), 8 / 36, dtype=torch.float64))


def test_a_recorder_reads_as_a_table_and_forgets() -> None:
    model, recorder = make("llama"), DensityRecorder()
    assert recorder.density().shape == (0, 0)
    with attach(model, Schedule(SPARSE, dense=[0]), min_tokens=1, recorder=recorder):
        model(tokens(128))
    assert recorder.table().splitlines() == [
        "layer  sparse  density  heads          dense",
        "    0       0                          1 x no pipeline for this layer",
        "    1       1    0.417  0.417 - 0.417  -",
    ]
    recorder.clear()
    assert recorder.sparse_calls() == {}
    assert recorder.dense_calls() == {}
    assert recorder.density().shape == (0, 0)


def test_detach_restores_nested_configs() -> None:
    model = small_model("llava")
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    configs = (model.config, model.config.text_config, model.config.vision_config)
    before = [config._attn_implementation for config in configs]
    recorder, ids = DensityRecorder(), tokens(60)
    expected = model(ids).logits
    with attached(model, recorder) as attachment:
        assert [config._attn_implementation for config in configs] == [attachment.key] * 3
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert [config._attn_implementation for config in configs] == before
    assert all_sparse(recorder)


def test_attachments_stack() -> None:
    model, ids, below, above = make("llama"), tokens(60), DensityRecorder(), DensityRecorder()
    first = attached(model, below)
    second = attached(model, above)
    model(ids)
    assert below.sparse_calls() == {}
    assert all_sparse(above)
    with pytest.raises(RuntimeError, match=r"lies below a later attachment\. Detach that one"):
        first.detach()
    second.detach()
    model(ids)
    assert all_sparse(below)
    first.detach()
    assert model.config._attn_implementation == "eager"
    with attached(model, None):
        first.detach()  # a second call does nothing


def test_detach_follows_an_error_and_leaves_what_was_set_since() -> None:
    model = make("llama")
    with pytest.raises(KeyError, match="inside"), attach(model, SPARSE):
        raise KeyError("inside")
    assert model.config._attn_implementation == "eager"
    with attach(model, SPARSE):
        model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("pipeline", "kwargs", "error", "sentence"),
    [
        ("pbs", {}, TypeError, "'pipeline' must be a Pipeline, HeadGroups or a Schedule: 'pbs'"),
        (
            {0: SPARSE},
            {},
            TypeError,
            r"a Schedule: \{0: .*\. Schedule\(None, layers=\{\.\.\.\}\) attends sparsely",
        ),
        (None, {}, TypeError, "a Schedule: None"),
        (Schedule(None, layers={2: SPARSE}), {}, ValueError, "no layer 2: the model has 2, 0 to 1"),
        (Schedule(SPARSE, dense=(0, -2)), {}, ValueError, "these of the 2 layers are named twice"),
        (SPARSE, {"min_tokens": 0}, ValueError, "'min_tokens' must be a whole number, at least 1: 0"),
        (SPARSE, {"min_window": 0}, ValueError, "'min_window' must be a whole number, at least 1, or None: 0"),
        (SPARSE, {"min_window": True}, TypeError, "'min_window' must be a whole number, at least 1, or None: "),
        (SPARSE, {"recorder": 1}, TypeError, "'recorder' must be"),
        (SPARSE, {"continuous_batching": 1}, TypeError, "'continuous_batching' must be True or False: 1"),
    ],
)
def test_bad_arguments_are_named(pipeline: Any, kwargs: Any, error: type[Exception], sentence: str) -> None:
    model = make("llama")
    with pytest.raises(error, match=sentence):
        attach(model, pipeline, **kwargs)
    assert model.config._attn_implementation == "eager"


def test_models_that_cannot_be_attached_to_are_named() -> None:
    other: Any = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel or hold one: Linear holds 0"):
        attach(other, SPARSE)
    with pytest.raises(TypeError, match=r"ModuleList holds 2"):
        attach(torch.nn.ModuleList([make("llama"), make("qwen3")]), SPARSE)
    other = 3
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel: int"):
        attach(other, SPARSE)
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    bloom = transformers.BloomForCausalLM(config)
    with pytest.raises(ValueError, match="BloomForCausalLM cannot change its attention function: none of its"):
        attach(bloom, SPARSE)
    assert config._attn_implementation == transformers.BloomForCausalLM(config).config._attn_implementation


def test_models_that_choose_or_add_keys_are_an_error() -> None:
    """DeepSeek V4 adds some, whose compressed keys stand behind those that its mask knows."""
    model = make("llama")
    # Eager attention without a mask sees every key, sdpa the first ones, and other attention the last ones.
    model.set_attn_implementation("sdpa")
    x, more = torch.zeros(1, HEADS, 70, 8), torch.zeros(1, HEADS, 75, 8)
    mask = PromptMask((1, 1, 70, 70), 70, x.device, window=20)
    with attach(model, SPARSE, min_tokens=1) as attachment:
        attend = AttentionInterface._global_mapping[attachment.key]
        with pytest.raises(ValueError, match="selects its own keys, which cannot run while"):
            attend(model.model.layers[0].self_attn, x, x, x, None, indices=torch.zeros(1))
        for given, sentence in (
            (
                mask,
                "got 70 queries and 75 keys, and a mask of 70 queries and 70 keys. A model that adds its own keys",
            ),
            (
                None,
                "75 keys and no mask, .* Attach to the whole model, .* A model that adds its own keys cannot run",
            ),
        ):
            with pytest.raises(ValueError, match=sentence):
                attend(model.model.layers[0].self_attn, x, more, more, given)


# ---- threads, nested calls, and models that share


def test_threads_share_a_model() -> None:
    """Chunks of one size, in static caches of one size, that stand at different offsets."""
    model, prompts = make("llama"), {16: tokens(36), 48: tokens(68)}
    expected = {start: in_chunks(model, ids, [start, 20], 100) for start, ids in prompts.items()}
    # No thread attends before both have asked for their masks.
    meet = threading.Barrier(2, timeout=60)

    def wait(*_: Any) -> None:
        meet.wait()

    hook = model.model.layers[0].register_forward_pre_hook(wait)

    def run(start: int) -> Tensor:
        with torch.no_grad():
            return in_chunks(model, prompts[start], [start, 20], 100)

    with attached(model, recorder := DensityRecorder()), ThreadPoolExecutor(2) as threads:
        actual = dict(zip(prompts, threads.map(run, prompts), strict=True))
    hook.remove()
    for start, logits in expected.items():
        torch.testing.assert_close(actual[start], logits, atol=2e-4, rtol=1e-4)
    assert all_sparse(recorder, calls=4)


def test_calls_nest() -> None:
    """A hook may run the model on something else, between two layers of a call."""
    model, ids, other = make("llama"), tokens(68), tokens(36)
    expected, expected_inside = in_chunks(model, ids, [48, 20], 100), in_chunks(model, other, [16, 20], 100)
    inside: list[Tensor] = []

    def run_another(_module: Any, _args: Any, kwargs: Any, _out: Any) -> None:
        if kwargs["past_key_values"].get_seq_length() == 68:
            inside.append(in_chunks(model, other, [16, 20], 100))

    hook = model.model.layers[0].register_forward_hook(run_another, with_kwargs=True)
    with attached(model, recorder := DensityRecorder()):
        actual = in_chunks(model, ids, [48, 20], 100)
    hook.remove()
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(inside[0], expected_inside, atol=2e-4, rtol=1e-4)
    assert all_sparse(recorder, calls=4)


def test_a_chunk_mask_is_the_mask_of_a_chunk() -> None:
    """To whoever looks at it; moved between devices it stays unmade."""
    expected = sdpa_mask(batch_size=2, q_length=3, kv_length=7, q_offset=2)
    mask: Any = PromptMask((2, 1, 3, 7), 5, torch.device("cpu"))
    assert (mask.shape, mask.ndim, mask.dtype) == (expected.shape, expected.ndim, expected.dtype)
    for look in (
        lambda x: x[:, :, 1:, :6],
        lambda x: x & True,
        lambda x: expected | x,
        lambda x: ~x,
        lambda x: x == 0,
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: torch.where(x, 0.0, -1.0),
        lambda x: x.mT,
        lambda x: x.float(),
        lambda x: x.to(torch.float64),
        lambda x: x.sum(dim=-1),
        lambda x: torch.tensor(x.tolist()),
    ):
        actual = look(mask)
        assert type(actual) is Tensor
        assert torch.equal(actual, look(expected))
    q, k, v = make_qkv(B=2, Hq=2, Hkv=2, M=3, N=7, D=4)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(q, k, v, attn_mask=mask), attention(q, k, v, attn_mask=expected))
    for moved in (mask.to("cpu", non_blocking=True), mask.to(device="meta"), mask.to(q.bool()), mask.contiguous()):
        assert isinstance(moved, PromptMask)
        assert (moved.seen, moved.shape) == (5, mask.shape)
    assert mask.to("meta").device.type == "meta"
    with pytest.raises(TypeError, match=r"cannot be changed in place. Clone it before fill_\(\)"):
        mask.fill_(True)
    with pytest.raises(TypeError):
        mask[0] = True


def test_a_chunk_sees_its_past_in_any_module() -> None:
    """A mask is a mask, also for a module that calls itself bidirectional, and at the front of a static cache."""
    model, (q, k, v) = make("llama"), make_qkv(B=2, Hq=HEADS, Hkv=2, M=30, N=70, D=8)
    module = model.model.layers[0].self_attn
    module.is_causal = False
    for seen in (30, 50):
        mask = PromptMask((2, 1, 30, 70), seen, torch.device("cpu"))
        expected, _ = sdpa_attention_forward(module, q, k, v, mask.made())
        for least in (1, 1000):
            with attach(model, DENSE_LIMIT, min_tokens=least, min_queries=least) as attachment:
                actual, _ = AttentionInterface._global_mapping[attachment.key](module, q, k, v, mask)
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_recorders_count_calls_of_all_threads() -> None:
    recorder, density = DensityRecorder(), torch.full((1, HEADS), 0.5)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def record(_: int) -> None:
        for _ in range(200):
            recorder.saw_sparse(0, density, q_len=8, k_len=8)
            recorder.saw_dense(1, "decode")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(record, range(8)))
    sys.setswitchinterval(interval)
    assert recorder.sparse_calls() == {0: 1600}
    assert recorder.dense_calls() == {1: Counter(decode=1600)}
    torch.testing.assert_close(recorder.density()[0], torch.full((HEADS,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("layers", "mean"), [((-1,), 0.2), ((-1, 0), 0.2), ((0, 1), 0.6), ((-1, 0, 1), 0.6), ((), 1)]
)
def test_a_mean_density_is_of_the_layers_that_attend(layers: tuple[int, ...], mean: float) -> None:
    """Layer 1 is dense. Modules without a layer, such as a vision tower's, count where there are no others."""
    recorder = DensityRecorder()
    for layer in layers:
        if layer == 1 or (layer == -1 and len(layers) > 1):
            recorder.saw_dense(layer, "little work")
        else:
            recorder.saw_sparse(layer, torch.full((1, HEADS), 0.2), q_len=8, k_len=8)
    assert recorder.mean_density() == pytest.approx(mean)


def test_layers_of_one_number_may_have_other_heads() -> None:
    """As in a model of two decoders, which reads with one and speaks with the other."""
    recorder, few = DensityRecorder(), torch.tensor([[0.2, 0.4]])
    for density in (few, torch.tensor([[0.6, 0.6, 0.5]]), few):
        recorder.saw_sparse(0, density, q_len=8, k_len=8)
    expected = torch.tensor([1.0, 1.4, 1.5], dtype=torch.float64) / 3
    expected[2] = 0.5  # of one call
    torch.testing.assert_close(recorder.density()[0], expected)
    assert recorder.mean_density() == pytest.approx(float(expected.mean()))
    assert "0.433  0.333 - 0.500" in recorder.table()


def test_a_prompt_counts_alike_in_a_batch_and_alone() -> None:
    """Three prompts in one call, and one in another."""
    recorder = DensityRecorder()
    recorder.saw_sparse(0, torch.tensor([[0.2], [0.3], [0.7]]), q_len=8, k_len=8)
    recorder.saw_sparse(0, torch.tensor([[0.8]]), q_len=8, k_len=8)
    assert recorder.mean_density() == pytest.approx(0.5)
    assert recorder.density().tolist() == [[pytest.approx(0.5)]]
    assert " 0.500 " in recorder.table()


# ---- copies of a model, and models that end


@pytest.mark.parametrize("attachments", [1, 2])
@pytest.mark.parametrize("before", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_an_attached_model_is_as_it_was(
    duplicate: Callable[[Any], Any], before: str, attachments: int
) -> None:
    model, ids = make("llama"), tokens(128)
    model.set_attn_implementation(before)
    expected, recorder = model(ids).logits, DensityRecorder()
    with ExitStack() as stack:
        for _ in range(attachments):
            stack.enter_context(attached(model, recorder, SPARSE))
        copied = duplicate(model)
        assert copied.config._attn_implementation == before
        assert torch.equal(copied(ids).logits, expected)
        assert recorder.sparse_calls() == {}
        with attached(copied, DensityRecorder(), SPARSE):
            assert not torch.equal(copied(ids).logits, expected)
        model(ids)
        assert all_sparse(recorder)
    assert torch.equal(copied(ids).logits, expected)


def test_a_shallow_copy_shares_the_attachment() -> None:
    model, ids, recorder = make("llama"), tokens(128), DensityRecorder()
    expected = model(ids).logits
    with attached(model, recorder, SPARSE):
        copied = copy.copy(model)
        copied(ids)
        assert all_sparse(recorder)
    assert torch.equal(copied(ids).logits, expected)


def test_a_saved_model_names_no_attachment(tmp_path: Path) -> None:
    model, ids = make("llama"), tokens(128)
    expected, names = model(ids).logits, set(model.state_dict())
    with attached(model, DensityRecorder(), SPARSE) as attachment:
        assert set(model.state_dict()) == names
        model.save_pretrained(tmp_path)
        config = model.config.to_dict()
    assert attachment.key not in (tmp_path / "config.json").read_text()
    assert attachment.key not in str(config)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(loaded(ids).logits, expected)


def test_models_that_share_a_config_share_no_pipeline() -> None:
    config = MODELS["llama"]()
    one, two = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    ids, recorder = tokens(128), DensityRecorder()
    expected = two(ids).logits
    with attached(one, recorder, SPARSE):
        torch.testing.assert_close(two(ids).logits, expected, atol=2e-4, rtol=1e-4)
        assert all_dense(recorder, "not attached")
        recorder.clear()
        one(ids)
        assert all_sparse(recorder)
        with pytest.raises(ValueError, match=r"shares its LlamaConfig with another model.*. Give each model"):
            attach(two, SPARSE)
        with attached(one.model, DensityRecorder(), SPARSE):  # a part of the same model
            one(ids)
    assert config._attn_implementation == "sdpa"


def test_models_that_share_layers_share_no_pipeline() -> None:
    """A draft model of its target's first layer would take the pipeline of the target for its own."""
    target, draft = make("llama"), make("llama", num_hidden_layers=1)
    draft.model.layers[0] = target.model.layers[0]
    for first, second in ((target, draft), (draft, target)):
        with (
            attached(first, None, SPARSE),
            pytest.raises(ValueError, match=r"another model that has a pipeline.*and its own layers"),
        ):
            attach(second, DENSE_LIMIT)


@pytest.mark.parametrize(
    ("place", "name", "does"),
    [
        (AttentionInterface._global_mapping, "theirs", "attends by .theirs."),
        (AttentionInterface._global_mapping, "sdpa", "attends by .sdpa."),
        (AttentionInterface._global_mapping, "theirs by wraps", "attends by .theirs by wraps."),
        (AttentionMaskInterface._global_mapping, "sdpa", "makes its masks by .sdpa."),
        (AttentionMaskInterface._global_mapping, "eager", "makes its masks by .eager."),
        (vars(modeling_llama), "eager_attention_forward", "attends by the eager function of LlamaAttention"),
    ],
)
def test_a_function_of_users_is_not_replaced(place: dict[str, Any], name: str, does: str) -> None:
    """It may add a bias, say, which a pipeline would leave out."""

    def theirs(*given: Any, **more: Any) -> Any:
        raise NotImplementedError

    model = make("llama")
    if name.endswith("wraps"):  # as decorators do, which gives it the name of the other one's module
        wraps(sdpa_attention_forward)(theirs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(place, name, theirs)
        model.set_attn_implementation("eager" if name.startswith("eager") else name)
        with pytest.raises(ValueError, match=f"LlamaForCausalLM {does}, a function of .*test_transformers that"):
            attach(model, SPARSE)
    model.set_attn_implementation("sdpa")
    with attach(model, SPARSE), attach(model, SPARSE):  # a function of this library is not theirs
        model(tokens(60))


def of_ones_own(
    *, bias: float = 0.0, through_super: bool = False, of: str = "llama", named: str = "", drops: str = ""
) -> Any:
    """A model whose attention is a class of this file, and adds a bias by itself, or one that it is given.

    The forward of the class names its function as `named`, or as those of transformers do. It may drop an option.
    """
    model = make(of)
    base: Any = type(model.model.layers[0].self_attn)
    code, names = base.forward.__code__, dict(vars(sys.modules[base.__module__]))
    plain = names["eager_attention_forward"]

    def own(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, slope: Any = None, **options: Any) -> Any:
        place = torch.arange(k.shape[2], dtype=q.dtype)
        added = (bias if slope is None else slope) * (place - place[-q.shape[2] :, None])
        options.pop(drops, None)
        assert options.get("s_aux") is getattr(module, "sinks", None)  # as the model passes them
        return plain(module, q, k, v, added + mask, **options)

    eager = named or "eager_attention_forward"
    code = code.replace(co_names=tuple(x.replace("eager_attention_forward", eager) for x in code.co_names))
    forward: Any = FunctionType(code, names | {eager: own}, argdefs=base.forward.__defaults__)
    kind = type("Own", (base,), {"forward": forward, "__module__": __name__})
    if through_super:
        kind = type("Own", (kind,), {"forward": lambda x, **options: super(type(x), x).forward(**options)})
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


def _forward_of_ones_own(self: Any, *args: Any, **options: Any) -> Any:
    own = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, _forward_of_ones_own
    )
    return own(self, *args, **options)


def test_what_attention_of_ones_own_adds_is_not_lost() -> None:
    """It is refused, and so is an option that no pipeline reads, when it is given. Plain attention is sparse."""
    ids, recorder = tokens(60), DensityRecorder()
    plain: list[dict[str, Any]] = [{"through_super": True}, {"of": "gemma2"}, {"of": "gpt_oss"}]
    biased = ({"bias": 0.01} | options for options in (*plain, {}, {"named": "mine"}))
    for options in (*biased, {"of": "gemma2", "drops": "softcap"}):
        with pytest.raises(ValueError, match=r"by the eager function of Own, a function of .*transformers that"):
            attach(of_ones_own(**options).bfloat16(), SPARSE)
    patched = make("llama")
    for layer in patched.model.layers:
        layer.self_attn.forward = MethodType(_forward_of_ones_own, layer.self_attn)
    with pytest.raises(ValueError, match=rf"a function of {__name__} that"):
        attach(patched, SPARSE)
    for options in plain:
        assert_same_logits(of_ones_own(**options), lambda model: model(ids).logits, None)
    model = of_ones_own()
    for layer in model.model.layers[1:]:  # around the forward of the class, as to time it
        layer.self_attn.forward = lambda *args, of=layer.self_attn.forward, **options: of(*args, **options)
    assert_same_logits(model, lambda model: model(ids).logits, recorder)
    assert all_sparse(recorder)
    with attached(model, None), pytest.raises(ValueError, match="Own passes 'slope' on"):
        model(ids, slope=0.01)
    model.set_attn_implementation("sdpa")  # which does not read it either
    assert_same_logits(model, lambda model: model(ids, slope=0.01).logits, None)


def test_modules_that_were_put_in_since_are_dense_and_say_so() -> None:
    model, recorder, ids = make("llama"), DensityRecorder(), tokens(60)
    model.set_attn_implementation("sdpa")
    layer, expected = model.model.layers[1], model(ids).logits
    with attached(model, recorder):
        known, layer.self_attn = layer.self_attn, modeling_llama.LlamaAttention(model.config, 1).eval()
        layer.self_attn.load_state_dict(known.state_dict())
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert recorder.sparse_calls() == {0: 1}
    assert recorder.dense_calls() == {1: Counter({"not attached": 1})}


class _Doubled(TorchFunctionMode):
    """Attention of a user's own, for every call of PyTorch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return 2 * out if func is torch.nn.functional.scaled_dot_product_attention else out


def test_a_function_mode_keeps_its_effect() -> None:
    model, recorder, ids = make("llama"), DensityRecorder(), tokens(60)
    model.set_attn_implementation("sdpa")
    with _Doubled(), torch.device("cpu"):
        expected = model(ids).logits
        with attached(model, recorder):
            assert torch.equal(model(ids).logits, expected)
    assert all_dense(recorder, "function mode")
    with torch.device("cpu"), attached(model, recorder):  # also a mode, which changes no attention
        assert not torch.allclose(model(ids).logits, expected, atol=0.1)
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 1)


def test_ranks_that_split_the_tokens_are_dense(tmp_path: Path) -> None:
    """PyTorch's own function knows the tokens of the other ranks, and a pipeline would not."""
    model, recorder, ids = make("llama"), DensityRecorder(), tokens(64)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        with (
            attached(model, recorder),
            context_parallel(init_device_mesh("cpu", (1,)), buffers=[ids], buffer_seq_dims=[1]),
            pytest.raises(NotImplementedError, match="sharding strategy"),  # which PyTorch has on GPUs alone
        ):
            model(ids, use_cache=False)
    finally:
        dist.destroy_process_group()
    assert recorder.sparse_calls() == {}
    assert recorder.dense_calls() == {0: Counter({"context parallel": 1})}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_model_is_not_traced_with_the_blocks_of_an_example() -> None:
    model = make("llama")
    with attach(model, SPARSE), pytest.raises(ValueError, match=r"^torch\.jit\.trace would keep the blocks"):
        torch.jit.trace(model, tokens(60), check_trace=False)


def test_what_fails_while_attaching_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, recorder = make("llama"), tokens(60), DensityRecorder()

    def fail_half_way(key: str, _: Any) -> None:
        raise KeyError("half-way")

    with attached(model, recorder):
        monkeypatch.setattr(AttentionMaskInterface, "register", fail_half_way)
        with pytest.raises(KeyError, match="half-way"):
            attach(model, SPARSE)
        model(ids)
        assert all_sparse(recorder)
    assert model.config._attn_implementation == "eager"


def test_any_thread_may_detach() -> None:
    model = make("llama")
    attachment = attach(model, SPARSE)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: attachment.detach(), range(8)))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("how", ["detached", "thrown away"])
def test_nothing_keeps_a_pipeline_that_is_not_attached(how: str) -> None:
    model = make("llama")
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())
    config, alive = model.config, weakref.ref(pipeline)
    attachments = [attach(model, pipeline), attach(model, Schedule(pipeline))]
    del pipeline
    if how == "detached":
        for attachment in reversed(attachments):
            attachment.detach()
    else:
        del model
    gc.collect()
    assert alive() is None
    assert config._attn_implementation == "eager"
