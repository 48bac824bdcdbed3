"""Commands on thirteen families of models: each works, or says in one sentence why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("scipy")
pytest.importorskip("cattrs")

import transformers
from torch import Tensor

from blocksparse import Schedule, mean_pooling
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.schedule import base_model, text_config
from blocksparse.testing import make_qkv
from blocksparse.tools.cli.main import main
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.measure import build, measure, perplexity
from blocksparse.tools.demo.model import load
from blocksparse.tools.tune import tune
from tests.tiny_model import SIZES, byte_tokenizer
from tests.tune import tiny

pytestmark = pytest.mark.usefixtures("two_candidates")
GROUPED = {**SIZES, "pad_token_id": None}
UNGROUPED = {name: size for name, size in GROUPED.items() if name != "num_key_value_heads"}
ENDS = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
EYES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64,
    "patch_size": 8,
}  # fmt: skip
IMAGES = {"mm_tokens_per_image": 16, "image_token_index": 257, "boi_token_index": 258, "eoi_token_index": 259}
WORKS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=None),
    "phi": lambda: transformers.PhiConfig(**GROUPED),
    "opt": lambda: transformers.OPTConfig(**UNGROUPED, ffn_dim=64, word_embed_proj_dim=64),
    "gpt2": lambda: transformers.GPT2Config(**ENDS, n_embd=64, n_layer=2, n_head=4, n_positions=1024),
    "lfm2": lambda: transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**UNGROUPED),
    "gemma3": lambda: transformers.Gemma3Config(
        text_config={
            **GROUPED, "head_dim": 16, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config=EYES, **IMAGES,
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "granite": (
        lambda: transformers.GraniteConfig(**GROUPED, logits_scaling=8.0),
        {"inspect": "does not make its logits by its output embeddings alone", "demo": "does not make its logits"},
    ),
    "bert": (
        lambda: transformers.BertConfig(**UNGROUPED),
        dict.fromkeys(
            ("inspect", "demo", "tune"), "BertLMHeadModel is not causal: its first tokens see later ones"
        ),
    ),
    "bloom": (
        lambda: transformers.BloomConfig(**ENDS, hidden_size=64, n_layer=2, n_head=4),
        dict.fromkeys(("inspect", "demo", "tune"), "BloomForCausalLM cannot change its attention function"),
    ),
    "t5": (
        lambda: transformers.T5Config(vocab_size=260, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4),
        dict.fromkeys(("inspect", "demo", "tune"), "a causal language model with its tokenizer: "),
    ),
}
COMMANDS = ("inspect", "demo", "tune")


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    if type(config) not in kind._model_mapping:
        kind = transformers.AutoModelForSeq2SeqLM
    kind.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(command: str, folder: Path, out: Path) -> int:
    options = {
        "inspect": f"{folder} {TEXT} --tokens 300 --preset mean_pooling(0.4,block=32) --json",
        "demo": f"--model {folder} --tokens 400 --preset mean_pooling(0.4,block=32)",
        "tune": f"{folder} --tokens 700 600 --count 1 --minimise density",
    }
    return main([command, *options[command].split(), "--out", str(out)])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [x if x == "llama" else pytest.param(x, marks=pytest.mark.slow) for x in WORKS])
def test_commands_work_on_decoders_of_all_families(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(WORKS[name](), tmp_path / name)
    assert run(command, folder, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    if command == "inspect":
        found = json.loads(printed)
        attending = 1 if name == "lfm2" else 2  # its first layer is a convolution
        assert len(found["presets"][0]["layers"]) + len(found["skipped"]) == attending
        assert found["presets"][0]["next_token_kl"] > 0
    elif command == "demo":
        dense, sparse = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
        assert dense["density"] == 1
        assert sparse["density"] < 1
    else:
        plan = json.loads((tmp_path / "out").read_text())
        assert plan["model"]["layers"] == 2


@pytest.mark.parametrize("name", WORKS)
def test_the_helper_names_the_parts_of_every_family(name: str, tmp_path: Path) -> None:
    """The perplexity from hidden states is that of the model's own loss, and a schedule finds the layers."""
    model = load(saved(WORKS[name](), tmp_path / name), device=torch.device("cpu"))
    network, ids = model.network.float(), torch.arange(3, 203)[None]
    model.check_readable()
    assert (text_config(network).num_hidden_layers, text_config(network).num_attention_heads) == (2, 4)
    assert model.longest == 1024
    with torch.no_grad(), attach(network, Schedule(mean_pooling(), dense=(-1,))):
        found = perplexity(
            network, base_model(network)(ids).last_hidden_state, ids, torch.ones(200, dtype=torch.bool)
        )
        # The first token has no prediction, and is counted by the model's loss no more than here.
        assert found == pytest.approx(float(network(ids, labels=ids).loss.exp()), rel=1e-4)


def test_layers_without_attention_do_not_count_as_dense(tmp_path: Path) -> None:
    """A hybrid model, of whose two layers one attends: its density is the model's, in `demo` and in a plan."""
    model = load(saved(WORKS["lfm2"](), tmp_path / "lfm2"), device=torch.device("cpu"))
    network, pipeline = model.network.float(), mean_pooling(0.4, block=32)
    prompt = build(model.tokenizer, TEXT.read_text(encoding="utf-8"), tokens=400, depth=0.5)
    attending = recorded(network, pipeline, prompt.ids)
    assert 0 < attending < 0.9
    row = measure(model, prompt, "half", pipeline, warm_up=make_qkv(N=400, D=16))
    assert row.density == pytest.approx(attending)
    prompts, held = tiny.prompts(1, 0), tiny.prompts(1, 1)
    plan = tune(network, prompts, held, journal=tmp_path / "journal", minimise="density", positions=60)
    (verified,) = plan.evidence.plan.lengths
    assert verified.density == pytest.approx(recorded(network, plan.schedule(network), held[0].ids), rel=1e-4)
    assert verified.density < 0.9


def test_the_picture_is_of_a_layer_with_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Lfm2Config(**GROUPED, layer_types=["full_attention", "conv"])
    folder = saved(config, tmp_path / "lfm2")
    assert run("demo", folder, tmp_path / "out") == 0
    assert main(["demo", "--model", str(folder), "--layer", "1", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "'--layer' must be a layer with attention: 1. The nearest one is 0." in said


def recorded(network: Any, pipeline: AnyPipeline | Schedule, ids: Tensor) -> float:
    """The density of layer 1."""
    recorder = DensityRecorder()
    with torch.no_grad(), attach(network, pipeline, min_tokens=1, min_queries=1, recorder=recorder):
        network(ids, use_cache=False)
    return float(recorder.density()[1].mean())


def said_by(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that it says."""
    (said,) = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith(f"blocksparse {command}: ")
    )
    return said


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_refused_in_one_sentence(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, sentences = REFUSED[name]
    folder = saved(config(), tmp_path / name)
    capsys.readouterr()
    status = run(command, folder, tmp_path / "out")
    if command not in sentences:
        assert status == 0
        return
    assert status == 1
    assert sentences[command] in said_by(command, capsys)


def spoiled(folder: Path, how: str) -> None:
    """Make the saved model one that cannot be read, lacks weights, or holds NaN."""
    weights = folder / "model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "without a head":
        network = transformers.AutoModelForCausalLM.from_pretrained(folder)
        network.model.save_pretrained(folder)
    else:
        network = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.nn.init.constant_(network.model.norm.weight, float("nan"))
        network.save_pretrained(folder)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("cut", "the model must be a causal language model with its tokenizer: "),
        ("without a head", "lacks lm_head.weight"),
        ("nan", "that are not finite"),
    ],
    ids=["cut", "without a head", "nan"],
)
def test_spoiled_models_are_refused_in_one_sentence(
    how: str, sentence: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(WORKS["llama"](), tmp_path / "llama")
    spoiled(folder, how)
    capsys.readouterr()
    assert run(command, folder, tmp_path / "out") == 1
    assert sentence in said_by(command, capsys)
