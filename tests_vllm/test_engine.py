"""Whole engines on a CPU, around tiny random models."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from blocksparse import Pipeline, a_shape
from blocksparse.hosts.serving.layer import PagedAttention, record_dense
from blocksparse.hosts.transformers import attach
from blocksparse.hosts.vllm.batch import part_of
from conftest import HERE, Run
from mixes import EAGER, EVERYTHING, SOME, alone, mix
from tiny_model import VOCABULARY, adapter, gemma, gpt_oss

PAGE = HERE.parent / "docs" / "start" / "write-your-own-stage.md"
SERVED = """
from blocksparse import AutoExecutor, TopK


def mine(k):
    return Pipeline(LongKeysFirst(64), BestKeyScorer(32), TopK(k) | EveryOther(4), AutoExecutor())
"""


def rows(result: dict[str, Any]) -> list[tuple[int, float | None, str]]:
    """Of each layer in the table: sparse calls, their density, and dense calls by reason."""
    lines = result["table"].splitlines()[1:]
    return [(int(line[7:13]), float(line[15:22]) if line[15:22].strip() else None, line[39:]) for line in lines]


@pytest.fixture(scope="session")
def mixes() -> list[dict[str, Any]]:
    return [mix(seed) for seed in range(50)]


@pytest.fixture(scope="session")
def stock(run: Run, mixes: list[Any]) -> dict[str, Any]:
    """What vLLM does without this plugin."""
    return run(mixes, plugins="")


def test_the_dense_limit(run: Run, mixes: list[Any], stock: dict[str, Any]) -> None:
    """The same tokens over chunks, mixed batches, hits of the prefix cache, and requests that begin anew."""
    ours = run(mixes, EVERYTHING | EAGER)
    assert ours["tokens"] == stock["tokens"]
    for result in (stock, ours):
        assert result["preempted"] >= 10
        assert result["cached"] > 1000
        assert result["mixed"] > 200
        assert result["chunks"] > 500
    for sparse, density, dense in rows(ours):
        assert sparse > 300
        assert density == 1.0
        assert re.fullmatch(r"\d+ x decode, (\d+ x fewer than min_(tokens|queries)(, )?){2}", dense)


def test_the_dense_limit_of_the_classes_for_gpus(run: Run, mixes: list[Any], stock: dict[str, Any]) -> None:
    """vLLM's FlashAttention classes around kernels in plain torch, with pages that are split, in both layouts."""
    for backend, some in (("Backend", slice(0, 12)), ("TokensFirst", slice(12, 18))):
        ours = run(mixes[some], EVERYTHING | EAGER, backend=f"gpu_stand_in.{backend}")
        assert ours["tokens"] == stock["tokens"][some]
        assert [density for _, density, _ in rows(ours)] == [1.0, 1.0]


def test_without_a_configuration_the_stock_backend_runs(run: Run, mixes: list[Any], stock: dict[str, Any]) -> None:
    ours = run(mixes[:5])
    assert ours["tokens"] == stock["tokens"][:5]
    assert "sparse in layers" not in ours["log"]


ONCE = ("watch.<locals>.execute_model", "Requests.saw", "SplitBatches.build")
OF_SPARSE = (PagedAttention.__call__, record_dense, part_of)


def test_a_step_without_sparse_requests_is_the_stock_backends(
    run: Run, mixes: list[Any], stock: dict[str, Any]
) -> None:
    """What decides is made of sizes once per step. Each layer makes one call of ours, which asks one question."""
    ours = run(mixes[1:4], SOME | {"min_tokens": 48, "min_queries": 16, "dense_below": 1e18})
    assert ours["tokens"] == stock["tokens"][1:4]
    steps = [step for mix in ours["calls"] for step in mix if "SplitBatches.build" in step]
    for step in steps:
        assert [step.pop(name) for name in ONCE] == [1, 1, 1]
        assert step.pop("SparsePrefill.forward") == 2
        step.pop("_turns_off", None)  # of each request that begins
    assert sum(step.pop("Requests.__init__", 0) for step in steps) == 1
    decodes = [step for step in steps if "SplitBatches._batches" not in step]
    prompts = [step for step in steps if "SplitBatches._batches" in step]
    assert len(decodes) > 10
    assert len(prompts) > 10
    assert not any(decodes)
    for step in prompts:
        assert not {call.__qualname__ for call in OF_SPARSE} & set(step)
    # An engine in one process needs no folder of PROMETHEUS_MULTIPROC_DIR.
    found = re.match(r"prompts: (\d+) x little work \(\d+ tokens\), \d+ x fewer than min_", ours["counters"])
    assert found
    assert ours["exported"] == int(found[1])


def test_true_sparsity(run: Run, mixes: list[Any], stock: dict[str, Any]) -> None:
    # From 129 tokens on some block is left out, so that every sparse call has something to audit.
    ours = run(mixes[:20], SOME | EAGER | {"min_tokens": 129, "audit": {"every": 4, "rows": 16}})
    assert ours["tokens"] != stock["tokens"][:20]
    for sparse, density, _ in rows(ours):
        assert sparse > 100
        assert density is not None
        assert 0.2 < density < 0.8
    for line in ours["audit"].splitlines()[1:]:  # layer, calls, audited calls, covered mass
        _, calls, audited, covered, *_ = line.split()
        assert int(calls) // 4 <= int(audited) <= int(calls) // 4 + 1
        assert 0.2 < float(covered) < 1


@pytest.fixture
def own_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stages of "Write your own stage" as they stand on that page, in a module outside of this library."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    stages = [block for block in blocks if "@frozen" in block]  # a permuter, a scorer, a selector, an executor
    (tmp_path / "own_stages.py").write_text("\n".join([*stages, SERVED]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    return EAGER | {"preset": "own_stages:mine", "settings": {"k": 3}}


def same_tokens(run: Run, model: Path, pipeline: Pipeline[Any, Any, Any], some: object, *chunks: int) -> None:
    """One pipeline in transformers and in vLLM, which cuts the prompt of 700 tokens into chunks."""
    served = [alone(700, chunk=chunk) for chunk in chunks]
    ours = run(served, some, enable_prefix_caching=False)
    reference = LlamaForCausalLM.from_pretrained(model).eval()
    prompt = torch.tensor([served[0]["requests"][0]["prompt"]])
    ones = torch.ones_like(prompt)
    with torch.no_grad(), attach(reference, pipeline, min_tokens=1, min_queries=2):
        text = reference.generate(prompt, attention_mask=ones, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert [mix[0] for mix in ours["tokens"]] == [text[0, 700:].tolist()] * len(chunks)


def test_the_same_tokens_as_in_transformers(run: Run, model: Path) -> None:
    same_tokens(
        run, model, a_shape(**SOME["settings"]), SOME | EAGER | {"min_tokens": 1, "min_queries": 2}, 512, 128, 50
    )


def test_own_stages_have_the_same_tokens_as_in_transformers(
    run: Run, model: Path, own_stages: dict[str, Any]
) -> None:
    """In chunks of whole segments of the permuter, and whole blocks."""
    pipeline = import_module("own_stages").mine(3)
    same_tokens(run, model, pipeline, own_stages | {"min_tokens": 1, "min_queries": 2}, 512, 128)


LAST = EAGER | {"preset": "pipelines:with_last_queries", "settings": {"tokens": 96}}


@pytest.mark.parametrize(
    "some", [LAST, LAST | {"preset": "pipelines:as_auto", "settings": {"mass": 0.6}}], ids=["positions", "scores"]
)
def test_the_last_queries_are_those_of_the_prompt(run: Run, some: dict[str, Any]) -> None:
    """The same tokens whole and in chunks of whole blocks, of which the last ones alone have dense rows."""
    served = [alone(480, chunk=chunk) for chunk in (512, 160, 96, 32)]
    ours = run(served, some, enable_prefix_caching=False)
    whole, *chunked = [mix[0] for mix in ours["tokens"]]
    assert chunked == [whole] * 3
    assert whole != run(served[:1], SOME | EAGER)["tokens"][0][0]
    assert whole != run(served[:1], plugins="")["tokens"][0][0]


def test_the_last_queries_of_prompts_that_share_steps(run: Run) -> None:
    """Several prompts per step in chunks of 64, and hits of the prefix cache: as each prompt by itself."""
    draw = random.Random(0)
    # No prompt ends where another reads from the cache, which would hold keys of dense rows there.
    shared = draw.choices(range(3, VOCABULARY), k=128)
    requests = [
        {
            "arrives": draw.randint(0, 5),
            "prompt": shared + draw.choices(range(3, VOCABULARY), k=draw.randint(130, 380)),
            "tokens": 4,
        }
        for _ in range(6)
    ]
    options: dict[str, Any] = {"num_gpu_blocks_override": 128}
    ours = run([{"chunk": 512, "requests": requests}], LAST, long_prefill_token_threshold=64, **options)
    each = [{"chunk": 512, "requests": [one | {"arrives": 0}]} for one in requests]
    alone = run(each, LAST, enable_prefix_caching=False, **options)
    assert ours["tokens"][0] == [tokens for (tokens,) in alone["tokens"]]
    assert ours["cached"] >= 128
    assert ours["chunks"] > 3 * len(each)
    assert ours["mixed"] > 0


def test_a_request_turns_sparsity_off(run: Run) -> None:
    """One of two prompts of a step does; a word that is neither true nor false is ignored."""
    one, other = alone(480)["requests"][0], alone(450)["requests"][0]
    requests = [one | {"extra_args": {"blocksparse": False}}, other | {"extra_args": {"blocksparse": "off"}}]
    ours = run([{"chunk": 512, "requests": requests}], SOME | EAGER, enable_prefix_caching=False)
    dense = run([{"chunk": 512, "requests": [one, other]}], plugins="", enable_prefix_caching=False)
    sparse = run([{"chunk": 512, "requests": [one, other]}], SOME | EAGER, enable_prefix_caching=False)
    assert ours["tokens"][0] == [dense["tokens"][0][0], sparse["tokens"][0][1]]
    assert dense["tokens"][0][0] != sparse["tokens"][0][0]
    assert re.search(r"1 x turned off by the request \(480 tokens\)", ours["counters"])
    assert "extra_args of a request must be false or true, and is ignored: 'off'" in ours["log"]


@pytest.mark.parametrize(
    ("workers", "layers"),
    [
        ({"tensor_parallel_size": 2}, 2),
        # With enforce_eager, vLLM 0.32 itself stops on a CPU: it asserts that its trial run was there.
        ({"pipeline_parallel_size": 2, "enforce_eager": False}, 1),
    ],
    ids=["tensor", "pipeline"],
)
def test_two_workers(
    run: Run, mixes: list[Any], stock: dict[str, Any], workers: dict[str, Any], layers: int
) -> None:
    """Each has half of the heads, or half of the layers."""
    ours = run(mixes[:5], EVERYTHING | EAGER, **workers)
    assert ours["tokens"] == stock["tokens"][:5]
    assert [density for _, density, _ in rows(ours)] == [1.0] * layers  # of the first
    assert " x sparse (" in ours["counters"]


def test_adapters(run: Run, tmp_path: Path) -> None:
    """One of two prompts of a step has a LoRA adapter, and both are sparse."""
    one, other = alone(480)["requests"][0], alone(450)["requests"][0]
    with_adapter = {"chunk": 512, "requests": [one | {"adapter": str(adapter(tmp_path / "adapter"))}, other]}
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    stock = run([with_adapter], plugins="", **options)
    ours = run([with_adapter], EVERYTHING | EAGER, **options)
    assert ours["tokens"] == stock["tokens"]
    assert [(sparse, density) for sparse, density, _ in rows(ours)] == [(2, 1.0)] * 2
    without = run([{"chunk": 512, "requests": [one]}], plugins="")
    assert ours["tokens"][0][0] != without["tokens"][0][0]


def test_with_torch_compile(run: Run, mixes: list[Any], stock: dict[str, Any]) -> None:
    ours = run(mixes[:3], EVERYTHING | EAGER, enforce_eager=False)
    assert ours["tokens"] == stock["tokens"][:3]
    assert [density for _, density, _ in rows(ours)] == [1.0, 1.0]


def test_short_requests_and_layers_without_a_pipeline(run: Run) -> None:
    requests = [alone(40), alone(600), alone(300, chunk=100)]
    ours = run(requests, SOME | {"dense": [0], "min_tokens": 200, "min_queries": 64, "record": True})
    assert (
        "blocksparse: dense (no pipeline for this layer) in layers 0; "
        "sparse in layers 1 (prompts of 200 tokens and more go sparse, by Pipeline(" in ours["log"]
    )
    decode = "21 x decode"
    assert rows(ours) == [
        # Of 300 tokens in chunks of 100 the first one is short, and of 600 in 512 and 88 none is.
        (
            0,
            None,
            f"{decode}, 4 x no pipeline for this layer, 1 x fewer than min_queries, 1 x fewer than min_tokens",
        ),
        (4, rows(ours)[1][1], f"{decode}, 1 x fewer than min_queries, 1 x fewer than min_tokens"),
    ]


@pytest.mark.parametrize("make", [lambda folder: gemma(folder, "sliding_attention", "full_attention"), gpt_oss])
def test_softcaps_and_sinks(run: Run, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """The same tokens in the dense limit; layers with a window stay dense."""
    model, requests = str(make(tmp_path)), [alone(300, chunk=128), alone(200)]
    ours = run(requests, EVERYTHING | EAGER, model=model, num_gpu_blocks_override=128)
    assert ours["tokens"] == run(requests, plugins="", model=model, num_gpu_blocks_override=128)["tokens"]
    (_, _, window), full = rows(ours)
    assert window == "14 x decode, 4 x sliding window"
    assert full == (4, 1.0, "14 x decode")
    sparse = run(requests, SOME | EAGER, model=model, num_gpu_blocks_override=128)
    assert sparse["tokens"] != ours["tokens"]


def test_a_model_without_sparse_layers(run: Run, tmp_path: Path) -> None:
    """A step may have a long and a short prompt."""
    model = str(gemma(tmp_path, "sliding_attention", "sliding_attention"))
    both = {"chunk": 512, "requests": alone(300)["requests"] + alone(20)["requests"]}
    ours = run([both], SOME | EAGER, model=model, num_gpu_blocks_override=128)
    dense = "14 x decode, 1 x fewer than min_tokens, 1 x sliding window"
    assert {(sparse, dense) for sparse, _, dense in rows(ours)} == {(0, dense)}
    assert "no layer of this model goes sparse (sliding window), so the backend changes nothing" in ours["log"]


def test_drafts_are_verified_densely(run: Run) -> None:
    """Prompt lookup: a request that decodes has some queries, not one."""
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    requests = [alone(300, tokens=30)]
    ours = run(requests, EVERYTHING | EAGER, speculative_config=speculative)
    assert ours["tokens"] == run(requests, plugins="")["tokens"]
    assert {sparse for sparse, _, _ in rows(ours)} == {1}


def test_a_spawned_engine(model: Path, own_stages: dict[str, Any]) -> None:
    """A process that begins with nothing gets the name of the backend and its configuration, an own pipeline."""
    done = start(model, {"blocksparse": own_stages})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ +1 +1 +0\.\d+ .*1 x decode$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("configuration", "sentence"),
    [
        (
            {"blocksparse": {"preset": "pbs"}},
            "ConfigurationError: 'blocksparse' in --additional-config cannot be used: there is no preset 'pbs'. "
            "There are auto, pbs_attn, pbs_attn_plus, ",
        ),
        (
            {"blocksparse": {"plan": "no/such/plan.json"}},
            "ConfigurationError: 'blocksparse' in --additional-config cannot be used: the plan cannot be read: "
            "no/such/plan.json: ",
        ),
    ],
)
def test_a_wrong_configuration_stops_the_engine(model: Path, configuration: dict[str, Any], sentence: str) -> None:
    done = start(model, configuration)
    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr


def start(model: Path, configuration: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, str(HERE / "start.py"), str(model), json.dumps(configuration)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=600)
