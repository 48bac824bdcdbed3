"""The benchmark of a video model measures what it says, and refuses a model whose attention is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from benchmarks import video

import blocksparse as bs

# On a GPU the benchmark itself checks what it measures, in bf16 and at a size where a share of the blocks shows.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is tried on a CPU")


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "SHAPE", video.SHAPE | {"ffn_dim": 64, "text_dim": 16})


def test_every_method_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, small = tmp_path / "video.json", "--latent 4 16 24 --layers 1 --heads 2 --repeats 1 --shares 0.5"
    monkeypatch.setattr(sys, "argv", ["video", *small.split(), "--json", str(path)])
    video.main()
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
    """A model that leaves blocks out passes no check."""
    model = video.make_model(1, 1, torch.device("cpu"), torch.float32)
    given: dict[str, Any] = {
        "hidden_states": torch.randn(1, 16, 2, 16, 32),
        "timestep": torch.tensor([900]),
        "encoder_hidden_states": torch.randn(1, 4, 16),
    }
    sparse = bs.Pipeline(bs.HilbertOrder(), bs.MeanPoolScorer(64), bs.TopK(share=0.5), video.EXACT)
    with pytest.raises(RuntimeError, match="not shown to be the dense one"):
        video.check(model, given, sparse, video.BACKENDS["cpu"][1])
