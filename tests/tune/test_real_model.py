"""A plan for the real model keeps its budget on the prompt that it was verified on, as its evidence says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("scipy")
pytest.importorskip("cattrs")

from blocksparse.hosts.transformers import attach
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.model import load
from blocksparse.tools.tune import Budget, Candidate, prompts_from_text, tune
from blocksparse.tools.tune.sensitivity import Bench, Loss, Reading
from tests.real_model import converted, needs_real_model


@pytest.mark.slow
@needs_real_model
def test_a_plan_for_the_real_model(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(converted(tmp_path_factory), device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    # Short, because the model runs once for each layer and candidate, and once more for the noise; so a few layers
    # of all depths are tuned, and those between them are dense.
    every = Bench.sparse_layers
    monkeypatch.setattr(Bench, "sparse_layers", lambda *call: dict(list(every(*call).items())[1::6]))
    tuned, held, _ = prompts_from_text(model.tokenizer, TEXT.read_text(), tokens=192, count=3)
    candidates = [Candidate("xattention", {"mass": 0.8, "block": 32}, 32)]
    plan = tune(
        model.network, [tuned], [held], journal=tmp_path / "j", candidates=candidates, minimise="density",
        positions=64, budget=Budget(0.03, 0.1, tries=2),
    )  # fmt: skip
    found = plan.evidence
    assert found.plan.text_kl <= 0.03
    assert found.plan.density < 1
    assert found.plan.found >= found.dense_found - 1
    assert any(part.attention for part in plan.layers)
    reading = Reading.of(model.network, held, positions=64, keep_outputs=False)
    assert reading.found == found.dense_found
    with attach(model.network, plan.schedule(model.network), min_tokens=1):
        loss = reading.losses()
    assert loss.found == found.plan.found
    text, answers = loss.less(Loss(found.noise_text_kl, found.noise_answer_kl, found=0))
    assert text == pytest.approx(found.plan.text_kl, rel=0.02)
    assert answers == pytest.approx(found.plan.answer_kl, rel=0.02, abs=1e-4)
