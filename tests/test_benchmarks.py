"""The benchmarks refuse what is wrong, keep going without a peer, and say what they measured."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from benchmarks import (
    audit_table,
    auto_calls,
    call_tables,
    crossover_table,
    kernel_tables,
    matched_density,
    run,
    same_bits,
    stage_tables,
    two_trees,
    window_table,
)
from benchmarks.cases import FULL, TINY, Plan, Preset
from benchmarks.inputs import everything, structured
from benchmarks.peers import OURS, PORTABLE, SPARSE, peer_from
from benchmarks.report import TABLES, Row, markdown
from benchmarks.serving.load import ANSWERS, LENGTHS, Arrival, Latency, poisson
from benchmarks.timing import ROUNDS, Call, Candidate, WrongOutputError, check, measure, medians, ready
from benchmarks.triton_versions import compared
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests.specs import asked

CPU = torch.device("cpu")
PLAN = evolve(
    TINY,
    Hq=2,
    Hkv=1,
    budget_ms=1.0,
    densities=(1.0,),
    kernel_lengths=(128,),
    lengths=(128,),
    growth=((64, 0.5), (128, 0.25)),
    cpu=((256, 16, 64, (0.3,)),),
)


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


def test_rates_of_the_interpreted_kernel(device: str) -> None:
    peers = {OURS: SPARSE[OURS], PORTABLE: SPARSE[PORTABLE], "absent": absent}
    rows = list(kernel_tables.rates(PLAN, torch.device(device), peers))
    assert [(row["N"], row["D"], row["density"]) for row in rows] == [(128, 32, 1.0)]
    figures = rows[0]["figures"]
    assert figures[OURS]["ms"] > 0
    assert figures[PORTABLE]["ms"] > 0
    assert ("ms" in figures["FA2 dense"]) == (device == "cpu")  # on a GPU it takes half precision alone
    assert figures["absent"]["why"] == "ValueError: not here"
    # Three blocks of 64 x 64 of two heads, two matrix products.
    assert rows[0]["tflop"] == pytest.approx(4e-12 * 32 * 3 * 64 * 64 * 2)


def test_rates_where_values_have_another_head_dim(device: str) -> None:
    rows = list(kernel_tables.wide(PLAN, torch.device(device)))
    assert [(row["N"], row["D"], row["Dv"], row["density"]) for row in rows] == [(128, 64, 32, 1.0)]
    assert rows[0]["figures"][OURS]["ms"] > 0
    assert rows[0]["figures"][PORTABLE]["ms"] > 0
    # Three blocks of 64 x 64 of one head; the products are 64 deep and 32 wide.
    assert rows[0]["tflop"] == pytest.approx(2e-12 * (64 + 32) * 3 * 64 * 64)
    assert rows[0]["bytes"] == 4 * 128 * (64 + 64 + 32 + 32)
    assert "| 128 | 64/32 | 1.000 |" in TABLES["wide"][1](rows)


def test_rates_of_windows_sinks_and_softcaps(device: str) -> None:
    rows = list(window_table.windows(PLAN, torch.device(device)))
    names = ["0.3 of the blocks", "sinks, the same blocks", "softcap, the same blocks"]
    assert [row["layer"] for row in rows] == [*names, "rows of 2 blocks", "window of 100"]
    assert all(row["figures"][OURS]["ms"] > 0 and row["figures"][PORTABLE]["ms"] > 0 for row in rows)
    assert rows[3]["density"] == rows[4]["density"]
    assert [row["plain"] for row in rows] == [None, names[0], names[0], None, "rows of 2 blocks"]
    ours = [rows[i]["tflop"] / rows[i]["figures"][OURS]["ms"] for i in (4, 3)]
    assert f"| {1e3 * ours[0]:.0f} | {ours[0] / ours[1]:.2f} |" in TABLES["windows"][1](rows)


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


def absent(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask) -> Call:
    raise ValueError("not here")


def test_a_peer_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("def call(q, k, v, mask):\n    return lambda: q + q\n")
    q, k, v = make_qkv(N=16)
    assert torch.equal(peer_from(tmp_path / "twice.py")(q, k, v, everything(q, k))(), 2 * q)


def test_structured_inputs_have_structure() -> None:
    torch.manual_seed(1)
    q, k, v = structured(8192, 2, 1, 64, CPU, torch.float32)
    assert (q.shape, k.shape, v.shape) == ((1, 2, 8192, 64), (1, 1, 8192, 64), (1, 1, 8192, 64))
    assert all(bool(x.isfinite().all()) for x in (q, k, v))
    parts = bs.Identity(), bs.MeanPoolScorer(), bs.TopCdf(0.9)
    permutation = parts[0](q, k, bs.AttentionSpec(scale=0.125))
    mask = parts[2](parts[1](q, k, permutation, bs.AttentionSpec(scale=0.125)))
    assert 0.05 < kernel_tables.density_of(mask) < 0.5  # white noise keeps 0.9
    assert kernel_tables.density_of(mask) == pytest.approx(float(mask.density().mean()))


@pytest.mark.parametrize("preset", FULL.presets, ids=lambda preset: preset.name)
def test_presets_are_measured_without_rounding(preset: Preset) -> None:
    """The check against float64 refuses 8 bits."""
    executor = FULL.pipeline(preset).executor
    assert isinstance(executor, bs.AutoExecutor) is preset.automatic
    assert not isinstance(executor, bs.Int8Executor)


@pytest.mark.slow
def test_stages_calls_and_growth_have_what_tables_need() -> None:
    plan = evolve(PLAN, presets=TINY.presets[:1])
    made = {
        "stages": stage_tables.stages,
        "calls": call_tables.calls,
        "growth": stage_tables.growth,
        "crossover": crossover_table.crossover,
        "audit": audit_table.audit,
        "cpu": call_tables.cpu,
    }
    tables = {name: list(table(plan, CPU)) for name, table in made.items()}
    (stage,), (audited,) = tables["stages"], tables["audit"]
    assert all("ms" in row["figures"]["CpuExecutor"] for row in tables["cpu"])
    assert audited["figures"]["audited"]["ms"] > audited["figures"]["call"]["ms"] > 0
    assert set(stage["figures"]) == {"permute", "score", "select", "plan", "attend"}
    assert stage["density"] > 0
    names = [row["method"] for row in tables["calls"] if row.get("ms") is not None]
    assert "FA2 dense" in names
    assert any(name.startswith("pbs_attn(0.") for name in names)
    graphs = [row for row in tables["calls"] if "graph" in row["method"]]
    assert all("NVIDIA" in row["why"] for row in graphs)
    work = [(row["Hq"], row["M"], row["N"], row["operations"]) for row in tables["crossover"]]
    assert work == [(4, 128, 128, 2 * 4 * 128 * 129 // 2 * 64), (2, 64, 128, 2 * 2 * 64 * 193 // 2 * 64)] * 2
    assert all(figure["ms"] > 0 for row in tables["crossover"] for figure in row["figures"].values())
    assert [row["kept_blocks"] for row in tables["growth"]] == sorted(
        row["kept_blocks"] for row in tables["growth"]
    )

    results = json.loads(json.dumps({"environment": {"torch": "2"}, "roofs": {}, "tables": tables}))
    text = markdown(results)
    assert "| pbs_attn |" in text
    assert "| 4 | 128 | 128 | float32 | 4.2e+06 |" in text
    assert "CUDA graphs are for NVIDIA GPUs" in text
    assert f"{audited['share']:.2%}" in text


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


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("TINY", "QUICK"):
        monkeypatch.setattr(run, name, PLAN)
    monkeypatch.setattr(sys, "argv", ["run", "growth", "--quick", "--out", str(tmp_path)])
    run.main()
    assert TABLES["growth"][0] in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())["tables"]["growth"]) == 2
    monkeypatch.setattr(sys, "argv", ["run", "rats"])
    with pytest.raises(SystemExit):
        run.main()
    assert "no such table: rats" in capsys.readouterr().err


def test_errors_at_equal_density() -> None:
    """Read off straight in the logarithm, and nowhere outside of a curve; a method against itself is level."""
    points = [(0.1, 1e-2), (0.2, 1e-3), (0.4, 1e-3)]
    assert matched_density.read_off(points, 0.15) == pytest.approx(10**-2.5)
    assert matched_density.read_off(points, 0.3) == pytest.approx(1e-3)
    assert matched_density.read_off(points, 0.05) is None
    q, k, v = make_qkv(N=128, D=16, Hq=2, Hkv=1)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    preset = partial(bs.mean_pooling, executor=bs.ReferenceExecutor())
    curve = matched_density.curve(preset, (0.5, 1.0), 16, {0: (q, k, v)}, {0: dense})
    assert [x for x, _ in curve] == sorted(x for x, _ in curve)
    assert curve[-1][1] < 1e-10
    curves = {"s2o": points, "mean_pooling": points}
    assert "| 0.15 | 3.2e-03 | 3.2e-03 | 1.0 |" in matched_density.table(curves)


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


# The evidence about `auto`, at tiny sizes


def test_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, named = tmp_path / "calls.json", ["auto", "mean pooling", "minference(300, 500)"]
    sizes = ["--tokens", "700", "--heads", "2", "1", "--budget", "1"]
    auto_calls.main([*sizes, "--methods", *named, "--json", str(out)])
    rows: dict[str, dict[str, Any]] = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["cuDNN dense", "FA2 dense", *named]
    assert "why" in rows["cuDNN dense"]  # which has no GPU here
    for name in named:
        row = rows[name]
        assert row["ms"] > 0
        assert row["choosing"] > 0
        assert row["attending"] > 0
        assert row["times dense"] == pytest.approx(rows["FA2 dense"]["ms"] / row["ms"])
        assert 0 < row["density"] <= 1
        assert 0 <= row["otherwise in fp32"] <= row["blocks"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    with pytest.raises(SystemExit):
        auto_calls.main(["--methods", "none such"])
    made = auto_calls.methods(bs.AutoExecutor(dense_below=0))
    assert made["auto"]() == bs.auto()


def test_in_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from benchmarks import auto_model

    from tests.tiny_model import byte_tokenizer, save_tiny

    save_tiny(tmp_path, byte_tokenizer())
    out, given = tmp_path / "model.json", ["--model", str(tmp_path), "--only", "auto", "skip_softmax"]
    auto_model.main(["quality", *given, "--samples", "0", "600", "--windows", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    dense, *others = found["rows"]
    assert (dense["kl"], dense["density"]) == (0, 1)
    assert [row["setting"] for row in others] == ["balanced", "careful", "fast", "100", "1000", "5000"]
    assert all(abs(row["kl"]) < 1e-3 for row in others if row["preset"] == "auto")  # all blocks are kept
    assert {row["density"] for row in others if row["preset"] == "skip_softmax"} == {None}

    quality = tmp_path / "quality.json"
    out.rename(quality)
    auto_model.main(["times", "600", "2000", *given, "--repeats", "1", "--at-once", "1200", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {(row["tokens"], row["batch"]) for row in rows} == {(600, 2), (2000, 1)}  # the second by YaRN
    assert all(row["attention_ms"] > 0 for row in rows)
    capsys.readouterr()
    auto_model.main(["table", "--from", str(quality), str(out)])
    heads, *lines = [line.strip("| \n").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert heads[2:6] == ["density, 600", "KL, 600", "score, 600", "ms, 600"]
    assert [line[1] for line in lines] == [row["setting"] for row in others]
    for line, row in zip(lines, others, strict=True):
        assert float(line[3]) == pytest.approx(row["kl"], abs=1e-4)
        assert float(line[5]) > 0
        assert line[6:9] == ["-"] * 3  # KL was not measured at the other length
    auto_model.main(["times", "600", *given, "--seconds", "0", "--json", str(out)])
    assert "the time is over at dense" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        auto_model.main(["quality", "--only", "none such"])


# `benchmarks.serving`, without vLLM: loads, their latencies, and tables of results


def test_arrivals_are_the_same_for_all_engines_and_mixed_as_stated() -> None:
    arrivals = poisson(20.0, 100.0)
    assert arrivals == poisson(20.0, 100.0)
    assert arrivals != poisson(20.0, 100.0, seed=1)
    assert len(arrivals) == pytest.approx(2000, rel=0.1)
    assert all(a.at < b.at for a, b in pairwise(arrivals))
    for share, least, most in LENGTHS:
        found = sum(least <= arrival.tokens <= most for arrival in arrivals) / len(arrivals)
        assert found == pytest.approx(share, abs=0.04)
    assert {min(ANSWERS), max(ANSWERS)} >= {min(a.answer for a in arrivals), max(a.answer for a in arrivals)}


def test_latencies() -> None:
    """The second request loses its last token, the third all of them."""
    arrivals = [Arrival(1.0, 100, 3), Arrival(2.0, 100, 3), Arrival(2.5, 100, 2)]
    found = Latency.of(arrivals, [[1.5, 1.6, 1.8], [3.0, 3.1], []])
    assert (found.requests, found.finished) == (3, 1)
    assert found.requests_per_s == pytest.approx(1 / 2.1)
    assert found.ttft_ms["p50"] == pytest.approx(750)
    assert found.itl_ms == pytest.approx({"p50": 100, "p99": 198})


# Two trees take turns


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


def test_rows_have_names_of_their_own() -> None:
    names = [str(point) for point in two_trees.points(two_trees.TABLES, 32768)]
    assert len(set(names)) == len(names)
    assert {name.partition(":")[0] for name in names} == set(two_trees.TABLES)
    assert "rates: kernel, 131072 tokens, D=128, blocks of 128 and 128, 10%" in names


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


# Several processes of each version of Triton


def test_processes_are_compared_with_those_beside_them() -> None:
    rounds = {
        "3.6": [[{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 5.0}, {"a": 1.5, "b": 5.0}], [{"a": 3.0, "b": 5.0}] * 3],
        "3.9": [[{"a": 1.1}, {"a": 2.2}, {"a": 1.65}], [{"a": 3.3}] * 3],
    }
    a, b = compared(rounds)
    assert a["call"] == "a"
    assert abs(a["over"]["3.9"] - 1.1) < 1e-9
    assert a["ms"]["3.6"] == 2.25
    assert a["by_process"]["3.6"] == [1.5, 3.0]
    assert a["spread"] == 2
    assert b["over"] == {"3.6": 1.0}
    assert b["spread"] == 1
