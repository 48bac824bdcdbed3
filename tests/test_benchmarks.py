"""The benchmarks refuse what is wrong, keep going without a peer, and say what they measured."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from benchmarks import run, same_bits, serving_table, two_trees
from benchmarks.cases import FULL, TINY, Plan, Preset, Served
from benchmarks.inputs import everything
from benchmarks.peers import peer_from
from benchmarks.report import TABLES, Row
from benchmarks.serving import __main__ as serving
from benchmarks.serving import http
from benchmarks.serving.load import Arrival, Latency
from benchmarks.timing import ROUNDS, Candidate, WrongOutputError, check, check_near, measure, medians, ready
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests.specs import asked

CPU = torch.device("cpu")
PLAN = evolve(
    TINY, Hq=2, Hkv=1, budget_ms=1.0, densities=(0.5,), kernel_lengths=(128,), taus=(0.1,), lengths=(128,),
    growth=((64, 0.5), (128, 0.25)), cpu=((256, 16, 64, (0.3,)),),
    serving=(Served(2, 1, (64, 100), D=32, page_sizes=(16,)),),
)  # fmt: skip


def trace_of(q: Tensor, k: Tensor, v: Tensor) -> bs.Trace[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask]:
    """Permuted keys, a tail, and, where queries are fewer, a chunk."""
    parts = bs.SegmentKeySort(S=32), bs.MeanPoolScorer(16), bs.TopCdf(0.6), bs.ReferenceExecutor()
    return bs.Pipeline(*parts).trace(q, k, v)


@pytest.mark.parametrize("M", [200, 75])
def test_check_takes_what_the_mask_means(M: int) -> None:
    q, k, v = make_qkv(M=M)
    trace = trace_of(q, k, v)
    check(trace.output.out, q, k, v, trace.mask, samples=30)


@pytest.mark.parametrize("wrong", ["scaled", "not a number", "dense", "keys in another order"])
def test_check_refuses_a_wrong_output(wrong: str) -> None:
    q, k, v = make_qkv()
    trace = trace_of(q, k, v)
    out = trace.output.out
    outputs = {
        "scaled": out * 1.02,
        "not a number": out.masked_fill(torch.ones_like(out, dtype=torch.bool), float("nan")),
        "dense": torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "keys in another order": bs.ReferenceExecutor()(
            q, k, v.flip(2), trace.mask, asked(trace.mask, trace.spec.scale)
        ).out,
    }
    with pytest.raises(WrongOutputError, match="relative error"):
        check(outputs[wrong], q, k, v, trace.mask, samples=30)


def test_what_fails_its_check_is_not_timed() -> None:
    q, k, v = make_qkv(N=64)
    called = []

    def wrong() -> Tensor:
        called.append(1)
        return torch.zeros_like(q)

    def missing() -> Tensor:
        raise ModuleNotFoundError("No module named 'peer'")

    verify = partial(check, q=q, k=k, v=v, mask=everything(q, k, block=16))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    candidates = {
        "wrong": Candidate(ready(wrong), verify),
        "missing": Candidate(ready(missing), verify),
        "right": Candidate(ready(right.clone), verify),
    }
    figures = measure(candidates, device=CPU, budget_ms=1.0)
    assert list(figures) == list(candidates)
    assert len(called) == 1
    assert figures["wrong"].ms is None
    assert str(figures["wrong"].why).startswith("WrongOutputError")
    assert figures["missing"].why == "ModuleNotFoundError: No module named 'peer'"
    assert figures["right"].ms is not None
    assert figures["right"].why is None


def test_rounds_have_orders_of_their_own() -> None:
    turns: list[str] = []
    medians({name: partial(turns.append, name) for name in "abcd"}, device=CPU, budget_ms=0.0)
    rounds = ["".join(turns[-4 * (i + 1) : len(turns) - 4 * i]) for i in range(ROUNDS)]
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.parametrize("wrong", [{"softcap": 1.0}, {"sinks": 10.0}, {"window": 30}])
def test_the_check_sees_what_a_layer_asks_for(wrong: dict[str, Any]) -> None:
    q, k, v = make_qkv(Hq=2, Hkv=1, N=128, D=32)
    spec, plain = bs.AttentionSpec(scale=32**-0.5, **wrong), bs.AttentionSpec(scale=32**-0.5)
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(), spec, q_block=32, k_block=32)
    mask = bs.BlockMask(grid.visible.expand(1, 2, -1, -1), grid)
    right = bs.ReferenceExecutor()(q, k, v, mask, spec).out
    check(right, q, k, v, mask, spec=spec)
    whole = everything(q, k, block=32)
    with pytest.raises(WrongOutputError):
        check(bs.ReferenceExecutor()(q, k, v, whole, plain).out, q, k, v, mask, spec=spec)


def test_a_peer_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("def call(q, k, v, mask):\n    return lambda: q + q\n")
    q, k, v = make_qkv(N=16)
    assert torch.equal(peer_from(tmp_path / "twice.py")(q, k, v, everything(q, k))(), 2 * q)


@pytest.mark.slow
def test_every_table_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At tiny sizes: calls pass their checks, no table ends early, and each is printed."""
    for name in ("TINY", "QUICK"):
        monkeypatch.setattr(run, name, PLAN)
    monkeypatch.setattr(serving_table, "EMPTY_LAUNCHES", 1)
    monkeypatch.setattr(sys, "argv", ["run", *run.GPU_TABLES, "cpu", "--quick", "--out", str(tmp_path)])
    run.main()
    results, printed = json.loads((tmp_path / "results.json").read_text()), capsys.readouterr().out
    assert "ended_early" not in results
    assert set(results["tables"]) == set(TABLES)
    assert all(results["tables"].values())
    assert all(title in printed for title, _ in TABLES.values())
    monkeypatch.setattr(sys, "argv", ["run", "rats"])
    with pytest.raises(SystemExit):
        run.main()
    assert "no such table: rats" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["one head", "not a number"])
def test_outputs_that_are_not_near_are_refused(wrong: str) -> None:
    want = torch.randn(1, 4, 10, 8)
    assert check_near(want * 1.01, want, tolerance=0.02) == pytest.approx(0.01, rel=1e-3)
    out = want.clone()
    out[:, 2] = float("nan") if wrong == "not a number" else out[:, 2] * 1.03
    with pytest.raises(WrongOutputError, match="head 2: relative L1"):
        check_near(out, want, tolerance=0.02)


@pytest.mark.parametrize("preset", FULL.presets, ids=lambda preset: preset.name)
def test_presets_are_measured_without_rounding(preset: Preset) -> None:
    """The check against float64 refuses 8 bits."""
    executor = FULL.pipeline(preset).executor
    assert isinstance(executor, bs.AutoExecutor) is preset.automatic
    assert not isinstance(executor, bs.Int8Executor)


def test_a_table_that_breaks_leaves_the_others(tmp_path: Path) -> None:
    def breaks(plan: Plan, device: torch.device) -> Iterator[Row]:
        yield {"N": 1024, "preset": "first"}
        raise RuntimeError("broken")

    def holds(plan: Plan, device: torch.device) -> Iterator[Row]:
        yield {"N": 2048, "preset": "second", "figures": {"attend": {"why": "WrongOutputError: head 0"}}}

    results = run.run({"stages": breaks, "growth": holds}, TINY, CPU, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert [len(results["tables"][name]) for name in ("stages", "growth")] == [1, 1]
    assert results["ended_early"] == {"stages": "RuntimeError: broken"}
    assert run.wrong(results) == ["growth, 2048 tokens: WrongOutputError: head 0"]
    assert "environment" in results
    assert "torch" in results["environment"]


def test_two_versions_that_do_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(same_bits, "PRESETS", {"mean_pooling": [{"block": 16}], "s2o": [{"S": 32, "block": 16}]})
    monkeypatch.setattr(
        same_bits, "CALLS", [((1, 2, 1, 70, 70, 8), {}), ((1, 2, 1, 64, 64, 8), {"causal": False})]
    )
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path in (old, new):
        same_bits.record(path)
    every = {"calls": 10, "refused": 0, "choice": 10, "outputs": 10, "all": 10}
    refused = {"calls": 10, "refused": 4, "choice": 6, "outputs": 6, "all": 10}
    assert same_bits.compare(old, new) == {"mean_pooling": every, "s2o": refused}
    found = json.loads(new.read_text(encoding="utf-8"))
    first = next(iter(found.values()))
    first["out"] = first["out"][::-1]
    new.write_text(json.dumps(found), encoding="utf-8")
    assert same_bits.compare(old, new)["mean_pooling"] == {**every, "outputs": 9, "all": 9}


def test_latencies() -> None:
    """The second request loses its last token, the third all of them."""
    arrivals = [Arrival(1.0, 100, 3), Arrival(2.0, 100, 3), Arrival(2.5, 100, 2)]
    found = Latency.of(arrivals, [[1.5, 1.6, 1.8], [3.0, 3.1], []])
    assert (found.requests, found.finished) == (3, 1)
    assert found.requests_per_s == pytest.approx(1 / 2.1)
    assert found.ttft_ms["p50"] == pytest.approx(750)
    assert found.itl_ms == pytest.approx({"p50": 100, "p99": 198})


SERVES = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--cases", "1x2048 1x4000x97@512"], "1x4000x97@512' has 4097 tokens with its answer, more than 4096"),
        (["--tasks", "1024", "4096", "--model", "."], "--tasks must be at most 4032: 4096"),
        (["--engine", "stock again={}"], "names must differ, also from 'stock' and 'stock again': stock again"),
    ],
)
def test_options_that_no_engine_can_follow_are_refused(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(serving, "longest", lambda *_: 4096)
    monkeypatch.setattr(sys, "argv", ["serving", "--length", "4096", *given])
    with pytest.raises(SystemExit):
        serving.main()
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_and_its_engine_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(model=tmp_path, serve="", out=tmp_path, start=60)
    monkeypatch.setattr(http, "VLLM", (sys.executable, "-c", SERVES))
    with http.server(options, "server", ()):
        engine = int((tmp_path / "server.log").read_text().split()[0])
        os.kill(engine, 0)
    state = Path(f"/proc/{engine}/stat")  # gone, or a zombie that nobody has waited for
    assert not state.exists() or state.read_text().split()[2] == "Z"
    monkeypatch.setattr(http, "VLLM", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(SystemExit, match="ended with status 3"), http.server(options, "server", ()):
        pass


class Answering:
    """A process that builds some rows and says how long each takes, in turns."""

    def __init__(self, rows: dict[str, list[float]]) -> None:
        self.stdin, self.stdout = io.StringIO(), self
        self._said: Iterator[str] = iter([json.dumps(list(rows))])
        self._times = {name: iter(times) for name, times in rows.items()}

    def readline(self) -> str:
        if asked := self.stdin.getvalue().splitlines():
            self.stdin.seek(0)
            self.stdin.truncate()
            return json.dumps(next(self._times[asked[-1]]))
        return next(self._said)

    def communicate(self) -> tuple[str, str]:
        return "", ""


def test_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock halves in the second turn, and who comes second is slower by a quarter: not so the ratio."""
    trees = {"old": {"both": [2.0, 5.0], "gone": [1.0] * 2}, "new": {"both": [1.25, 2.0], "new": [1.0] * 2}}
    started: list[tuple[str, ...]] = []

    def start(folder: str, *arguments: str) -> Any:
        started.append((folder, *arguments))
        return Answering(trees[folder] if "answer" in arguments else {})

    monkeypatch.setattr(two_trees, "start", start)
    out = tmp_path / "found.json"
    two_trees.main(["before=old", "after=new", "--turns", "2", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["row"] == "both"
    assert (row["before ms"], row["after ms"]) == (3.5, 1.625)
    assert row["ratio"] == pytest.approx(0.5)
    assert row["turns"] == {"before": [2.0, 5.0], "after": [1.25, 2.0]}
    assert "0.500" in capsys.readouterr().out
    assert sum("compile" in arguments for arguments in started) == 8
    with pytest.raises(SystemExit):
        two_trees.main(["before=old"])
