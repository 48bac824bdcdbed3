"""The demo: its prompt, table, picture and errors; and the whole of it, on a tiny model and on the real one."""

from __future__ import annotations

import json
import logging
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from rich.console import Console

import blocksparse as bs
from blocksparse.check.validators import UserError
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.presets.named import Candidate, written
from blocksparse.testing import every_preset
from blocksparse.tools.cli.main import main
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.measure import MethodResult, Prompt, build, measure, perplexity
from blocksparse.tools.demo.model import Model, dtype_for
from blocksparse.tools.demo.picture import Panel, draw, pooled_attention
from blocksparse.tools.demo.run import DemoSettings, _picture, legend, table
from blocksparse.tools.demo.watch import watch
from tests.hosts.small_models import small_model
from tests.real_model import NAME, converted, needs_real_model
from tests.tiny_model import save_tiny, tiny_gemma2, tiny_llama


@pytest.fixture(scope="module")
def tiny(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, tokenizer)
    return folder


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("tokens", [400, 1000])
def test_prompt_has_the_fact_once_at_its_depth(tokenizer: Any, tokens: int, depth: float) -> None:
    text = "A paragraph of some forty letters or so.\n\n" * 40
    prompt = build(tokenizer, text, tokens=tokens, depth=depth, seed=3)
    whole = tokenizer.decode(prompt.ids[0])
    assert prompt.ids.shape == (1, tokens)
    assert prompt.is_text.shape == (tokens,)
    assert whole.count(prompt.needle) == 1
    assert whole.endswith(prompt.question)
    assert prompt.answer in prompt.needle
    assert prompt.answer not in prompt.question
    assert whole[prompt.needle_at :].startswith(prompt.needle)
    room = int(prompt.is_text.sum())
    assert depth * room - 50 < prompt.needle_at <= depth * room + 1
    assert prompt.needle_at in (0, room) or whole[prompt.needle_at - 1] == "\n"
    assert tokenizer.decode(prompt.ids[0][prompt.is_text]) == text[:room]


def test_prompt_of_a_seed_is_always_the_same(tokenizer: Any) -> None:
    first, second, other = (build(tokenizer, "x" * 999, tokens=500, depth=0.5, seed=s).needle for s in (1, 1, 2))
    assert first == second != other


def test_prompt_refuses_what_does_not_fit(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="'--tokens' must be over"):
        build(tokenizer, "x" * 999, tokens=100, depth=0.5)
    with pytest.raises(UserError, match="the text has 99 tokens"):
        build(tokenizer, "x" * 99, tokens=500, depth=0.5)


def test_answer_is_right_only_when_it_comes_first(tokenizer: Any) -> None:
    prompt = build(tokenizer, "x" * 999, tokens=500, depth=0.5)
    assert prompt.is_answered_by(prompt.answer + ", I think")
    assert not prompt.is_answered_by("not " + prompt.answer)
    assert not prompt.is_answered_by(prompt.answer[:-1])


def test_perplexity_counts_the_text_only_and_has_the_cap_of_the_model() -> None:
    network = tiny_gemma2(initializer_range=0.3, final_logit_softcapping=0.5)
    ids = torch.randint(256, (1, 700), generator=torch.Generator().manual_seed(0))
    counted = torch.arange(700) % 3 > 0
    logits = network(ids).logits[0, :-1].double().log_softmax(-1)
    loss = -logits.gather(-1, ids[0, 1:, None])[counted[1:]].mean()
    found = perplexity(network, network.model(ids).last_hidden_state, ids, counted)
    assert found == pytest.approx(float(loss.exp()), rel=1e-5)


def test_the_executor_is_none_where_layers_stayed_dense(tokenizer: Any) -> None:
    """Gemma 2 has a softcap in all layers, and a window of 48 tokens in the first. A prompt may be short."""
    ids = torch.randint(256, (1, 50), generator=torch.Generator().manual_seed(0))
    model = Model(small_model("gemma2"), tokenizer, "gemma2", ids.device)
    prompt = Prompt(ids, torch.ones(50).bool(), "", "", "1", 0)
    dense = measure(model, prompt, "dense", None, keep_layer=1)
    window = "a sliding window of fewer than min_window"
    some = measure(model, prompt, "a", bs.mean_pooling(0.1, block=16), warm_up=dense.qkv)
    assert some.density < 1
    assert some.executor.endswith(f"; dense in layers 0 ({window})")
    none = measure(model, prompt, "b", bs.s2o(), warm_up=dense.qkv)
    assert none.density == 1
    why = "GatherExecutor: it knows no softcap and no attention sinks"
    assert none.executor == f"dense in all layers ({why}, {window})"
    assert dense.executor == "sdpa"


def rows() -> list[MethodResult]:
    return [
        MethodResult("dense", 2.0, 1.0, 1.0, 40.0, "12345", True, "sdpa", 0.0, "None"),
        MethodResult("pbs_attn", 1.5, 0.5, 0.55, 41.0, "[b]1", False, "FlexExecutor runs", 3.0, "Pipeline(...)"),
    ]


def test_table_compares_with_dense_and_fits_in_80_columns() -> None:
    console = Console(width=80, record=True)
    console.print(table(rows(), title="a title"))
    console.print(legend(rows()))
    lines = console.export_text().splitlines()
    dense = next(line for line in lines if line.startswith("dense"))
    sparse = next(line for line in lines if line.startswith("pbs_attn"))
    assert " ".join(dense.split()) == "dense 2.00 s 1.00 s 1.00x 100.0% 40.00 right 12345"
    assert " ".join(sparse.split()) == "pbs_attn 1.50 s 500 ms 2.00x 55.0% 41.00 (+2.5%) wrong [b]1"
    assert "FlexExecutor runs" in "".join(lines)
    assert "compiles: 3 s in all" in " ".join(lines)


def test_table_fits_in_80_columns_whatever_the_methods_are_called() -> None:
    written = "pbs_attn(0.95, block=64, S=128)"
    long = evolve(rows()[1], method=written, reply="Piccadilly.", perplexity=1041.0, first_token_s=123.4)
    console = Console(width=80, record=True)
    console.print(table([*rows(), long], title="a title"))
    printed = console.export_text()
    names = "".join(line[:19].replace(" ", "") for line in printed.splitlines())
    assert written.replace(" ", "") in names  # folded, not cut
    assert all(f" {cell}" in printed for cell in ("123.40 s", "1041.00 (+2502.5%)", "wrong Piccadill…"))


def test_legend_says_which_executor_ran_what() -> None:
    first = rows()[1]
    assert "sparse attention: FlexExecutor runs" in legend([*rows(), evolve(first, method="b")])
    other = evolve(first, method="b", executor="ReferenceExecutor")
    lines = legend([*rows(), other, evolve(first, method="c")]).splitlines()
    assert lines[-2:] == ["pbs_attn, c: FlexExecutor runs", "b: ReferenceExecutor"]


def always_sparse(pipeline: object) -> str:
    """How a demo's row writes it: it selects at any length, also on a GPU."""
    return repr(pipeline).replace("dense_below=None", "dense_below=0")


def own(selector: bs.Selector[bs.BlockMass, bs.BlockMask]) -> AnyPipeline:
    """What `mine` of the module below gives, with another selector."""
    return bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(64), selector, bs.AutoExecutor())


IN_A_PLAN = Candidate("sparge", {"share": 0.1}, band=128, last=64)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pbs_attn", bs.pbs_attn()),
        ("pbs_attn()", bs.pbs_attn()),
        (" pbs_attn( 0.95 , block = 64 ) ", bs.pbs_attn(0.95, block=64)),
        ("pbs_attn([0.5, 0.9], as_released=True)", bs.pbs_attn([0.5, 0.9], as_released=True)),
        ("mean_pooling(0.97) | Band(128) | Sink", bs.mean_pooling(0.97) | (bs.Band(128) | bs.Sink())),
        (str(IN_A_PLAN), IN_A_PLAN.pipeline()),
        *((name, preset()) for name, preset in every_preset.items()),
        ("own_stages:mine", own(bs.TopK(32))),
        (" own_stages:mine( k = 64 ) ", own(bs.TopK(64))),
        ("own_stages:mine(3) | Band(128)", own(bs.TopK(3) | bs.Band(128))),
    ],
)
@pytest.mark.usefixtures("own_stages")
def test_methods_are_written_as_in_python(text: str, expected: object) -> None:
    assert repr(written(text)) == always_sparse(expected)


@pytest.fixture
def own_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has a module, and is not in Python's path, as for a command that is installed."""
    (tmp_path / "own_stages.py").write_text(
        "import blocksparse as bs\n\n\ndef mine(k=32):\n"
        "    return bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(64), bs.TopK(k), bs.AutoExecutor())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.delitem(sys.modules, "own_stages", raising=False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nonsense", "'--preset' must be one of auto, pbs_attn, pbs_attn_plus"),
        (
            "pbs_attn(0.95",
            "or a function of yours: pbs_attn(0.95. Write it as in 'my_stages:mine', 'pbs_attn(0.95)' or",
        ),
        ("no_such:f", "'--preset': there is no preset 'no_such:f': No module named 'no_such'. Add the folder of"),
        ("json:f", "there is no preset 'json:f'. Define a function 'f' in the module 'json'"),
        (".x:f", "there is no preset '.x:f'. A function is named as in 'my_stages:mine'"),
        ("math:pi", "'math:pi' must be a function that returns a Pipeline: 3.14"),
        (
            "builtins:list | Band(128)",
            "'--preset' builtins:list | Band(128): 'builtins:list' must return a Pipeline: []",
        ),
        ("own_stages:mine(x)", "must be one of"),
        ("own_stages:mine(n=3)", "'--preset' own_stages:mine(n=3): mine() got an unexpected keyword argument 'n'"),
        ("own_stages.mine(3)", "must be one of"),
        ("pbs_attn | 3", "must be one of"),
        ("pbs_attn | Band(0.5)", "'--preset' pbs_attn | Band(0.5): 'tokens' must be"),
        ("pbs_attn(x)", "must be one of"),
        ("__import__('os').getcwd()", "must be one of"),
        ("pbs_attn(2)", "'--preset' pbs_attn(2): 'mass' must be"),
        ("auto(quality='fast', quality='careful')", "'--preset' must give each argument once: auto("),
        ("pbs_attn({[]: 0.9})", "must be one of"),
        pytest.param(f"pbs_attn({'-' * 10**5}1)", "must be one of", id="deep"),
        ("pbs_attn(blocks=64)", "'--preset' pbs_attn(blocks=64): pbs_attn() got an unexpected keyword argument"),
    ],
)
@pytest.mark.usefixtures("own_stages")
def test_methods_that_are_not_there_are_named(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        written(text)
    assert sentence in str(raised.value)


@pytest.mark.slow
def test_picture_shows_the_true_attention(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 600, 16, generator=generator), torch.randn(1, 2, 600, 16, generator=generator)
    panels = [
        Panel.of(str(p.permuter), p, q, k, k, head=3) for p in (bs.mean_pooling(block=64), bs.pbs_attn(block=64))
    ]
    for panel in panels:
        assert 0 < panel.covered_mass <= 1 + 1e-6
        assert panel.keep.shape == (10, 10)
        assert panel.attention.shape == (300, 300)  # two tokens a pixel
        # A row of pixels holds the whole attention of its queries, wherever their keys went.
        torch.testing.assert_close(panel.attention.sum(-1) * 2, torch.ones(300))
    logits = (q[0, 3] @ k[0, 1].T / 4).masked_fill(torch.ones(600, 600).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(
        pooled_attention(bs.mean_pooling().trace(q, k, k), 3, pixels=600), logits.softmax(-1), rtol=1e-4, atol=1e-6
    )
    draw(panels, tmp_path / "map.png", title="random")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--depth", "1.5"], "'--depth' must be in [0, 1]: 1.5"),
        (["--preset", "pbs_attn", "--preset", "nonsense"], "'--preset' must be one of auto, pbs_attn"),
        (["--preset", "pbs_attn(0)"], "'--preset' pbs_attn(0): 'mass' must be"),
        (["--model", "/nowhere"], "the model must be a folder that a transformers model was saved in: /nowhere"),
        (["--out", str(TEXT)], f"'--out' must be a folder, which may be made: {TEXT}: "),
        (["--text", "/nowhere"], "'--text' must be a readable UTF-8 text: /nowhere"),
        (["--model", "TINY", "--tokens", "2000"], "'--tokens' must be at most 1024"),
        (["--model", "TINY", "--tokens", "50"], "'--tokens' must be over"),
        (["--model", "TINY", "--tokens", "500", "--layer", "2"], "'--layer' must be from 0 to 1: 2"),
        (["--model", "TINY", "--tokens", "500", "--head", "4"], "'--head' must be from 0 to 3: 4"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_cli_says_in_one_sentence_what_is_wrong(
    options: list[str], sentence: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(tiny) if option == "TINY" else option for option in options]
    assert main(["demo", "--text", str(TEXT), "--out", str(tmp_path), *options]) == 1
    printed, progress = capsys.readouterr()
    *before, error = progress.splitlines()
    assert error.startswith("blocksparse demo: ")
    assert sentence in error
    assert before in ([], ["getting the model ready"])
    assert logging.getLogger("blocksparse").level == logging.NOTSET  # as it was
    assert not printed


def test_every_file_of_the_package_is_in_its_wheel() -> None:
    """Also those that are no Python, such as the text that the demo reads."""
    root = Path(__file__).parents[1]
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = root / "src" / "blocksparse"
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == {
        path for pattern in setuptools["package-data"]["blocksparse"] for path in package.glob(pattern)
    }
    assert TEXT in files


@pytest.mark.slow
def test_whole_demo_on_a_tiny_model(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["mean_pooling", "pbs_attn(0.5)", "pbs_attn(1)"]
    chosen = [word for name in methods for word in ("--preset", name)]
    assert main(["demo", "--model", str(tiny), "--tokens", "700", "--out", str(tmp_path), *chosen]) == 0
    printed, progress = capsys.readouterr()
    assert printed.lstrip().startswith(f"{tiny.name} reads 700 tokens of persuasion.txt")
    assert progress.splitlines() == [
        "getting the model ready",
        "reading with dense attention",
        *(f"reading with {name} ({i} of 3)" for i, name in enumerate(methods, 1)),
        "drawing the attention map",
    ]
    written = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["method"] for row in written] == ["dense", *methods]
    for row in written:
        assert row["method"] in printed
        assert row["first_token_s"] > row["attention_s"] > 0
        assert row["perplexity"] == pytest.approx(257, rel=0.5)  # it knows nothing
    assert written[1]["pipeline"] == always_sparse(bs.mean_pooling())
    some, everything = (row["density"] for row in written[2:])
    assert some < everything
    assert (tmp_path / "attention-map.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_what_the_layer_asks_for(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own scale, window and softcap, as in Gemma 2, against the weights of the model's eager attention."""
    more = {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0, "initializer_range": 0.5}
    network, ids = tiny_gemma2(**more, attn_implementation="eager"), torch.randint(3, 250, (1, 200))
    layer, head = 0, 3  # with a window
    panels: list[Panel] = []
    monkeypatch.setattr("blocksparse.tools.demo.run.draw", lambda these, *_, **__: panels.extend(these))
    with watch(network, keep_layer=layer) as sight:
        network(ids)
    row = MethodResult("dense", 1, 1, 1, 1, "", True, "", 1, "", sight.kept, sight.asked)
    _picture(row, DemoSettings(tmp_path, TEXT, None, 200, 0.5, 0, {}, layer, head), layer, head)
    weights = network(ids, output_attentions=True).attentions[layer][0, head]
    torch.testing.assert_close(panels[0].attention, weights, rtol=1e-3, atol=1e-5)
    assert not weights[100, :36].any()


@pytest.mark.parametrize("text", ["eager", "sdpa"])
def test_a_watched_model_keeps_the_attention_of_each_part(text: str) -> None:
    """Of the text and of pictures, and every layer is seen, whichever the names are."""
    network, ids = small_model("gemma3"), torch.randint(3, 250, (1, 60))
    wish = {"": "sdpa", "text_config": text, "vision_config": "eager"}
    network.set_attn_implementation(wish)
    own, seen = network(ids).logits, set[int]()
    with watch(network, on_qkv=lambda layer, *_: seen.add(layer)):
        torch.testing.assert_close(network(ids).logits, own)
    assert seen == {0, 1}
    config = network.config
    parts = {"": config, "text_config": config.text_config, "vision_config": config.vision_config}
    assert {name: part._attn_implementation for name, part in parts.items()} == wish


def test_two_models_are_watched_at_once() -> None:
    one, other, ids = tiny_llama(0), tiny_llama(1), torch.ones(1, 8, dtype=torch.int64)
    seen: list[int] = []
    with watch(one, on_call=lambda: seen.append(0)), watch(other, on_call=lambda: seen.append(1)):
        one(ids)
        other(ids)
    assert seen == sorted(seen)
    assert set(seen) == {0, 1}


@pytest.mark.slow
def test_models_without_sdpa_attend_by_their_own_function(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 2 has a softcap, which sdpa does not know, in a layer with a window and in one without."""
    save_tiny(tmp_path / "gemma", tokenizer, tiny_gemma2())
    options = ["--model", str(tmp_path / "gemma"), "--tokens", "700", "--out", str(tmp_path)]
    assert main(["demo", *options, "--preset", "pbs_attn(1)"]) == 0
    dense, row = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["density"] > 0.9
    assert row["perplexity"] == pytest.approx(dense["perplexity"], rel=0.02)
    for command, tokens in (("inspect", ["700"]), ("tune", ["700", "800"])):
        assert main([command, str(tmp_path / "gemma"), "--tokens", *tokens, "--out", str(tmp_path / "x")]) == 1
    said = capsys.readouterr().err
    assert "no layer of gemma can be inspected: it has a sliding window of 64 tokens" in said
    assert "no layer of the model can be sparse. Its attention is dense: " in said


@pytest.mark.slow
def test_json_on_stdout_is_the_file(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "400", "--out", str(tmp_path), "--preset", "mean_pooling", "--json"]
    assert main(["demo", "--model", str(tiny), *options]) == 0
    assert capsys.readouterr().out == (tmp_path / "results.json").read_text()


@pytest.mark.slow
@needs_real_model
def test_whole_demo_on_the_real_model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The command finds its model converted under `--out`, as in every run but the first."""
    (tmp_path / NAME).symlink_to(converted(tmp_path_factory), target_is_directory=True)
    methods = ["pbs_attn", "s2o"]
    options = ["--tokens", "448", "--out", str(tmp_path), *(word for x in methods for word in ("--preset", x))]
    assert main(["demo", *options]) == 0
    written = json.loads((tmp_path / "results.json").read_text())
    dense, *sparse = written["rows"]
    assert dense["perplexity"] < 60
    assert dense["reply"] == written["answer"]
    assert written["dtype"] == str(dtype_for(torch.device("cpu"))).removeprefix("torch.")
    assert [row["method"] for row in sparse] == methods
    for row in sparse:
        assert row["perplexity"] < 1.2 * dense["perplexity"], row
        assert row["reply"] == written["answer"] or row["method"] not in ("mean_pooling", "pbs_attn")
    assert (tmp_path / "attention-map.png").is_file()


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ("AVX2", torch.float32),
        ("NEON", torch.float32),
        ("AVX512", torch.bfloat16),
        ("AVX512_VNNI", torch.bfloat16),
    ],
)
def test_models_are_read_in_the_dtype_that_the_device_multiplies_well(
    capability: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert dtype_for(torch.device("cpu")) == dtype
    assert dtype_for(torch.device("cuda")) == torch.bfloat16


def test_some_presets_are_read_and_all_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are read unless others are named keep less than everything of the demo's prompt."""
    seen: list[Any] = []
    monkeypatch.setattr("blocksparse.tools.demo.run.run", lambda settings, *_, **__: seen.append(settings))
    for options in ([], ["--preset", "all"], ["--preset", "a_shape"]):
        assert main(["demo", *options]) == 0
    some, every, one = (settings.pipelines for settings in seen)
    assert {*some} < {*every} == {*every_preset}
    assert [*one] == ["a_shape"]
    for name, pipeline in some.items():
        assert name == "s2o" or not pipeline.selector.keeps_everything(4096, 4096, causal=True)


def test_a_head_dim_that_no_preset_takes_is_named(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "wide", tokenizer, tiny_gemma2(num_hidden_layers=1, head_dim=320))
    asked = [str(tmp_path / "wide"), "--tokens", "300", "--out", str(tmp_path / "x")]
    assert main(["inspect", *asked]) == 1
    assert "no layer of wide can be inspected: its head dim is 320, above 256" in capsys.readouterr().err
    assert main(["demo", "--model", *asked]) == 1
    assert "the head dim of wide is 320, above 256, so its attention stays dense" in capsys.readouterr().err
