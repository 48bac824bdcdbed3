"""The benchmarks of video models measure what they say, and refuse attention that is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from benchmarks import video, video_model
from benchmarks.timing import WrongOutputError

import blocksparse as bs

# On a GPU the benchmark itself checks what it measures, in bf16 and at a size where a share of the blocks shows.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is tried on a CPU")


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_model, "SHAPE", video_model.SHAPE | {"ffn_dim": 64, "text_dim": 16})


def test_every_method_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, small = tmp_path / "video.json", "--latent 4 16 24 --layers 1 --heads 2 --repeats 1 --shares 0.5"
    monkeypatch.setattr(sys, "argv", ["video_model", *small.split(), "--json", str(path)])
    video_model.main()
    results, printed = json.loads(path.read_text()), capsys.readouterr().out
    first, *sparse, bound = results["rows"]
    assert "384 tokens (4, 8, 12), 1 layers, 2 heads" in printed
    assert all(row["method"] in printed for row in results["rows"])
    assert {"sparge 0.5", "pooled means 0.5"} <= {row["method"] for row in sparse}
    for row in sparse:
        assert row["forward_ms"] > 0 < row["alone_ms"]
        assert 0.5 <= row["forward_density"] < 0.75 > row["alone_density"] >= 0.5
        assert 0 < row["error"] < 0.5
    assert first["forward_ms"] > 0 < first["alone_ms"]
    assert bound["forward_ms"] > 0 == bound["forward_density"]


def test_wrong_attention_is_refused() -> None:
    model = video_model.make_model(1, 1, torch.device("cpu"), torch.float32)
    given: dict[str, Any] = {
        "hidden_states": torch.randn(1, 16, 2, 16, 32),
        "timestep": torch.tensor([900]),
        "encoder_hidden_states": torch.randn(1, 4, 16),
    }
    sparse = bs.Pipeline(bs.HilbertOrder(), bs.MeanPoolScorer(64), bs.TopK(share=0.5), video_model.EXACT)
    with pytest.raises(RuntimeError, match="not shown to be the dense one"):
        video_model.check(model, given, sparse, video_model.BACKENDS["cpu"][1])


def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    path = tmp_path / "shapes.json"
    monkeypatch.setattr(sys, "argv", f"video --shapes toy --steps 2 --budget-ms 1 --json {path}".split())
    with torch.no_grad():
        video.main()
    rows = json.loads(path.read_text())["shapes"]["toy"]
    return {row["method"]: row for row in rows}


def test_every_method_is_timed_at_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = told(tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "toy: 1064 tokens (4, 16, 16) + 40, 2 heads of 64" in printed
    assert set(rows) == set(video.methods(0.25, rounds=False))
    for name, row in rows.items():
        assert name in printed
        assert 0.25 < row["density"] < 0.6  # with the blocks of text, and every row of theirs
        timed = ("call", "choose", "attend", "means", "dense", "step", "step_dense")
        assert min(row[f"{part}_ms"] for part in timed) > 0
        assert 0 < row["mean"] < row["fresh"]
        assert 0 < min(row["fresh"], row["old"]) < max(row["fresh"], row["old"]) < 0.3
        assert "is not installed" in row["cudnn_why"]
    assert sum(row["old"] > row["fresh"] for row in rows.values()) > len(rows) / 2


def test_wrong_output_gets_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: Any, **__: Any) -> None:
        raise WrongOutputError("head 0, row 3: relative error 1.00e+00")

    monkeypatch.setattr(video, "check", wrong)
    assert all(set(row) == {"method", "step_dense_ms", "why"} for row in told(tmp_path, monkeypatch).values())
    assert "sparge                     WrongOutputError: head 0, row 3" in capsys.readouterr().out


@pytest.mark.parametrize("name", video.SHAPES)
def test_a_run_ends_in_a_video(name: str) -> None:
    """Shapes hold what they say, and noise is gone in the last step."""
    shape = video.SHAPES[name]
    assert shape.tokens == {"5": 37_800, "10": 75_776, "15": 109_632}.get(name[12:-2], shape.tokens)
    small = video.Shape((2, 4, 4), shape.kept % 7, 2, 16)
    run = video.Denoising(small, 3, torch.device("cpu"), torch.float32)
    q, k, v = run.at(2)
    assert q.shape == k.shape == v.shape == (1, 2, small.tokens, 16)
    assert torch.allclose(k[0], run.clean @ run.projections[1])
    assert not torch.allclose(run.at(0)[1], k, atol=0.1)
