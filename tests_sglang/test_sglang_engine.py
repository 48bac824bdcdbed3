"""Whole engines on a CPU, around tiny random models; `make test-sglang` runs these tests.

Each engine has a process of its own, and starts more.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from blocksparse import a_shape
from blocksparse.hosts.transformers import attach
from mixes import EAGER, EVERYTHING, SOME, alone, mix
from tiny_model import gemma, llama

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # several processes of an engine compute at once
Run = Callable[..., dict[str, Any]]
# Small chunks, few slots and steps that read and decode, so that prompts are cut and requests lose slots; and
# larger chunks, and pages, without such steps.
ENGINES: dict[str, dict[str, Any]] = {
    "mixed": {
        "chunked_prefill_size": 64, "enable_mixed_chunk": True, "max_total_tokens": 950,
        "schedule_conservativeness": 0.0,
    },
    "pages": {"chunked_prefill_size": 256, "page_size": 16, "max_total_tokens": 4096},
}  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Start an engine, serve mixes, and end it."""

    def served(
        mixes: list[Any], blocksparse: object = None, *, env: dict[str, str] | None = None, **engine: Any
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        out = tmp_path_factory.mktemp("served") / "result.json"
        options = {"model_path": str(model), "max_total_tokens": 4096, **engine}
        if blocksparse is not None:
            options["prefill_attention_backend"] = "blocksparse"
            options["json_model_override_args"] = json.dumps({"blocksparse": blocksparse})
        done = subprocess.run(
            [sys.executable, HERE / "serve_mixes.py", out],
            input=json.dumps({"engine": options, "mixes": mixes}),
            env=ENVIRONMENT | (env or {}),
            capture_output=True,
            text=True,
            timeout=900,
        )
        return done, out

    return served


@pytest.fixture(scope="session")
def run(start: Callable[..., Any]) -> Run:
    def serve(mixes: list[Any], blocksparse: object = None, **more: Any) -> dict[str, Any]:
        done, out = start(mixes, blocksparse, **more)
        assert out.exists(), done.stdout[-4000:] + done.stderr[-8000:]
        result: dict[str, Any] = json.loads(out.read_text())
        return result | {"log": done.stdout + done.stderr}

    return serve


@pytest.fixture(scope="session")
def mixes() -> list[dict[str, Any]]:
    return [mix(seed) for seed in range(50)]


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ENGINES[request.param]


@pytest.fixture(scope="session")
def stock(run: Run, mixes: list[Any], engine: dict[str, Any]) -> dict[str, Any]:
    """What SGLang does without this plugin."""
    return run(mixes, env={"SGLANG_PLUGINS": "none"}, **engine)


def rows(result: dict[str, Any]) -> list[tuple[int, float | None, str]]:
    """Of each layer in the table: sparse calls, their density, and dense calls by reason."""
    lines = result["table"].splitlines()[1:]
    return [(int(line[7:13]), float(line[15:22]) if line[15:22].strip() else None, line[39:]) for line in lines]


def test_the_dense_limit(run: Run, mixes: list[Any], stock: dict[str, Any], engine: dict[str, Any]) -> None:
    """The same tokens over chunks, mixed batches, hits of the prefix cache, and requests that begin anew."""
    ours = run(mixes, EVERYTHING | EAGER, **engine)
    assert ours["tokens"] == stock["tokens"]
    requests = sum(len(one["requests"]) for one in mixes)
    for result in (stock, ours):
        assert result["cached"] > 1000
        assert (result["retracted"] > 0) == (engine["max_total_tokens"] < 1000)
    for sparse, density, dense in rows(ours):
        assert sparse > requests / 2
        assert density == 1.0
        found = {reason: int(n) for n, reason in re.findall(r"(\d+) x ([^,]+)", dense)}
        assert set(found) == {"decode", "fewer than min_tokens", "fewer than min_queries"}
        assert ("enable_mixed_chunk" in engine) == (found["decode"] > requests)  # beside prompts, in one step


@pytest.mark.parametrize("engine", ["mixed"], indirect=True)
def test_true_sparsity(run: Run, mixes: list[Any], stock: dict[str, Any], engine: dict[str, Any]) -> None:
    ours = run(mixes[:20], SOME | EAGER, **engine)
    assert ours["tokens"] != stock["tokens"][:20]
    for sparse, density, _ in rows(ours):
        assert sparse > 50
        assert density is not None
        assert 0.2 < density < 0.8


def test_the_same_tokens_as_in_transformers(run: Run, model: Path) -> None:
    """One pipeline in the same model, and a prompt that SGLang cuts into chunks."""
    chunk = 50
    served = [alone(700)]
    settings = SOME | EAGER | {"min_tokens": 1, "min_queries": 2}
    ours = run(served, settings, chunked_prefill_size=chunk, disable_radix_cache=True)
    reference = LlamaForCausalLM.from_pretrained(model).eval()
    prompt = torch.tensor([served[0]["requests"][0]["prompt"]])
    ones = torch.ones_like(prompt)
    with torch.no_grad(), attach(reference, a_shape(**SOME["settings"]), min_tokens=1, min_queries=2):
        text = reference.generate(prompt, attention_mask=ones, max_new_tokens=8, do_sample=False)
    assert ours["tokens"] == [[text[0, 700:].tolist()]]
    # Sizes say of the first chunk that all of it is kept.
    assert [(calls, dense) for calls, _, dense in rows(ours)] == [
        (-(-700 // chunk) - 1, "1 x every block is kept")
    ] * 2


def test_short_requests_and_layers_without_a_pipeline(run: Run) -> None:
    ours = run(
        [alone(40), alone(600), alone(300)],
        SOME | {"dense": [0], "min_tokens": 200, "min_queries": 64, "record": True},
        chunked_prefill_size=100,
        disable_radix_cache=True,
    )
    # The first chunks of 300 and of 600 tokens are short of 200; the others are sparse.
    short = "2 x fewer than min_tokens, 1 x fewer than min_queries"
    assert rows(ours) == [
        (0, None, f"7 x no pipeline for this layer, {short}"),
        (7, rows(ours)[1][1], short),
    ]
    assert "blocksparse: dense (no pipeline for this layer) in layers 0; sparse in layers 1" in ours["log"]


def test_windows_and_softcaps_are_dense(run: Run, tmp_path: Path) -> None:
    model = gemma(tmp_path / "gemma", "sliding_attention", "full_attention")
    config = json.loads((model / "config.json").read_text())
    # SGLang reads the older name of an entry.
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": config["hidden_activation"]}))
    ours = run([alone(300)], SOME | EAGER, model_path=str(model))
    assert rows(ours) == [(0, None, "1 x sliding window"), (0, None, "1 x softcap")]


def test_settings_without_the_backend_do_nothing(run: Run) -> None:
    ours = run([alone(300)], json_model_override_args=json.dumps({"blocksparse": SOME | EAGER}))
    assert ours["table"] == ""
    assert "sparse in layers" not in ours["log"]


@pytest.mark.parametrize(
    ("configuration", "options", "sentence"),
    [
        (
            {"preset": "pbs"},
            {},
            "ConfigurationError: 'blocksparse' in --json-model-override-args cannot be used: there is no preset "
            "'pbs'. There are auto, pbs_attn, pbs_attn_plus, ",
        ),
        (
            None,
            {"prefill_attention_backend": "blocksparse"},
            "ConfigurationError: the attention backend blocksparse needs to know what to run. Add "
            """--json-model-override-args '{"blocksparse": {"preset": "auto"}}'""",
        ),
        (
            SOME,
            {"attention_backend": "blocksparse"},
            "ConfigurationError: blocksparse reads prompts and does not decode. Select it with "
            "--prefill-attention-backend blocksparse, and another one, which decodes, with --attention-backend",
        ),
    ],
)
def test_a_wrong_configuration_stops_the_engine(
    start: Callable[..., Any], configuration: object, options: dict[str, Any], sentence: str
) -> None:
    done, out = start([], configuration, **options)
    assert done.returncode != 0
    assert not out.exists()
    assert sentence in done.stdout + done.stderr


def test_a_server(model: Path) -> None:
    """As users start it from the command line, and ask it over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--device", "cpu",
            "--attention-backend", "torch_native", "--prefill-attention-backend", "blocksparse",
            "--json-model-override-args", json.dumps({"blocksparse": SOME | EAGER}), "--dtype", "float32",
            "--skip-tokenizer-init", "--max-total-tokens", "4096", "--port", str(port), "--skip-server-warmup",
        ],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        for _ in range(120):
            time.sleep(2)
            assert server.poll() is None
            try:
                ask(port, "health")
                break
            except OSError:
                continue
        body = {"input_ids": list(range(3, 403)), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        assert ask(port, "generate", body)["meta_info"]["completion_tokens"] == 4
        table = ask(port, "server_info")["internal_states"][0]["blocksparse"]
        assert [sparse for sparse, _, _ in rows({"table": table})] == [1, 1]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def ask(port: int, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None
