"""Masks that a model reads in its own way: causal by the mask alone, masks that were promised, and arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from tests.hosts.small_models import small_model
from tests.hosts.test_transformers import (
    DENSE_LIMIT,
    SIZES,
    VOCABULARY,
    WINDOW,
    assert_same_logits,
    attached,
    tokens,
)
from tests.hosts.test_transformers_models import LAYERS_OF, SEQ2SEQ, assert_as_alone, assert_same, random_model

from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.hosts.transformers.prompt_mask import PromptMask
from blocksparse.layers.schedule import Schedule

PART: dict[str, Any] = SIZES | {"head_dim": 8, "query_pre_attn_scalar": 8, "eos_token_id": 2}
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


def pegasus_x() -> Any:
    return transformers.PegasusXForConditionalGeneration, transformers.PegasusXConfig(**SEQ2SEQ_SIZES)


def nllb_moe() -> Any:
    experts = dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 9)  # so that none routes
    return transformers.NllbMoeForConditionalGeneration, transformers.NllbMoeConfig(**SEQ2SEQ_SIZES, **experts)


def big_bird() -> Any:
    return transformers.BigBirdPegasusForCausalLM, transformers.BigBirdPegasusConfig(**SEQ2SEQ_SIZES)


@pytest.mark.parametrize("build", [pegasus_x, nllb_moe, big_bird])
@pytest.mark.parametrize("sparse", [False, True])
def test_decoders_that_are_causal_by_their_mask_alone(build: Callable[[], Any], sparse: bool) -> None:
    """Their modules say `is_causal=False`; no token sees the future all the same."""
    architecture, config = build()
    model, ids, recorder = random_model(architecture._from_config, config), tokens(80), DensityRecorder()
    assert not any(getattr(x, "is_causal", False) for x in model.modules())
    other = torch.cat((ids[:, :50], tokens(30)), 1)

    def logits(ids: Tensor) -> Tensor:
        given = (ids,) if build is big_bird else (tokens(40), None, ids)
        found: Tensor = model(*given).logits
        return found

    expected = logits(ids)
    with attach(model, DENSE_LIMIT, min_tokens=16 if sparse else 1000, recorder=recorder):
        actual = logits(ids)
        changed = logits(other)
    assert_same(changed[:, :50], actual[:, :50])
    assert float((changed - actual)[:, 50:].abs().max()) > 0.1
    assert_same(actual, expected)
    assert recorder.sparse_calls() == (dict.fromkeys(range(2), 2) if sparse else {})


def test_a_mask_that_was_promised_is_given() -> None:
    """T5Gemma 2 puts the mask of its decoder beside that of its encoder, and so needs one for a whole prompt."""
    config = transformers.T5Gemma2Config(
        encoder={"text_config": PART, "vision_config": TOWER, "mm_tokens_per_image": 16, "image_token_index": 60}
        | {"boi_token_index": 58, "eoi_token_index": 59},
        decoder=PART,
        image_token_index=60,
        eoi_token_index=59,
    )
    model = random_model(transformers.T5Gemma2ForConditionalGeneration._from_config, config)
    ids, recorder = tokens(80).clamp_max(57), DensityRecorder()
    assert_as_alone(model, lambda model: model(ids, decoder_input_ids=ids).logits, recorder)


def test_indexers_get_their_mask() -> None:
    """DeepSeek-V3.2 chooses keys under the mask: what is said is that it chooses, not that None has no parts."""
    model = small_model("deepseek_v32")
    with (
        attach(model, DENSE_LIMIT),
        pytest.raises(ValueError, match="Attention selects its own keys, which cannot"),
    ):
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
    assert recorder.sparse_calls() == dict.fromkeys(range(4 if last == 1 else 6), 1)
    assert recorder.dense_calls() == ({x: Counter({"decode": 1}) for x in (4, 5)} if last == 1 else {})


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


# ---- arithmetic on masks


def git() -> Any:
    sizes = {
        name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    }
    return transformers.GitForCausalLM(transformers.GitConfig(vision_config=TOWER, **sizes, num_hidden_layers=1))


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


@pytest.mark.parametrize(
    ("build", "reader"),
    [
        (git, "GitSelfAttention"),
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


# ---- layers that share one attention


@pytest.mark.parametrize("name", ["Zamba", "Zamba2"])
def test_a_schedule_by_layer_needs_layers_that_can_be_told(name: str) -> None:
    model = small_model(name.lower()).double()  # its recurrence adds up rounding, more of it on some CPUs
    for schedule in (
        Schedule(DENSE_LIMIT, dense=[0]),
        Schedule(None, layers={1: DENSE_LIMIT}),
        Schedule(DENSE_LIMIT, same_choice=((0, 1),)),
    ):
        with pytest.raises(ValueError, match=f"name layers of {name}ForCausalLM: they share one {name}Attention"):
            attach(model, schedule)
    ids, recorder = tokens(80), DensityRecorder()
    expected = model(ids).logits
    with attached(model, recorder, Schedule(DENSE_LIMIT)):
        assert_same(model(ids).logits, expected)
    assert recorder.sparse_calls() == {-1: 2}
