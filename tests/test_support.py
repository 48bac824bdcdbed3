"""What docs say of targets and of when calls are sparse is what the code says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blocksparse as bs
from blocksparse.hosts.serving.settings import Settings
from blocksparse.hosts.serving.worth import Worth
from blocksparse.hosts.sglang.batch import call_is_dense_because, layer_is_dense_because
from blocksparse.hosts.vllm.batch import dense_because
from blocksparse.kernels.attention import sparse_attention_triton
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.spec import AttentionSpec
from blocksparse.testing import make_qkv
from tests.machine import GPU
from tests.on_kernels import pretend_gpu

PAGE = Path(__file__).parents[1] / "docs/support.md"
LINES = [line for line in PAGE.read_text().splitlines() if "KiB |" in line]
ROWS = [[cell.strip() for cell in line.strip("| ").split("|")] for line in LINES]
COLUMNS: tuple[tuple[bs.Executor[Any, Any], torch.dtype], ...] = (
    (bs.TritonExecutor(), torch.float16),
    (bs.TritonExecutor(), torch.float32),
    (bs.GatherExecutor(), torch.float16),
    (bs.GatherExecutor(), torch.float32),
    (bs.Int8Executor(fp8_pv=False), torch.float16),
    (bs.Int8Executor(), torch.float16),
)


def test_every_target_has_a_row() -> None:
    assert {row[1]: row[2] for row in ROWS} == {x.name: f"{x.shared >> 10} KiB" for x in TARGETS.values()}
    assert {cell for row in ROWS for cell in row[3:]} == {"timed", "run", "compiled", "refused"}


@pytest.mark.skipif(GPU, reason="pretends other GPUs than there are")
@pytest.mark.parametrize("row", ROWS, ids=[row[1] for row in ROWS])
def test_the_executors_refuse_what_the_page_says(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    has, pipeline = TARGETS[row[1]], bs.s2o(S=32, block=32)
    inputs = {dtype: make_qkv(N=64, D=64, dtype=dtype) for dtype in (torch.float16, torch.float32)}
    traces = {dtype: pipeline.trace(*qkv) for dtype, qkv in inputs.items()}
    pretend_gpu(monkeypatch, has)
    monkeypatch.setattr(torch.version, "hip", None if has.is_nvidia else "7.0")
    monkeypatch.setattr(sparse_attention_triton, "runs_interpreted", lambda: False)
    for said, (executor, dtype) in zip(row[3:], COLUMNS, strict=True):
        trace = traces[dtype]
        reasons = executor.unsupported(*inputs[dtype], trace.mask, trace.spec)
        assert (said == "refused") == bool(reasons), (executor, dtype, reasons)


TEXT = (Path(__file__).parents[1] / "docs" / "start" / "when-sparse.md").read_text(encoding="utf-8")
SPEC = AttentionSpec(scale=1.0)


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this heading, by their first cell."""
    lines = TEXT.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {first: rest for first, *rest in cells}


def first(is_dense: Callable[[int], bool], start: int) -> int:
    low, high = start, 10**6
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_dense(middle) else (low, middle)
    return low


@pytest.mark.parametrize("row", table("call on a GPU"))
def test_a_call_goes_sparse_from_the_length_that_the_page_has(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
    )
    dtype = torch.float32 if "fp32" in row else torch.bfloat16
    chunk = 2048 if "chunks of 2048" in row else None
    _, *lengths = table("call on a GPU")[row]
    with FakeTensorMode():
        like = torch.empty(1, device="cuda", dtype=dtype)
        for heads, length in zip((32, 8, 4), lengths, strict=True):
            served = Worth.of(None, like, heads=heads, kv_heads=1, head_dim=128).executor
            executor = served if "vLLM" in row else bs.AutoExecutor()

            def is_dense(n: int, executor: bs.AutoExecutor = executor, heads: int = heads) -> bool:
                q, k = like.new_empty(1, heads, chunk or n, 128), like.new_empty(1, 1, n, 128)
                return executor.dense_because(q, k, k, SPEC) is not None

            assert first(is_dense, chunk or 1) == int(length)


def test_the_sizes_that_hosts_ask_for() -> None:
    rows = table("host")
    for host in ("transformers", "diffusers"):
        pytest.importorskip(host)
        module = __import__(f"blocksparse.hosts.{host}", fromlist=["attach"])
        parameters = inspect.signature(module.attach).parameters
        names = ("min_tokens", "min_queries", "min_window")
        defaults = [str(parameters[name].default) if name in parameters else "none" for name in names]
        assert rows[host][:3] == defaults
    fields = {field.name: str(field.default) for field in Settings.__attrs_attrs__}
    for host in ("vLLM", "SGLang"):
        assert rows[host][:2] == [fields["min_tokens"], fields["min_queries"]]


def test_up_to_which_length_auto_keeps_everything() -> None:
    (tokens,) = map(int, re.findall(r"keeps every block\*\* is dense: with `auto` up to (\d+) tokens", TEXT))
    selector = bs.auto().selector
    assert selector.keeps_everything(tokens, tokens, causal=True)
    assert not selector.keeps_everything(4 * tokens, 4 * tokens, causal=True)


def in_vllm(**options: Any) -> str | None:
    head_size = options.pop("head_dim", 128)
    return dense_because(
        head_size=head_size, dtype=torch.bfloat16, kv_cache_dtype="auto", attn_type="decoder", options=options
    )


def in_sglang(**options: Any) -> str | None:
    layer = SimpleNamespace(
        is_cross_attention=False,
        attn_type=SimpleNamespace(value="decoder"),
        sliding_window_size=options.get("sliding_window", -1),
        use_irope=False,
        logit_cap=options.get("logits_soft_cap", 0.0),
        pos_encoding_mode="NONE",
        xai_temperature_len=-1,
        qk_head_dim=options.get("head_dim", 128),
        v_head_dim=options.get("head_dim", 128),
    )
    reason = layer_is_dense_because(layer, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    return reason or call_is_dense_because({"sinks": options.get("sinks")})


WINDOW: dict[str, Any] = {"sliding_window": 1024}
# The kinds of layers that a family has, and those of them that go sparse in vLLM, and in SGLang.
KINDS: dict[str, tuple[list[dict[str, Any]], list[int], list[int]]] = {
    "Llama 2": ([{}], [0], [0]),
    "Mistral without": ([{}], [0], [0]),
    "Mistral with a window (": ([WINDOW], [], []),
    "Gemma 2": ([{"logits_soft_cap": 50.0}, {"logits_soft_cap": 50.0, **WINDOW}], [0], []),
    "Gemma 3": ([{"head_dim": 256}, {"head_dim": 256, **WINDOW}], [0], [0]),
    "Gemma 4": ([{"head_dim": 512}, WINDOW], [], []),
    "GPT-OSS": ([{"sinks": torch.zeros(4)}, {"sinks": torch.zeros(4), "sliding_window": 128}], [0], []),
}


@pytest.mark.parametrize("family", KINDS)
def test_engines_leave_layers_dense_as_the_page_has_it(family: str) -> None:
    layers, *by_host = KINDS[family]
    (row,) = (cells for name, cells in table("model family").items() if name.startswith(family))
    for because, cell, sparse in zip((in_vllm, in_sglang), row[2:], by_host, strict=True):
        reasons = [because(**layer) for layer in layers]
        assert [i for i, reason in enumerate(reasons) if reason is None] == sparse
        assert cell.startswith("none") == (not sparse)
        assert (cell == "all") == (len(sparse) == len(layers))
        if named := re.search(r"`(.+)`", cell):
            assert named[1] in reasons
