"""What the evidence about `auto` is made by runs on a CPU, at tiny sizes, and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import auto_calls

import blocksparse as bs


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
