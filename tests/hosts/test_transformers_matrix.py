"""Every model that transformers can build small, attached to."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from tests.hosts.small_models import WORDS, architectures, others, small_model
from tests.hosts.test_transformers import DENSE_LIMIT

from blocksparse.hosts.transformers import DensityRecorder, attach

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
    "inkling_text llama4 llama4_text longt5 mt5 roberta roberta-prelayernorm roc_bert "
    "switch_transformers t5 t5gemma2 umt5 unlimited_ocr xlm-roberta xlm-roberta-xl",
    "not built": "blip blip-2 blt chameleon cohere_compass cohere_compass_text cosmos3_edge dbrx deepseek_ocr2 "
    "diffusion_gemma dots3_note emu3 ernie4_5_vl_moe fast_vlm florence2 gemma3n gemma4_assistant "
    "gemma4_unified_assistant glm4v_moe glm5_next granite4_vision granite_speech granite_speech_plus "
    "hunyuan_vl idefics inkling2 inkling_mm_model instructblip instructblipvideo janus kosmos-2 "
    "longcat_flash molmo2 muse_spark musicgen musicgen_melody nemo_speechlm nemotron_h_omni "
    "perception_lm pi0 pix2struct pp_formulanet qwen4_exp qwen4_exp_text reformer udop vibevoice_asr "
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
    if transformers.__version__.startswith("5.23."):
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
