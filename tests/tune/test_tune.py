"""Tuning a tiny random model: what its measurements mean, that it goes on after a kill, and its command."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("scipy")
pytest.importorskip("cattrs")

import transformers
from tokenizers import normalizers

from blocksparse import Schedule
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.tools.cli import tune as command
from blocksparse.tools.cli.main import main
from blocksparse.tools.cli.tune import summary
from blocksparse.tools.tune import (
    Budget,
    Candidate,
    Plan,
    TuneError,
    TunePrompt,
    prompts_from_file,
    prompts_from_text,
    tune,
)
from blocksparse.tools.tune.choice import DENSE, Costs, Unit
from blocksparse.tools.tune.journal import Journal, Work
from blocksparse.tools.tune.prompts import by_length
from blocksparse.tools.tune.run import ErrorBounds, sparge_search
from blocksparse.tools.tune.sensitivity import Bench, Reading
from blocksparse.tools.tune.session import Verifier
from tests.hosts.small_models import small_model
from tests.tiny_model import save_tiny, tiny_gemma2
from tests.tune import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.network()


def tuned(model: Any, journal: Path, **other: Any) -> Plan:
    settings: dict[str, Any] = {"candidates": tiny.CANDIDATES, "minimise": "density", "positions": 60}
    settings["budget"] = Budget(0.05, 0.1, tries=3)
    prompts, held = other.pop("prompts", tiny.prompts(2, 0)), other.pop("held", tiny.prompts(2, 1))
    return tune(model, prompts, held, journal=journal, **settings | other)


# ---- what is measured


def test_layers_that_lend_their_keys_run_again() -> None:
    """In Gemma 3n the last layers take the keys of earlier ones, which their outputs do not hold."""
    model, prompt = small_model("gemma3n_text"), TunePrompt(torch.arange(200)[None], ((196, 200),))
    reading = Reading.of(model, prompt, positions=50, keep_outputs=True)
    with attach(model, Schedule(None, layers={5: tiny.pooled(0.5).pipeline()}), min_tokens=1):
        assert reading.losses(5) == reading.losses(0)
        assert reading.losses(5).text > 0


def test_so_do_layers_that_others_name_as_the_source_of_their_keys() -> None:
    """In Mistral Large 4, which `attach` refuses, as it selects its own keys."""
    config = small_model("mistral_large4").config
    config.text_config.kv_source_layers = [0, 0]
    model = transformers.MistralLarge4ForConditionalGeneration(config).eval()
    prompt = TunePrompt(torch.arange(200)[None], ((196, 200),))
    assert Reading.of(model, prompt, positions=50, keep_outputs=True).losses(1).text == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        # Without token types it sees what comes later: dense attention would be that of another model.
        ("paligemma", "PaliGemmaForConditionalGeneration is not causal: its first tokens see"),
        ("zamba", "ZambaForCausalLM does not say in which layer it is, so"),  # its layers share one attention
    ],
)
def test_models_without_layers_to_compare_are_refused(name: str, sentence: str, tmp_path: Path) -> None:
    bench = Bench(small_model(name), Journal.open(tmp_path / "j", {}), Work(lambda *_: None, {}), 60)
    with pytest.raises(TuneError, match=sentence):
        bench.sparse_layers(TunePrompt(torch.arange(200)[None], ((196, 200),)))


@pytest.mark.parametrize("layer", range(tiny.LAYERS))
def test_layers_before_the_sparse_one_need_not_run(model: Any, layer: int) -> None:
    """The same bits as when the whole model runs, and the model is as it was."""
    (prompt,) = tiny.prompts(1, 0)
    reading = Reading.of(model, prompt, positions=50, keep_outputs=True)
    schedule = Schedule(None, layers={layer: tiny.pooled(0.5).pipeline()})
    with attach(model, schedule, min_tokens=1):
        quick, whole = reading.losses(layer), reading.losses(0)
    assert quick == whole
    assert quick.text > 0
    assert reading.losses(0).text == 0  # nothing is attached now


def test_loss_is_the_divergence_of_predictions(model: Any) -> None:
    (prompt,) = tiny.prompts(1, 0)
    reading = Reading.of(model, prompt, positions=1000, keep_outputs=False)
    dense = model(prompt.ids).logits[0].double().log_softmax(-1)
    with attach(model, tiny.pooled(0.5).pipeline(), min_tokens=1):
        loss = reading.losses()
        sparse = model(prompt.ids).logits[0].double().log_softmax(-1)
    each = (dense.exp() * (dense - sparse)).sum(-1)
    answer = tiny.TOKENS - 4
    assert loss.text == pytest.approx(float(each[: answer - 1].mean()), rel=1e-3)
    assert loss.answers == pytest.approx(float(each[answer - 1 : -1].mean()), rel=1e-3)
    right = [int(dense[i - 1].argmax()) == int(prompt.ids[0, i]) for i in range(answer, tiny.TOKENS)]
    assert reading.found == all(right)


def test_the_noise_of_kernels_costs_nothing(tmp_path: Path) -> None:
    """In bf16 a kernel that keeps everything loses something, and a candidate that does so is not blamed."""
    model, (prompt,) = tiny.network().to(torch.bfloat16), tiny.prompts(1, 0)
    whole = Candidate("mean_pooling", {"mass": 1.0, "block": 128})
    bench = Bench(model, Journal.open(tmp_path / "j", {}), Work(lambda *_: None, {"running the model": 9.0}), 60)
    (unit,) = Unit.of_layer(1, tiny.KV_HEADS, 1)
    assert bench.losses(0, prompt, unit, whole) == (0, 0)
    assert bench.journal[f"loss 0 {unit} everything"]["text"] > 0
    assert bench.journal[f"loss 0 {unit} {whole}"]["text"] > 0
    assert bench.losses(0, prompt, unit, tiny.pooled(0.5))[0] > 0


def test_more_work_than_was_thought_is_never_nearly_done() -> None:
    """A search may verify more plans than usual, each after a few more runs of the model."""
    said: list[tuple[float, float | None]] = []
    work = Work(lambda _, share, left: said.append((share, left)), {"running": 4.0, "verifying": 4.0})
    for phase in ("running", "verifying", "running", "verifying"):
        for _ in range(4):
            work.did(phase, 1.0)
    assert all(left for _, left in said[1:7])
    assert said[7:] == [(0.99, None)] * 9
    work.ends()
    assert said[-1] == (1.0, 0.0)


def test_a_plan_that_was_verified_is_no_work_again(model: Any, tmp_path: Path) -> None:
    """Nor is the noise of kernels, which belongs to each of them."""
    work = Work(lambda *_: None, {"verifying": 100.0})
    verifier = Verifier(Bench(model, Journal.open(tmp_path / "j", {}), work, 60), tiny.prompts(2, 1))
    noise = verifier.noise([0, 1])
    assert work.todo == {"verifying": 96.0}
    assert verifier.noise([0, 1]) == noise
    assert work.todo == {"verifying": 96.0}


@pytest.mark.slow
def test_a_plan_keeps_its_budget_and_saves_work(model: Any, tmp_path: Path) -> None:
    shares = []
    plan = tuned(model, tmp_path / "j", report=lambda _, share, left: shares.append((share, left)))
    found = plan.evidence
    assert found.plan.text_kl <= 0.05
    assert found.plan.answer_kl <= 0.1
    assert found.plan.density < 1
    assert found.plan in found.tries
    assert shares[-1] == (1.0, 0.0)
    assert all(0 <= share <= 1 for share, _ in shares)
    assert all(left is None or left >= 0 for _, left in shares)
    assert any(left is not None for _, left in shares[: len(shares) // 2])
    # What the evidence says is what one measures.
    readings = [Reading.of(model, prompt, positions=60, keep_outputs=False) for prompt in tiny.prompts(2, 1)]
    recorder = DensityRecorder()
    with attach(model, plan.schedule(model), min_tokens=1, min_queries=1, recorder=recorder):
        text = [reading.losses().text for reading in readings]
    density = recorder.density().mean(-1).nan_to_num(1.0)  # no sparse call: dense
    density = torch.cat((density, torch.ones(tiny.LAYERS - len(density))))
    assert sum(text) / 2 - found.noise_text_kl == pytest.approx(found.plan.text_kl, rel=1e-3)
    assert float(density.mean()) == pytest.approx(found.plan.density, rel=1e-3)
    looser = tuned(model, tmp_path / "j", budget=Budget(0.5, 1.0, tries=3))
    assert looser.evidence.plan.density <= found.plan.density


def test_prompts_of_about_one_length_belong_together() -> None:
    lengths = (1000, 750, 749, 375, 374, 90)
    some = [TunePrompt(torch.zeros(1, tokens, dtype=torch.int64)) for tokens in lengths]
    assert by_length(some) == {90: [5], 374: [4], 749: [2, 3], 1000: [0, 1]}
    assert by_length(some[3:4]) == {375: [0]}


def test_a_plan_holds_at_every_length_that_it_is_tuned_at(model: Any, tmp_path: Path) -> None:
    """A window that is as good as dense attention in short prompts is not taken for what it loses in long ones."""

    def both(seed: int) -> list[TunePrompt]:
        return [
            *tiny.prompts(1, seed),
            *(TunePrompt(p.ids[:, : tiny.TOKENS // 2]) for p in tiny.prompts(1, seed + 9)),
        ]

    window = Candidate("a_shape", {"sink": 16, "local": tiny.TOKENS // 2 - 16, "block": 16})
    short = tuned(model, tmp_path / "short", prompts=both(0)[1:], held=both(1)[1:], candidates=[window])
    assert [part.attention for part in short.layers] == [
        None
    ] * tiny.LAYERS  # it keeps everything, as dense attention
    tight = Budget(1e-3, 1e-3, tries=3)
    for budget in (tight, Budget(0.05, 0.1, tries=3)):
        plan = tuned(model, tmp_path / "both", prompts=both(0), held=both(1), budget=budget)
        assert [each.tokens for each in plan.evidence.plan.lengths] == [tiny.TOKENS // 2, tiny.TOKENS]
        assert plan.longest == tiny.TOKENS
        for each in plan.evidence.plan.lengths:
            assert each.text_kl <= budget.text_kl
            assert each.answer_kl <= budget.answer_kl
        assert plan.evidence.plan.text_kl == max(each.text_kl for each in plan.evidence.plan.lengths)
    # A layer loses what it loses at the length where that is most.
    lines = map(json.loads, (tmp_path / "both").read_text().splitlines()[1:])
    noted = {line["what"]: line["value"] for line in lines}
    sparse = [part for part in plan.layers if part.attention]
    assert sparse
    for part in sparse:
        each_length = [
            noted[f"loss {i} {part.layer} {part.attention}"]["text"]
            - noted[f"loss {i} {part.layer} everything"]["text"]
            for i in range(2)
        ]
        assert part.text_kl == pytest.approx(max(each_length), rel=1e-3)
    readings = [Reading.of(model, prompt, positions=60, keep_outputs=False) for prompt in both(1)]
    with attach(model, plan.schedule(model), min_tokens=1, min_queries=1):
        long, short_one = (reading.losses().text for reading in readings)
    noise = plan.evidence.noise_text_kl
    assert plan.evidence.plan.lengths[1].text_kl == pytest.approx(long, abs=noise + 1e-5, rel=1e-3)
    assert plan.evidence.plan.lengths[0].text_kl == pytest.approx(short_one, abs=noise + 1e-5, rel=1e-3)


def test_held_prompts_must_show_what_a_window_drops(model: Any, tmp_path: Path) -> None:
    ids = tiny.prompts(2, 1)[0].ids[:, : tiny.TOKENS // 2]
    with pytest.raises(TuneError, match="the longest of 'held' must have 75% of the tokens of the longest"):
        tune(model, tiny.prompts(2, 0), [TunePrompt(ids)], journal=tmp_path / "j")


def test_what_keeps_nearly_everything_is_never_taken_for_less_time(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window as wide as the prompts here, or nearly, would leave keys out in longer ones, unseen."""
    monkeypatch.setattr(Costs, "ms", lambda _, unit, name: 2.0 if name == DENSE else 1.0)
    windows = [
        Candidate("a_shape", {"sink": 16, "local": local, "block": 16})
        for local in (int(0.8 * tiny.TOKENS), 2 * tiny.TOKENS)
    ]
    plan = tuned(model, tmp_path / "j", candidates=windows, minimise="time")
    assert [part.attention for part in plan.layers] == [None] * tiny.LAYERS


@pytest.mark.slow
def test_groups_of_heads_get_choices_of_their_own(model: Any, tmp_path: Path) -> None:
    plan = tuned(model, tmp_path / "j", head_groups=2, candidates=[tiny.pooled(0.5), tiny.pooled(0.9)])
    assert [(part.layer, part.heads) for part in plan.layers] == [(i, (h,)) for i in range(3) for h in range(2)]
    plan.save(tmp_path / "plan.json")
    with attach(model, Plan.load(tmp_path / "plan.json").schedule(model), min_tokens=1):
        model(tiny.prompts(1, 1)[0].ids)


def test_layers_may_have_heads_of_their_own(tmp_path: Path) -> None:
    """As in Gemma 4, where those of layers without a window are fewer and are not split, whatever is asked for."""
    heads = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16}
    config = transformers.Gemma4TextConfig(
        **heads, num_attention_heads=4, attention_k_eq_v=True, vocab_size=260, vocab_size_per_layer_input=260,
        hidden_size=64, intermediate_size=64, hidden_size_per_layer_input=8, num_hidden_layers=2,
        sliding_window=48, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model, limits = transformers.Gemma4ForCausalLM(config).eval(), Budget(9.0, 9.0)
    plan = tuned(model, tmp_path / "j", candidates=[tiny.pooled(0.5)], budget=limits, head_groups=2)
    parts = [(part.layer, part.heads, part.attention) for part in plan.layers]
    assert parts == [(0, None, None), (1, None, tiny.pooled(0.5))]
    recorder = DensityRecorder()
    with attach(model, plan.schedule(model), min_tokens=1, recorder=recorder):
        model(tiny.prompts(1, 1)[0].ids)
    assert recorder.sparse_calls() == {1: 1}


def test_layers_with_a_softcap_stay_dense(tmp_path: Path) -> None:
    """They can be sparse, but what is compared knows none."""
    said = r"no layer of the model can be sparse\. Its attention is dense: softcap or attention sinks, which tune"
    model, (prompt,) = tiny_gemma2(sliding_window=4096, attn_implementation="eager"), tiny.prompts(1, 0)
    with pytest.raises(TuneError, match=said):
        tuned(model, tmp_path / "all")
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    bench = Bench(model, Journal.open(tmp_path / "one", {}), Work(lambda *_: None, {}), 60)
    assert bench.sparse_layers(prompt) == {1: 2}


def test_a_layer_that_gives_nothing_but_zeros_stays_dense(tmp_path: Path) -> None:
    """Its relative error is 0 over 0."""
    pruned = tiny.network()
    with torch.no_grad():
        pruned.model.layers[1].self_attn.v_proj.weight.zero_()
    plan = tuned(pruned, tmp_path / "j", candidates=tiny.CANDIDATES[:2])
    assert plan.layers[1].attention is None


def test_what_cannot_be_tuned_on_is_named(model: Any, tmp_path: Path) -> None:
    some, ids = tiny.prompts(2, 0), torch.arange(20)[None]
    for prompts, held, sentence in (
        ([], some, "'prompts' must have at least one prompt"),
        (some, [], "'held' must have at least one prompt"),
        (some, some[1:], "'held' must have other prompts than 'prompts'"),
    ):
        with pytest.raises(TuneError, match=sentence):
            tune(model, prompts, held, journal=tmp_path / "j")
    with pytest.raises(TuneError, match="must not be in training"):
        tune(tiny.network().train(), some[:1], some[1:], journal=tmp_path / "j")
    for wrong in (ids[0], ids.int(), ids[:, :1]):
        with pytest.raises(TuneError, match=r"'ids' must be \[1, N\] int64 with at least 2 tokens: "):
            TunePrompt(wrong)
    for answer in ((0, 4), (1, 3), (5, 5), (18, 21)):
        with pytest.raises(TuneError, match="an answer must lie between token 2 and the end of its prompt, 20: "):
            TunePrompt(ids, (answer,))
    assert not (tmp_path / "j").exists()


# ---- after a kill


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_plan(model: Any, tmp_path: Path) -> None:
    """All that a killed run leaves is a part of its journal, maybe with half a line at the end."""
    some = {"candidates": tiny.CANDIDATES[1:7:2], "budget": Budget(0.05, 0.1, tries=2)}
    whole = tuned(model, tmp_path / "whole", **some)
    written = (tmp_path / "whole").read_bytes()
    header = written.index(b"\n")
    for cut in (header // 2, len(written) // 3, 2 * len(written) // 3 + 7, len(written) - 1):
        journal = tmp_path / f"{cut}"
        journal.write_bytes(written[:cut])
        again = tuned(model, journal, **some)
        # Times are measured anew where they were lost, and nothing here rests on them.
        assert [part.attention for part in again.layers] == [part.attention for part in whole.layers], cut
        assert again.evidence.plan.density == whole.evidence.plan.density
        assert again.evidence.plan.text_kl == whole.evidence.plan.text_kl
        names = [json.loads(line).get("what") for line in journal.read_bytes().splitlines()]
        assert sorted(map(str, names)) == sorted(
            str(json.loads(line).get("what")) for line in written.splitlines()
        )


def test_a_finished_run_measures_nothing_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some: dict[str, Any] = {"candidates": tiny.CANDIDATES[1:7:2], "minimise": "time"}
    first = tuned(model, tmp_path / "j", **some)
    monkeypatch.setattr(Reading, "of", None)
    assert tuned(model, tmp_path / "j", **some) == first


def test_times_are_those_of_as_many_prompts_as_a_call_will_have(model: Any, tmp_path: Path) -> None:
    some: dict[str, Any] = {"candidates": tiny.CANDIDATES[:2], "minimise": "time"}
    alone = tuned(model, tmp_path / "j", **some)
    together = tuned(model, tmp_path / "j", **some, batch=16)
    assert (alone.evidence.batch, together.evidence.batch) == (1, 16)
    assert together.evidence.dense_ms > 2 * alone.evidence.dense_ms


def test_journals_of_other_runs_and_other_files(model: Any, tmp_path: Path) -> None:
    tuned(model, tmp_path / "j", candidates=[tiny.pooled(0.5)], budget=Budget(0.05, 0.1, tries=1))
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(TuneError, match=r"was begun with other settings \(positions changed\)"):
        tuned(model, tmp_path / "j", positions=61)
    with pytest.raises(TuneError, match=r"was begun with other settings \(model changed\)"):
        tuned(tiny.network(seed=1), tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == before
    for content in ("my notes\n", "my notes", '{"a": 1}\n', "[]\n"):
        (tmp_path / "notes").write_text(content)
        with pytest.raises(TuneError, match="notes is not a journal of tuning"):
            tuned(model, tmp_path / "notes")
        assert (tmp_path / "notes").read_text() == content


# ---- SpargeAttn's search


def test_sparge_takes_the_fewest_blocks_under_its_bounds(model: Any, tmp_path: Path) -> None:
    plan = sparge_search(
        model, tiny.prompts(2, 0), tiny.prompts(1, 1), journal=tmp_path / "j", bounds=ErrorBounds(0.3, 0.4)
    )
    known = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()[1:]]
    evaluations = {line["what"]: line["value"] for line in known if line["what"].startswith("evaluation")}
    for part in plan.layers:
        means = {}
        for what in evaluations:
            _, number, layer, name = what.split(" ", 3)
            if number == "0" and int(layer) == part.layer:
                both = [evaluations[f"evaluation {i} {layer} {name}"] for i in range(2)]
                means[name] = tuple(sum(x[figure] for x in both) / 2 for figure in ("error", "density"))
        fits = [density for error, density in means.values() if error < 0.3]
        assert (part.attention is None) == (not fits)
        if fits:
            assert part.density == pytest.approx(min(fits), rel=1e-4)
            assert part.attention is not None
            assert part.attention.preset == "sparge"
        # This search does not run the model with one layer sparse, and dense attention loses nothing.
        assert part.text_kl == part.answer_kl == (None if fits else 0.0)
    assert "-         -  sparge(" in summary(plan)
    assert plan.evidence.text_kl_budget is None


@pytest.mark.parametrize("l2", [1e-9, 5.0])
def test_sparge_then_takes_the_boldest_lambda_under_its_bound(tmp_path: Path, l2: float) -> None:
    """Where there is no GPU, Triton's interpreter runs the kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny.network(num_hidden_layers=1).to(device)
    prompt, held = (TunePrompt(torch.arange(64)[None] % size) for size in (60, 50))
    plan = sparge_search(
        model, [prompt], [held], journal=tmp_path / "j", bounds=ErrorBounds(5.0, l2), lambdas=(-9.0, -4.0)
    )
    attention = plan.layers[0].attention
    assert attention is not None
    assert attention.pv_skip == (-4.0 if l2 > 1 else None)


# ---- prompts


TEXT = "".join(f"This is sentence {i} of a text that says little.\n\n" for i in range(200))


def test_prompts_ask_at_the_end_for_what_they_planted(tokenizer: Any) -> None:
    some = prompts_from_text(tokenizer, TEXT, tokens=1500, count=3, seed=4)
    assert [prompt.ids.shape for prompt in some] == [(1, 1500)] * 3
    read = [tokenizer.decode(prompt.ids[0]) for prompt in some]
    assert len(set(read)) == 3
    for prompt, text in zip(some, read, strict=True):
        for start, stop in prompt.answers:
            answer = tokenizer.decode(prompt.ids[0, start:stop])
            city = tokenizer.decode(prompt.ids[0, :start]).split()[-2]
            assert text.count(f"The magic number for {city} is{answer}.") == 1
        assert len(prompt.answers) == 1500 // 256
        assert (
            int(prompt.text_at(10_000).max()) == prompt.answers[0][0] - 2
        )  # it predicts what precedes the answer
    again = prompts_from_text(tokenizer, TEXT, tokens=1500, count=3, seed=4)
    assert [prompt.ids.tolist() for prompt in again] == [prompt.ids.tolist() for prompt in some]
    with pytest.raises(TuneError, match="the text has 2472 tokens for each prompt, and "):
        prompts_from_text(tokenizer, TEXT, tokens=4500, count=4)
    with pytest.raises(TuneError, match="'tokens' must be at least "):
        prompts_from_text(tokenizer, TEXT, tokens=100, count=1)


def test_prompts_of_ones_own(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "2 + 2 =", "answer": " 4"}\n\n{"prompt": "Once upon"}\n')
    first, second = prompts_from_file(tokenizer, path)
    assert tokenizer.decode(first.ids[0]) == "2 + 2 = 4"
    assert first.answers == ((7, 9),)
    assert second.answers == ()
    for line in ("{", "[]", '{"answer": "x"}', '{"prompt": 3}', '{"prompt": "a", "answers": 1}', '{"prompt": ""}'):
        path.write_text(line)
        with pytest.raises(TuneError, match="line 1, must "):
            prompts_from_file(tokenizer, path)
    with pytest.raises(TuneError, match="must be a readable UTF-8 file"):
        prompts_from_file(tokenizer, tmp_path / "none")
    strips = copy.deepcopy(tokenizer)
    strips.backend_tokenizer.normalizer = normalizers.Strip()
    path.write_text('{"prompt": "a b", "answer": " "}')
    with pytest.raises(TuneError, match="line 1, must have an answer of at least 1 token"):
        prompts_from_file(strips, path)


# ---- the command


@pytest.fixture(scope="module")
def folder(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, tokenizer, model)
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("two_candidates")
def test_the_command_writes_a_plan_and_says_what_it_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "plan.json", tmp_path / "text.txt"
    text.write_text(TEXT)
    options = [str(folder), "--out", str(out), "--text", str(text), "--tokens", "900", "800", "--count", "1"]
    assert main(["tune", *options, "--minimise", "density"]) == 0
    printed, progress = capsys.readouterr()
    plan = Plan.load(out)
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == ["0", "1", "2"]
    assert f"density {plan.evidence.plan.density:.3f}" in printed
    assert f"answers found: {plan.evidence.plan.found} of 8" in printed
    assert "comparing attention: " in progress
    first = out.read_bytes()
    assert main(["tune", *options, "--minimise", "density"]) == 0
    assert out.read_bytes() == first


@pytest.mark.parametrize(("count", "held"), [(1, 1), (2, 2), (1, 3), (3, 1), (2, 5)])
def test_as_many_prompts_compare_and_verify_as_were_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, held: int
) -> None:
    seen: list[list[TunePrompt]] = []

    def see(_: Any, *prompts: list[TunePrompt], **__: Any) -> Plan:
        seen.extend(prompts)
        raise TuneError("seen")

    monkeypatch.setattr(command, "tune", see)
    text = tmp_path / "text.txt"
    text.write_text(2 * TEXT)
    options = f"--text {text} --tokens 900 800 --count {count} --held {held}"
    assert main(["tune", str(folder), *options.split()]) != 0
    compared, verified = seen
    assert [len(prompt.ids[0]) for prompt in compared] == [900] * count + [800] * count
    assert [len(prompt.ids[0]) for prompt in verified] == [900] * held + [800] * held
    assert len({tuple(prompt.ids[0].tolist()) for prompt in (*compared, *verified)}) == 2 * (count + held)


def test_of_one_length_prompts_half_as_long_are_made_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[int] = []

    def make(*_: Any, tokens: int, **__: Any) -> list[TunePrompt]:
        made.append(tokens)
        return [TunePrompt(torch.full((1, tokens), i)) for i in range(2)]

    monkeypatch.setattr(command, "prompts_from_text", make)
    for given, expected in ((["900"], [450, 900]), (["300", "600", "900"], [300, 600, 900]), (["9", "9"], [9])):
        made.clear()
        options = ["--tokens", *given, "--count", "1", "--out", str(tmp_path / "none" / "plan.json")]
        assert main(["tune", str(folder), *options]) == 1
        assert made == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["no-such-model"], "the model must be a folder that a transformers model was saved in"),
        (["MODEL", "--device", "none"], "'--device' cannot be used: none: "),
        (["MODEL", "--device", "meta"], "'--device' cannot be used: meta: "),
        (
            ["MODEL", "--out", "none/plan.json", "--tokens", "900", "800"],
            "the journal cannot be written: none/plan.json",
        ),
        (["MODEL", "--count", "0"], "'--count' must be at least 1: 0"),
        (["MODEL", "--held", "0"], "'--held' must be at least 1: 0"),
        (["MODEL", "--prompts", "none.jsonl", "--held", "3"], "of which every second one verifies: 3. Leave"),
        (["MODEL", "--prompts", "none.jsonl", "--tokens", "8", "9"], "'--tokens' does not apply to '--prompts', "),
        (["MODEL", "--prompts", "none.jsonl", "--count", "3"], "'--count' does not apply to '--prompts', of"),
        (["MODEL", "--prompts", "none.jsonl", "--seed", "3"], "'--seed' does not apply to '--prompts', of"),
        (["MODEL", "--prompts", "p.jsonl", "--text", "none.txt"], "'--text' does not apply to '--prompts', of"),
        (["MODEL", "--tokens", "5000", "900"], "tokens for each prompt"),
        (
            ["MODEL", "--tokens", "560"],
            "'--tokens 560' alone also makes prompts of half of it, 280 tokens: ",
        ),
        (["MODEL", "--tokens", "280", "560"], "tune: 'tokens' must be at least "),
        (["MODEL", "--tokens", "1025", "900", "--count", "1"], "prompts must be of at most 1024 tokens"),
        (["MODEL", "--text", "none.txt"], "'--text' must be a readable UTF-8 text: none.txt"),
        (["MODEL", "--prompts", "none.jsonl"], "must be a readable UTF-8 file: none.jsonl"),
        (["MODEL", "--text-kl", "-1", "--tokens", "900", "800"], "'text_kl' must be a finite number above 0: -1"),
        (
            ["MODEL", "--positions", "0", "--tokens", "900", "800"],
            "'positions' must be a whole number, at least 1: 0",
        ),
        (
            ["MODEL", "--head-groups", "3", "--tokens", "900", "800"],
            "'head_groups' must be at most 2, the model's KV heads: 3",
        ),
        (["MODEL", "--strategy", "sparge", "--batch", "2"], "'--batch' does not apply to '--strategy sparge': "),
        (
            ["MODEL", "--strategy", "sparge", "--text-kl", "1"],
            "'--text-kl' does not apply to '--strategy sparge': ",
        ),
        (["MODEL", "--l1", "0.08"], "'--l1' does not apply to '--strategy kl': 0.08. Leave one of the two out."),
        (
            ["MODEL", "--strategy", "sparge", "--minimise", "time"],
            "'--minimise' does not apply to '--strategy spa",
        ),
        (
            ["MODEL", "--strategy", "sparge", "--positions", "0", "--tokens", "900", "800"],
            "'positions' must be a whole number, at least 1: 0",
        ),
        (["MODEL", "--out", "."], "'--out' must be a file, the plan: . is a folder"),
        (["MODEL", "--prompts", __file__, "--out", __file__], "'--out' must be another file than what is read: "),
    ],
)
def test_the_command_refuses_in_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = [str(folder) if word == "MODEL" else word for word in options]
    given = [] if {"--text", "--prompts"} & {*words} else ["--text", str(text)]
    out = [] if "--out" in words else ["--out", str(tmp_path / "plan.json")]
    assert main(["tune", *words, *given, *out]) == 1
    printed, said = capsys.readouterr()
    assert printed == ""
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.usefixtures("two_candidates")
def test_the_command_says_that_calls_are_too_large(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = (
        f"--text {tmp_path}/text.txt --tokens 900 800 --count 1 --batch 1000000000 --out {tmp_path}/plan.json"
    )
    assert main(["tune", str(folder), *options.split()]) == 1
    said = capsys.readouterr().err
    assert "the device has too little memory for calls of 1000000000 prompts. Take shorter prompts or " in said
