"""Every model there is: which layers are sparse, why the others are not, and what masks mean to them."""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers
from attrs import evolve
from tests.hosts.small_models import VERSION, WORDS, architectures, others, small_model
from tests.hosts.test_transformers import (
    DENSE_LIMIT,
    SIZES,
    SPARSE,
    VOCABULARY,
    WINDOW,
    all_dense,
    all_sparse,
    assert_same_logits,
    attached,
    make,
    random_model,
    tokens,
)
from tests.largest import Largest
from tests.stages import DenseBelow
from transformers.models.llama import modeling_llama

import blocksparse.hosts.transformers.call as integration
from blocksparse import AutoExecutor, FlashAttention4Executor, HeadGroups
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.hosts.transformers.mask_request import attends_several_times
from blocksparse.hosts.transformers.prompt_mask import PromptMask
from blocksparse.layers.schedule import Schedule


def llama4() -> Any:
    """Of four layers, the last of which has no chunks of attention."""
    sizes: dict[str, Any] = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
    sizes |= SIZES | {"num_hidden_layers": 4, "attention_chunk_size": WINDOW}
    config = transformers.Llama4TextConfig(**sizes)
    return random_model(transformers.AutoModelForCausalLM.from_config, config)


# Models, and which layers are sparse; every other attention is dense for the reason behind it.
BOTH = (
    "qwen2 qwen3 phi glm4 glm4_moe phi3 gpt2 mixtral stablelm biogpt falcon_h1 opt gpt_neox cohere2 mistral "
    "gemma3_text gemma2 gpt_oss"
)
TABLE: dict[str, tuple[list[int], set[str]]] = {
    **dict.fromkeys(BOTH.split(), ([0, 1], set())),
    **dict.fromkeys(("qwen3_next", "jamba", "bamba"), ([1], set())),
    "llama4": ([3], {"mask"}),
    "gemma4_text": ([0, 2, 4], {"head dim above 256"}),
}
SEQ2SEQ: dict[str, Any] = {"d_model": 32, "decoder_start_token_id": 1, "pad_token_id": 0, "vocab_size": VOCABULARY}
LAYERS_OF = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}


def assert_same(actual: Tensor, expected: Tensor, rounding: float = 0.0) -> None:
    """Within fp32 rounding of the largest logit; models amplify that of attention by their later layers.

    `rounding` is that of a model which amplifies more: how far two of its own implementations are apart.
    """
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(
        actual, expected, atol=max(6e-6 * float(expected.abs().max()), 2 * rounding), rtol=0
    )


def assert_as_alone(
    model: Any, run: Callable[[Any], Tensor], recorder: DensityRecorder, rounding: float = 0.0
) -> None:
    """In the dense limit `run` gives what the model computes by itself."""
    expected = run(model)
    with attached(model, recorder):
        assert_same(run(model), expected, rounding)


@pytest.mark.filterwarnings("ignore")  # of models about kernels that are not installed
@pytest.mark.parametrize("name", TABLE)
def test_which_layers_are_sparse(name: str) -> None:
    sparse, reasons = TABLE[name]
    model = llama4() if name == "llama4" else small_model(name)
    ids, mask = tokens(100, batch=2), torch.ones(2, 100, dtype=torch.int64)
    mask[0, :20] = 0
    if name == "gemma2":  # with SDPA, transformers before 5.21 leaves its softcap out
        model.set_attn_implementation("eager")
    for given, prompts in (({}, 1), ({"attention_mask": mask}, 2)):
        recorder, real = DensityRecorder(), mask.bool() if given else slice(None)
        expected = model(ids, **given).logits[real]
        before, rounding = model.config._attn_implementation, 0.0
        if name == "gemma4_text":  # it amplifies ten times as much as the others
            model.set_attn_implementation("eager")
            rounding = float((model(ids, **given).logits[real] - expected).abs().max())
            model.set_attn_implementation(before)
        with attached(model, recorder):
            assert_same(model(ids, **given).logits[real], expected, rounding)
        assert model.config._attn_implementation == before
        assert torch.equal(model(ids, **given).logits[real], expected)
        assert recorder.sparse_calls() == dict.fromkeys(sparse, prompts)
        assert {reason for calls in recorder.dense_calls().values() for reason in calls} == reasons
    if sparse:
        recorder = DensityRecorder()
        with attached(model, recorder, SPARSE):
            model(ids, attention_mask=mask)
        assert float(recorder.density()[sparse].max()) < 0.65  # in a window, of what lies in it


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("padded", [False, True])
def test_decoders_of_two_part_models_are_sparse(name: str, padded: bool) -> None:
    model, recorder, ids = small_model(name), DensityRecorder(), tokens(80, batch=2)
    mask = torch.ones_like(ids)
    mask[0, 60:] = 0
    given: dict[str, Any] = {"decoder_input_ids": ids.flip(1)}
    if padded:
        given |= {"attention_mask": mask, "decoder_attention_mask": mask}
    real = mask.bool() if padded else slice(None)
    assert_as_alone(model, lambda model: model(ids, **given).logits[real], recorder)
    if name == "bart":
        assert recorder.sparse_calls() == dict.fromkeys(range(2), 2 if padded else 1)
        assert recorder.dense_calls() == {layer: Counter({"not causal": 2}) for layer in range(2)}
    else:
        assert recorder.sparse_calls() == {}
        assert recorder.dense_calls()[0] == Counter({"not causal": 2, "position bias": 1})


@pytest.mark.parametrize("padded", [False, True])
def test_modules_that_do_not_say_whether_they_are_causal(padded: bool) -> None:
    """An encoder sees all keys; a decoder of which the mask says it is causal is sparse."""
    ids = tokens(60, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    given: dict[str, Any] = {"attention_mask": mask} if padded else {}
    model = small_model("splinter")
    real = mask.bool() if padded else slice(None)
    recorder = DensityRecorder()
    assert_as_alone(model, lambda model: model(ids, **given).last_hidden_state[real], recorder)
    assert recorder.sparse_calls() == {}
    decoder = make("llama")
    for layer in decoder.model.layers:
        del layer.self_attn.is_causal
    assert_same_logits(decoder, lambda decoder: decoder(ids, **given).logits[real], recorder)
    assert recorder.sparse_calls() == dict.fromkeys(range(2), 2 if padded else 1)


def test_what_an_executor_cannot_run_is_dense() -> None:
    model, ids = make("llama"), tokens(60)
    expected, on_gpus = model(ids).logits, evolve(SPARSE, executor=FlashAttention4Executor())
    for pipeline in (on_gpus, HeadGroups({(0,): None, (1,): on_gpus})):
        for recorder in (DensityRecorder(), None):
            with attach(model, pipeline, min_tokens=1, min_queries=1, recorder=recorder):
                torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
            if recorder is not None:
                assert recorder.sparse_calls() == {}
                (reason,) = recorder.dense_calls()[0]
                assert reason.startswith("FlashAttention4Executor: ")
                assert "q (" not in reason  # no shapes: a reason for each length would be many


def test_dense_attention_by_an_executor_is_recorded_as_that() -> None:
    model, pipeline = make("llama"), evolve(SPARSE, executor=DenseBelow(50))
    for attention in (pipeline, HeadGroups({(0, 1): pipeline}), HeadGroups({(0,): None, (1,): pipeline})):
        recorder = DensityRecorder()
        with attached(model, recorder, attention):
            model(tokens(40))
            model(tokens(60))
        assert recorder.sparse_calls() == {0: 1, 1: 1}
        assert recorder.dense_calls()[0] == {"little work": 1}
        assert float(recorder.density().min()) < 0.8


def test_dense_calls_of_several_lengths_share_a_reason() -> None:
    model, limit = make("llama"), AutoExecutor(dense_below=1e30)
    pipelines: dict[str, Any] = {
        "every block is kept": evolve(DENSE_LIMIT, executor=AutoExecutor()),
        "little work: fewer than 1.0e30 floating-point operations (dense_below)": evolve(SPARSE, executor=limit),
    }
    for reason, pipeline in pipelines.items():
        recorder = DensityRecorder()
        with attached(model, recorder, pipeline):
            for length in (40, 50, 60):
                model(tokens(length))
        assert all_dense(recorder, reason, calls=3)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral", "gemma3"])
@pytest.mark.parametrize("padded", [False, True])
def test_dense_attention_holds_a_few_rows_of_logits(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither logits nor a mask of all pairs, in windows and where the model's own function runs."""
    own = name in ("gemma2", "gpt_oss")
    if own:  # as under torch.compile
        monkeypatch.setattr(integration, "unread_because", lambda *_: "softcap or sinks")
    for name_of_it in ("LOGITS_AT_ONCE", "MASK_AT_ONCE"):
        monkeypatch.setattr(integration, name_of_it, 2**14)
    model, ids, recorder = make(name), tokens(600), DensityRecorder()
    given: dict[str, Any] = {"use_cache": False}
    if padded:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][:, :30] = 0
    real = given["attention_mask"].bool() if padded else slice(None)
    expected = model(ids, **given).logits[real]
    with attached(model, recorder), Largest() as seen:
        actual = model(ids, **given).logits[real]
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    if name != "gemma3":
        assert seen.numbers < 600 * 600 / 2
        assert (recorder.sparse_calls() == {}) == own


@pytest.mark.parametrize("layers", ["all", "none"])
def test_one_line_says_that_nothing_was_sparse(layers: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = make("llama"), tokens(60)
    how: dict[str, Any] = {"min_tokens": 1 if layers == "all" else 61}
    with caplog.at_level(logging.WARNING, "blocksparse"), attach(model, SPARSE, min_queries=1, **how):
        for _ in range(2):
            model.generate(ids, max_new_tokens=3, do_sample=False)
        if layers == "all":
            assert not caplog.records
        else:
            (record,) = caplog.records
            said = (
                "no attention call of LlamaForCausalLM was sparse so far; dense calls: 2 x fewer than min_tokens"
            )
            assert said in record.getMessage()
    assert len(caplog.records) == (layers == "none")
    with caplog.at_level(logging.WARNING, "blocksparse"):
        with attach(model, SPARSE):
            model(ids)
        del model
        gc.collect()
    assert len(caplog.records) == (layers == "none") + 1


class _Wrapper(nn.Module):
    """As PEFT has it: the model deep inside, called through."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"model": model})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base["model"](*args, **kwargs)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("wrap", [_Wrapper, lambda model: torch.compile(model, backend="eager")])
def test_wrapped_models_are_attached_to(wrap: Callable[[Any], Any]) -> None:
    model, recorder, ids = make("llama"), DensityRecorder(), tokens(60)
    assert_as_alone(wrap(model), lambda wrapped: wrapped(ids).logits, recorder)
    assert all_sparse(recorder)
    assert model.config._attn_implementation == "eager"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that of peft
def test_adapters_of_peft_are_attached_to() -> None:
    peft = pytest.importorskip("peft")
    model, recorder, ids = make("llama"), DensityRecorder(), tokens(60)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert_same_logits(adapted.eval(), lambda adapted: adapted(ids).logits, recorder)
    assert all_sparse(recorder)


def test_weights_of_a_module_that_has_a_function_of_another_name() -> None:
    """The eager function of Phi-4's vision tower is not that of its decoder."""
    phi4 = transformers.models.phi4_multimodal
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "crop_size": 32}
    config = phi4.configuration_phi4_multimodal.Phi4MultimodalVisionConfig(**TOWER | more)
    model = random_model(phi4.modeling_phi4_multimodal.Phi4MultimodalVisionModel._from_config, config)
    patches = torch.ones(1, 8, 8, dtype=torch.bool)
    patches[:, :, 6:] = False
    given = {"pixel_values": torch.randn(1, 3, 32, 32), "patch_attention_mask": patches, "output_attentions": True}
    expected = model(**given).attentions
    with attached(model, DensityRecorder()):
        actual = model(**given).attentions
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("heads", [1, 4])
def test_masks_of_one_row_are_for_all_queries(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model's own function runs a few queries at a time."""
    monkeypatch.setattr(integration, "LOGITS_AT_ONCE", 1)
    model, (q, k, v) = make("gemma2"), (torch.randn(2, n, 50, 8) for n in (4, 2, 2))
    added = torch.zeros(2, heads, 1, 50).masked_fill(torch.rand(2, heads, 1, 50) < 0.3, -1e9)
    module = model.model.layers[0].self_attn
    given: dict[str, Any] = {"softcap": 3.0, "scaling": 0.3}
    expected, _ = transformers.models.gemma2.modeling_gemma2.eager_attention_forward(
        module, q, k, v, added, **given
    )
    with attached(model, DensityRecorder()) as attachment:
        attend = transformers.AttentionInterface._global_mapping[attachment.key]
        torch.testing.assert_close(attend(module, q, k, v, added, **given)[0], expected)


@pytest.mark.skipif(not hasattr(transformers, "Inkling2TextConfig"), reason="transformers is too old")
def test_a_sink_for_each_query_goes_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inkling 2 has them, `[B, Hq, M, 1]`, and a position bias."""
    monkeypatch.setattr(integration, "LOGITS_AT_ONCE", 1)
    model, ids, recorder = small_model("inkling2_text"), tokens(80), DensityRecorder()
    assert_as_alone(model, lambda model: model(ids).logits, recorder)
    assert all_dense(recorder, "position bias")


# Masks that a model reads in its own way


def test_tokens_of_pictures_are_dense() -> None:
    """In Gemma 3 they attend in both directions, in layers with and without a window."""
    model, ids, recorder = small_model("gemma3"), tokens(80), DensityRecorder()
    types = torch.arange(80)[None].sub(20).abs().lt(8).long()
    assert not torch.equal(model(ids).logits, model(ids, token_type_ids=types).logits)
    assert_as_alone(model, lambda model: model(ids, token_type_ids=types).logits, recorder)
    assert all_dense(recorder, "mask")


TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SEQ2SEQ_SIZES: dict[str, Any] = (
    SEQ2SEQ | LAYERS_OF | {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "bos_token_id": 1}
)


def test_a_mask_that_was_promised_is_given() -> None:
    """T5Gemma 2 puts the mask of its decoder beside that of its encoder, and so needs one for a whole prompt."""
    model, ids, recorder = small_model("t5gemma2"), tokens(80), DensityRecorder()
    assert_as_alone(model, lambda model: model(ids, decoder_input_ids=ids).logits, recorder)


def test_indexers_get_their_mask() -> None:
    """DeepSeek-V3.2 chooses keys under the mask: what is said is that it chooses, not that None has no parts."""
    model = small_model("deepseek_v32")
    said = "Attention selects its own keys, which cannot|Indexer does arithmetic on the mask"  # the latter in 5.16
    with pytest.raises(ValueError, match=said), attach(model, DENSE_LIMIT):
        model(tokens(80))


def shared_layers(**other: Any) -> Any:
    """Gemma 4, of which the last two layers have the keys of others and read the last queries alone."""
    layers: dict[str, Any] = {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": WINDOW,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    config = transformers.Gemma4TextConfig(**SIZES | {"eos_token_id": 2} | layers | other)
    return random_model(transformers.Gemma4ForCausalLM._from_config, config)


@pytest.mark.parametrize("last", [0, 1, 4, 40])
def test_the_last_queries_of_shared_layers(last: int) -> None:
    ids, recorder = tokens(100), DensityRecorder()
    assert_same_logits(shared_layers(), lambda model: model(ids, logits_to_keep=last).logits, recorder)
    one = last == 1 and VERSION >= (5, 23)  # then the layers that share keys see the last query alone
    assert recorder.sparse_calls() == dict.fromkeys(range(4 if one else 6), 1)
    assert recorder.dense_calls() == ({x: Counter({"decode": 1}) for x in (4, 5)} if one else {})


def test_prompt_lookup_with_shared_layers() -> None:
    model, ids = shared_layers(), tokens(50).repeat(1, 2)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 3}
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    with attached(model, DensityRecorder()):
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **how), expected)


@pytest.mark.parametrize("window", [None, 10])
def test_the_last_rows_of_a_mask_are_a_mask(window: int | None) -> None:
    mask = PromptMask((2, 1, 30, 40), 35, torch.device("cpu"), window=window)
    for rows in (slice(None), slice(0, None), slice(-4, None), slice(-99, 30), slice(7, None)):
        part = mask[:, :, rows, :]
        assert isinstance(part, PromptMask)
        assert torch.equal(part.made(), mask.made()[:, :, rows, :])
    for index in (
        (slice(None), slice(None), slice(3, 9), slice(None)),
        (slice(None), slice(None), slice(None, None, 2), slice(None)),
        (slice(None), slice(None), slice(30, None), slice(None)),
        (slice(None), slice(None), slice(-4, None), slice(9)),
        (slice(1), slice(None), slice(None), slice(None)),
        (0, 0),
        (slice(None), None, slice(None), slice(None)),
    ):
        part = mask[index]
        assert isinstance(part, Tensor)
        assert torch.equal(part, mask.made()[index])


@pytest.mark.parametrize("text", ["Gemma", "Gemma2"])
@pytest.mark.parametrize("types", [False, True])
def test_paligemma_sees_all_of_its_prefix(text: str, types: bool) -> None:
    """Its attention says it is not causal; without token types it is causal by its mask."""
    part = getattr(transformers, f"{text}Config")(**SIZES | {"eos_token_id": 2}, head_dim=8)
    config = transformers.PaliGemmaConfig(
        text_config=part.to_dict(), vision_config=TOWER | {"projection_dim": 32}, image_token_index=60
    )
    model = random_model(transformers.PaliGemmaForConditionalGeneration._from_config, config)
    ids, recorder = tokens(80).clamp_max(59), DensityRecorder()
    given = {"token_type_ids": torch.arange(80)[None].ge(50).long()} if types else {}
    assert_as_alone(model, lambda model: model(ids, **given).logits, recorder)


def test_gemma_is_causal_by_its_mask_whatever_its_module_says() -> None:
    """As with eager attention; transformers' sdpa lets a prompt without padding see all of itself."""
    config = transformers.GemmaConfig(**SIZES | {"eos_token_id": 2}, head_dim=8, use_bidirectional_attention=True)
    model, recorder = random_model(transformers.GemmaForCausalLM._from_config, config), DensityRecorder()
    eager = model(tokens(80)).logits
    model.set_attn_implementation("sdpa")
    assert (model(tokens(80)).logits - eager).abs().max() > 0.01
    with attached(model, recorder):
        assert_same(model(tokens(80)).logits, eager, 0.0)
    assert recorder.sparse_calls()


# ---- arithmetic on masks


def routed() -> Any:
    experts = {"num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    return transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**SEQ2SEQ_SIZES, **experts))


def big_bird_encoder(attention: str) -> Any:
    config = transformers.BigBirdPegasusConfig(**SEQ2SEQ_SIZES, attention_type=attention)
    return transformers.BigBirdPegasusForConditionalGeneration(config)


def informer() -> Any:
    sizes: dict[str, Any] = {"prediction_length": 8, "context_length": 8, "lags_sequence": [1], "d_model": 16}
    return transformers.InformerModel(transformers.InformerConfig(**sizes, encoder_layers=1, decoder_layers=1))


def test_a_mask_is_not_added_to_numbers() -> None:
    """By code that no scan at attaching sees: zeros and ones, which its bools would be, hide nothing."""
    mask: Any = PromptMask((1, 1, 4, 4), 4, torch.device("cpu"))
    scores = torch.zeros(1, 1, 4, 4)
    adds: list[Callable[[], Any]] = [
        lambda: scores + mask, lambda: mask + scores, lambda: torch.add(scores, mask), lambda: scores.add_(mask),
    ]  # fmt: skip
    for add in adds:
        with pytest.raises(ValueError, match=r"^a part of this model adds its mask to numbers.*cannot run while"):
            add()
    assert torch.equal(torch.zeros(1, 1, 4, 4, dtype=torch.bool) + mask, mask.made())  # or, for bools


class Masking(modeling_llama.LlamaAttention):  # type: ignore[misc]
    """Attends by itself, and applies a mask to its logits."""

    apply: Callable[[Tensor, Tensor], Tensor]

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, past_key_values: Any, **_: Any
    ) -> Any:
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in parts)
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (k, v))
        weights = self.apply(self.scaling * q @ k.mT, attention_mask).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize(
    "apply",
    [
        lambda _, logits, mask: logits + mask.to(logits.dtype),
        lambda _, logits, mask: logits + mask.clamp(min=-1e4),
        lambda _, logits, mask: torch.add(logits, mask),
        lambda _, logits, mask: logits.add_(mask[:, :, :, : logits.shape[-1]]),
        lambda _, logits, mask: logits.masked_fill(mask != 0, -1e9),
        lambda _, logits, mask: logits.masked_fill(mask.bool(), -1e9),
    ],
)
def test_masks_of_eager_models_are_numbers_to_their_own_code(
    apply: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masking, "apply", apply, raising=False)
    model = make("llama")
    ids, recorder = tokens(80, batch=2), DensityRecorder()
    own = Masking(model.config, 0).eval()
    own.load_state_dict(model.model.layers[0].self_attn.state_dict())
    model.model.layers[0].self_attn = own
    left = torch.ones_like(ids)
    left[0, :17] = 0

    def read(model: Any, mask: Tensor) -> Tensor:
        logits: Tensor = model(ids, attention_mask=mask).logits
        return logits[:, 17:]

    for mask in (torch.ones_like(ids), left):
        how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
        expected = model.generate(ids, **how)
        assert_same_logits(model, partial(read, mask=mask), recorder)
        with attached(model, recorder):
            assert torch.equal(model.generate(ids, **how), expected)
    assert recorder.sparse_calls().keys() == {1}


@pytest.mark.parametrize(
    ("build", "reader"),
    [
        (lambda: small_model("git"), "GitSelfAttention"),
        (informer, "InformerProbSparseAttention"),
        (lambda: small_model("deepseek_v4"), "DeepseekV4Attention"),
        (routed, "NllbMoeTop2Router"),
        (lambda: big_bird_encoder("original_full"), "BigBirdPegasusSelfAttention"),
        (lambda: big_bird_encoder("block_sparse"), "BigBirdPegasusSelfAttention"),  # it changes for short prompts
    ],
)
def test_models_that_do_arithmetic_on_masks_are_refused(build: Callable[[], Any], reader: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=f"cannot change its attention function: its {reader} does arithmetic on"):
        attach(model, DENSE_LIMIT)
    assert model.config._attn_implementation == build().config._attn_implementation


def test_threads_that_attach_parse_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's parser raises a SystemError where several threads use it at once."""
    running, most, parse = Counter[str](), 0, ast.parse

    def slow(*given: Any, **more: Any) -> Any:
        nonlocal most
        running["threads"] += 1
        most = max(most, running["threads"])
        time.sleep(1e-3)
        running["threads"] -= 1
        return parse(*given, **more)

    models = [make(name) for name in ("llama", "qwen3")]
    monkeypatch.setattr(ast, "parse", slow)
    with ThreadPoolExecutor(len(models)) as pool:
        attachments = list(pool.map(lambda model: attach(model, DENSE_LIMIT), models))
    assert most == 1
    for attachment in attachments:
        attachment.detach()


# ---- layers that share one attention


def tied() -> Any:
    """Of tied layers the second says that it is the first."""
    model = make("llama")
    attach(model, Schedule(DENSE_LIMIT, dense=[1])).detach()
    model.model.layers[1] = model.model.layers[0]
    return model


@pytest.mark.parametrize(
    ("build", "name", "calls"),
    [
        (lambda: small_model("zamba").double(), "Zamba", {-1: 2}),  # its recurrence adds up rounding on some CPUs
        (lambda: small_model("zamba2").double(), "Zamba2", {-1: 2}),
        (lambda: small_model("hrm_text"), "HrmText", {0: 8, 1: 8}),  # two stacks by turns, which both count from 0
        (tied, "Llama", {0: 2}),
    ],
    ids=["zamba", "zamba2", "hrm_text", "tied"],
)
def test_a_schedule_by_layer_needs_layers_that_can_be_told(
    build: Callable[[], Any], name: str, calls: dict[int, int]
) -> None:
    model, ids, recorder = build(), tokens(80), DensityRecorder()
    for schedule in (
        Schedule(DENSE_LIMIT, dense=[0]),
        Schedule(None, layers={-1: DENSE_LIMIT}),
        Schedule(DENSE_LIMIT, same_choice=((0, 1),)),
    ):
        with pytest.raises(ValueError, match=f"name layers of {name}ForCausalLM: they share one {name}Attention"):
            attach(model, schedule)
    expected = model(ids, use_cache=False).logits
    with attached(model, recorder, Schedule(DENSE_LIMIT)):
        assert_same(model(ids, use_cache=False).logits, expected)
    assert recorder.sparse_calls() == calls


def test_a_choice_is_not_shared_by_layers_that_attend_twice() -> None:
    """The second call of a layer would choose for itself."""
    model = small_model("diffllama")
    said = "needs layers that attend once: DiffLlamaAttention of DiffLlamaForCausalLM attends several times"
    with pytest.raises(ValueError, match=said):
        attach(model, Schedule(DENSE_LIMIT, same_choice=((0, 1),)))
    recorder = DensityRecorder()
    with attached(model, recorder, Schedule(DENSE_LIMIT, dense=[1])):
        model(tokens(80), use_cache=False)
    assert recorder.sparse_calls() == {0: 2}
    assert recorder.dense_calls() == {1: {"no pipeline for this layer": 2}}


class OnePart(nn.Module):
    def forward(self, x: Any, whole: bool) -> Any:
        attend: Any = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
        if whole:
            return attend(self, x)
        return attend(self, x[0])


class EachPart(nn.Module):
    def forward(self, x: Any) -> Any:
        attend: Any = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
        return [attend(self, part) for part in x]


class BothParts(nn.Module):
    def forward(self, x: Any, whole: bool) -> Any:
        attend: Any = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
        if not whole:
            attend(self, x[0])
            attend(self, x[1])
        return attend(self, x) if whole else None


def test_layers_that_attend_twice_in_a_loop_or_a_branch() -> None:
    assert [attends_several_times(kind) for kind in (OnePart, EachPart, BothParts)] == [False, True, True]


def test_a_schedule_by_layer_takes_layers_beside_which_images_are_seen() -> None:
    """Layers of Idefics whose keys are of images count from 0 too, and are always dense."""
    model, recorder = small_model("idefics"), DensityRecorder()
    size = model.config.vision_config.image_size
    images, seen = torch.randn(1, 1, 3, size, size), torch.ones(1, 80, 1).long()
    with attached(model, recorder, Schedule(None, layers={1: DENSE_LIMIT})):
        model(tokens(80), pixel_values=images, image_attention_mask=seen)
    assert recorder.sparse_calls() == {1: 1}


# ---- layers without attention


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        (Schedule(None, layers={0: DENSE_LIMIT}), 0),
        (Schedule(None, layers={-2: DENSE_LIMIT}), -2),
        (Schedule(DENSE_LIMIT, same_choice=((0, 1),)), 0),
    ],
)
def test_a_schedule_gives_no_pipeline_to_a_layer_without_attention(schedule: Schedule, named: int) -> None:
    """The first of the two layers is a convolution. A choice that layer 1 should take would never be made."""
    model = small_model("lfm2_moe")
    said = rf"^layer {named} of Lfm2MoeForCausalLM has no attention that .* Leave it out of .* have: \[1\]\.$"
    with pytest.raises(ValueError, match=said):
        attach(model, schedule)
    for dense in (Schedule(DENSE_LIMIT, dense=[0]), Schedule(DENSE_LIMIT, layers={0: None})):
        recorder = DensityRecorder()
        with attached(model, recorder, dense):
            model(tokens(80))
        assert recorder.sparse_calls() == {1: 1}


def test_a_schedule_may_name_layers_of_other_ranks() -> None:
    """As those of a model's stage in pipeline parallelism. The class of layer 0 leaves its forward to its base."""
    model, recorder = make("llama", num_hidden_layers=3), DensityRecorder()
    base = type(model.model.layers[0].self_attn)

    class Inherits(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    model.model.layers[0].self_attn.__class__ = Inherits
    del model.model.layers[2:]
    with attached(model, recorder, Schedule(None, layers={0: DENSE_LIMIT, 2: DENSE_LIMIT})):
        model(tokens(80), use_cache=False)
    assert recorder.sparse_calls() == {0: 1}


# Every model that transformers can build small


TOKENS, KNOWN = 160, 120  # how long prompts are, and how much of two prompts is the same
ROUNDING = 1e-4  # of the largest logit


def outcome(kind: str) -> str:
    """What comes of an architecture: "sparse" somewhere, "dense", "refused", "raises" or "not built".

    A built model that is attached to gives what it gives alone, sees no more of the future than alone, and is as
    before when it is detached; or this raises an AssertionError.
    """
    try:
        model = small_model(kind)
        plain = logits(model, PROMPT)
    except Exception:  # whatever its config says
        return "not built"
    before, recorder = model.config._attn_implementation, DensityRecorder()
    try:
        attachment = attach(model, DENSE_LIMIT, min_tokens=16, min_window=16, recorder=recorder)
    except ValueError as error:
        return "refused" if "cannot change its attention function" in str(error) else str(error)
    with attachment:
        try:
            attached = logits(model, PROMPT)
        except ValueError as error:
            return "raises" if "while a pipeline is attached" in str(error) else str(error)
        ahead = logits(model, OTHER)
    known = slice(KNOWN)
    differs, sees = far(attached, plain), far(ahead[:, known], attached[:, known])
    if max(differs, sees) > ROUNDING:  # of models that amplify it, and of those that see the future by themselves
        allowed = rounding(kind, plain)
        assert differs <= allowed, "attends to something else"
        assert sees <= far(logits(model, OTHER)[:, known], plain[:, known]) + allowed, "sees the future"
    assert torch.equal(logits(model, PROMPT), plain), "is not restored"
    assert model.config._attn_implementation == before
    return "sparse" if recorder.sparse_calls() else "dense"


def logits(model: Any, ids: Tensor) -> Tensor:
    torch.manual_seed(0)  # of models that draw numbers
    if model.config.is_encoder_decoder:
        given = {"input_ids": PROMPT, "decoder_input_ids": ids}
    else:
        given = {"input_ids": ids}
    found: Tensor = model(**given, use_cache=False).logits
    return found


def far(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    return float((actual - expected).abs().max() / expected.abs().max())


def rounding(kind: str, plain: Tensor) -> float:
    """How far logits may be from one another: twice as far as two implementations in transformers are."""
    model = small_model(kind)
    model.set_attn_implementation("sdpa" if model.config._attn_implementation == "eager" else "eager")
    return max(ROUNDING, 2 * far(logits(model, PROMPT), plain))


PROMPT, OTHER = (
    torch.randint(5, WORDS - 10, (1, TOKENS), generator=torch.Generator().manual_seed(0)) for _ in "12"
)
OTHER[:, KNOWN:] = PROMPT[:, KNOWN:].flip(1)

# What is not sparse with transformers 5.23. Whatever else it has is sparse somewhere, also what is new.
EXPECTED: dict[str, str] = {
    "refused": "big_bird bigbird_pegasus bloom codegen cpmant deepseek_v4 falcon falcon_mamba fsmt git gpt_neo "
    "gpt_neox_japanese gptj led lfm3 lfm3_vl mamba mamba2 megatron-bert mpt mvp openai-gpt "
    "prophetnet recurrent_gemma rembert roformer rwkv trocr xglm xlnet xlstm",
    "raises": "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4 mistral_large4",
    "dense": "bert bert-generation camembert data2vec-text doge electra encoder-decoder ernie inkling2_text "
    "inkling_text llama4 llama4_text longt5 mt5 qwen4_exp qwen4_exp_text roberta roberta-prelayernorm roc_bert "
    "switch_transformers t5 t5gemma2 umt5 unlimited_ocr xlm-roberta xlm-roberta-xl",
    "not built": "blip blip-2 blt chameleon cohere_compass cohere_compass_text cosmos3_edge dbrx deepseek_ocr2 "
    "diffusion_gemma dots3_note emu3 ernie4_5_vl_moe fast_vlm florence2 gemma3n gemma4_assistant "
    "gemma4_unified_assistant glm4v_moe glm5_next granite4_vision granite_speech granite_speech_plus "
    "hunyuan_vl idefics inkling2 inkling_mm_model instructblip instructblipvideo janus kosmos-2 "
    "longcat_flash molmo2 muse_spark musicgen musicgen_melody nemo_speechlm nemotron_h_omni "
    "perception_lm pi0 pix2struct pp_formulanet reformer udop vibevoice_asr "
    "vision-encoder-decoder voxtral_realtime xlm xmod",
}


@pytest.mark.slow  # some 60 s
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_that_can_be_built_small() -> None:
    """In the dense limit each gives what it gives alone, sees no more of the future, and is restored."""
    found: dict[str, list[str]] = {}
    for kind in architectures():
        try:
            found.setdefault(outcome(kind), []).append(kind)
        except AssertionError as error:
            found.setdefault("wrong", []).append(f"{kind} {error}".split("\n")[0])
    assert "wrong" not in found
    sparse = found.pop("sparse")
    assert len(sparse) > 100
    if VERSION == (5, 23):
        assert {what: " ".join(kinds) for what, kinds in found.items()} == EXPECTED


def outputs(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    return [x for x in model(**given).to_tuple() if isinstance(x, Tensor) and x.is_floating_point()]


def what_it_takes(model: Any) -> dict[str, Tensor]:
    """Tokens, a picture, or both: the first of them that the model runs on."""
    text, picture = {"input_ids": PROMPT}, {"pixel_values": torch.randn(1, 3, 16, 16)}
    for given in (text, picture, text | picture):
        if given.keys() <= inspect.signature(model.forward).parameters.keys():
            with suppress(Exception):  # whatever it lacks
                outputs(model, given)
                return given
    raise ValueError("takes something else")


@pytest.mark.slow  # some 60 s
@pytest.mark.filterwarnings("ignore")
def test_every_other_model_that_can_be_built_small() -> None:
    wrong, right = [], 0
    for kind in others():
        try:
            model = small_model(kind)
            given = what_it_takes(model)
            plain = outputs(model, given)
            attachment = attach(model, DENSE_LIMIT, min_tokens=16, min_window=16)
        except Exception:  # not built, or refused
            continue
        with attachment:
            try:
                attached = outputs(model, given)
            except ValueError as error:
                if "while a pipeline is attached" in str(error):
                    continue
                raise
        right += 1
        if not all(far(x, y) <= ROUNDING for x, y in zip(attached, plain, strict=True) if y.any()):
            wrong.append(kind)
    assert wrong == []
    assert right > 70
