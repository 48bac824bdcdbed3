"""Every python block of README and docs runs, every link leads somewhere, and what users write type-checks.

`make docs` builds the site and looks at links, anchors and the navigation more closely.

A fence may say more: `gpu` runs where a GPU is, `no-run: WHY` is code whose names of this package, or commands,
exist, and `rejected` is for mypy, which must report what stands behind `# E: `. `text` right below is its output.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from blocksparse.hosts.serving.settings import Host, Served, Settings
from blocksparse.testing import every_preset, video_presets
from blocksparse.tools.cli.main import _parser
from blocksparse.tools.demo import TEXT
from tests.cases import each
from tests.tiny_model import byte_tokenizer, save_tiny

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "integrations").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EVIDENCE = sorted((ROOT / "docs" / "evidence").rglob("*.md"))
TABLE = re.compile(r"^<!-- table [\w-]+ -->\n.*?^<!-- end of table -->$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(?P<language>\w*)(?P<kind>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"python": {"", "gpu", "no-run", "rejected"}, "sh": {"", "no-run"}, "text": {""}, "json": {""}}
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]+)")
PRINTED = re.compile(
    r"^```python\n(?P<code>(?:(?!^```).)*)^```\n\n```text\n(?P<printed>.*?)^```$", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"\d+\.?\d*")
COMMAND = re.compile(r"^(blocksparse|make|(\.venv/bin/)?python -m|torchrun .*?-m) ")
INLINE = re.compile(r"(?<!`)`(?P<command>[^`\n]+)`(?!`)")
EXTRA = re.compile(r"pip install [^\n`]*?\.?\[(?P<extra>\w+)\]")
OPTION = re.compile(r"""['=](?P<option>\{"blocksparse": .*?\})['\n|,]""")  # of an engine, in a shell or in Python
REFERENCE = re.compile(r"^::: (?P<path>[\w.]+)$", re.MULTILINE)
# Each stands for what the package exports from it and no line names.
FOLDERS = tuple(f"blocksparse.{folder}" for folder in ("order", "score", "select", "execute", "presets"))
REFERENCE_OPTIONS = re.compile(r"(?<=\n)    options:\n(?: {6}.*\n?)+")
PUBLIC = (
    "blocksparse", "blocksparse.testing", "blocksparse.distributed", "blocksparse.tools.tune",
    "blocksparse.observe", "blocksparse.hosts.transformers", "blocksparse.hosts.diffusers",
)  # fmt: skip


def path_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@functools.cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *kinds: str, language: str = "python") -> list[str]:
    """The code of a page's blocks of these kinds, each at its own line of the page, so that errors point there."""
    text = read(page)
    return [
        "\n" * text.count("\n", 0, match.start("code")) + match["code"]
        for match in FENCE.finditer(text)
        if match["language"] == language and match["kind"].strip() in kinds
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "", "gpu")], ids=path_of)
def test_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one namespace per page; what the page shows right below a block is what that prints."""
    for host in ("transformers", "diffusers"):
        if page.stem in (host, "integrations"):
            pytest.importorskip(host)
    namespace: dict[str, object] = {"__name__": page.stem}
    shown = {match["code"].strip(): match["printed"] for match in PRINTED.finditer(read(page))}
    for code in blocks(page, "", "gpu") if torch.cuda.is_available() else blocks(page, ""):
        capsys.readouterr()
        exec(compile(code, str(page), "exec", dont_inherit=True), namespace)
        if (text := shown.get(code.strip())) is not None and not torch.cuda.is_available():
            printed = capsys.readouterr().out
            assert NUMBER.sub("0", printed) == NUMBER.sub("0", text)
            numbers, expected = ([float(x) for x in NUMBER.findall(of)] for of in (printed, text))
            assert numbers == pytest.approx(expected, rel=0.02, abs=0.02)


def test_there_are_blocks_to_run() -> None:
    """Else another way to write fences would leave the tests around this one without work, and green."""
    assert sum(len(blocks(page, "")) for page in PAGES) > 80
    assert sum(len(blocks(page, "", language="sh")) for page in PAGES) >= 3
    assert sum(len(PRINTED.findall(read(page))) for page in PAGES) > 5
    references = (ROOT / "docs" / "reference" / "api").glob("*.md")
    assert all(blocks(page, "") for page in [ROOT / "README.md", *references])


def test_first_pages_are_short() -> None:
    """README in two screens, one page to choose by, and all but evidence in an evening."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 5_500
    words = {page: len(re.findall(r"\S*[A-Za-z]\S*", read(page))) for page in (ROOT / "docs").rglob("*.md")}
    assert words[ROOT / "docs" / "choose.md"] <= 900
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert glossary.count("\n| ") - 1 <= 40  # but for the head of its table
    assert sum(count for page, count in words.items() if page not in EVIDENCE) <= 28_000
    assert sum(words[page] for page in EVIDENCE) < 22_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "", language="sh")], ids=lambda page: page.stem
)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """In a folder with a model that is made up, and a text."""
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    save_tiny(tmp_path / "path" / "to" / "model", byte_tokenizer())
    (tmp_path / "prompt.txt").write_text(TEXT.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    for code in blocks(page, "", language="sh"):
        shell = ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{code.strip()}\n{done.stdout}{done.stderr}"


@each("page", PAGES, path_of)
def test_fences_are_known(page: Path) -> None:
    """Code stands in fences that say what it is: it runs, or says why it cannot, or is no command."""
    text = read(page)
    outside = REFERENCE_OPTIONS.sub("", FENCE.sub("", text))
    assert not re.findall(r"^(?: {4}|\t|\s*```).*$", outside, re.MULTILINE)
    for match in FENCE.finditer(text):
        kind, _, why = match["kind"].strip().partition(": ")
        assert kind in KINDS[match["language"]]
        assert bool(why) == (kind == "no-run"), "a block that cannot run says why"
        if match["language"] in ("text", "json"):
            assert not any(COMMAND.match(line) for line in match["code"].splitlines())
        for node in ast.walk(ast.parse(match["code"])) if why and match["language"] == "python" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "blocksparse":
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, name.name) for name in node.names)


@each("page", PAGES, path_of)
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(read(page)):
        assert (page.parent / match["path"]).exists(), match["path"]


@each("page", PAGES, path_of)
def test_commands_exist(page: Path) -> None:
    """Every line of a shell names a command that is there, with options that it has; so does text, by less."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = read(page)
    shells = [match["code"] for match in FENCE.finditer(text) if match["language"] == "sh"]
    lines = [line for code in shells for line in code.replace("\\\n", " ").splitlines()]
    inline = [match["command"] for match in INLINE.finditer(FENCE.sub("", text))]
    for line in filter(COMMAND.match, [*lines, *inline]):
        command, *words = itertools.takewhile(lambda x: x != ">", shlex.split(line, comments=True))
        if command == "torchrun":
            words = words[words.index("-m") :]
        if command == "blocksparse" and line in lines:
            _parser().parse_args(words)
        elif command == "blocksparse":
            assert words[0].startswith("--") or words[0] in _parser().format_help(), line
        elif command == "make":
            assert words[0] in targets, line
            for options in (word.removeprefix("ARGS=") for word in words[1:] if word.startswith("ARGS=")):
                if words[0] == "demo":
                    _parser().parse_args(["demo", *shlex.split(options)])
        elif not words[1].startswith("sglang"):
            source = _source(words[1])
            assert all(word in source for word in words[2:] if word.startswith("--")), line


@each("page", PAGES, path_of)
def test_extras_and_options_of_engines_exist(page: Path) -> None:
    text = read(page)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert {match["extra"] for match in EXTRA.finditer(text)} <= extras.keys()
    for match in OPTION.finditer(text):
        given = ast.literal_eval(match["option"])
        Settings.of(given, Served("llama", layers=32, heads=32, kv_heads=8), Host("blocksparse", "--option"))


def _source(module: str) -> str:
    """The text of what `python -m` runs."""
    found = find_spec(module)
    if found is not None and found.submodule_search_locations:
        found = find_spec(f"{module}.__main__")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


def test_contributing_shows_where_things_are() -> None:
    """Its pictures name every file and folder of the package's own folder, and no other file than there are."""
    section = re.split("^## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[2]
    package = ROOT / "src" / "blocksparse"
    files = {f"/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    named = re.findall(r"[\w/]+\.py\b", section)
    assert len(named) > 30
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    inside = {f"{path.name}/" if path.is_dir() else path.name for path in package.iterdir()}
    missing = {name for name in inside if not name.startswith("_") and name != "py.typed"} - {
        *re.findall(r"\w+(?:/|\.py\b)", section)
    }
    assert not missing


def test_reference_has_every_class_and_function() -> None:
    for host in ("transformers", "diffusers"):
        pytest.importorskip(host)

    def resolved(path: str) -> object:
        module, name = path.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)

    def exported(module: ModuleType) -> dict[str, object]:
        listed = re.findall(r" as (\w+)$", inspect.getsource(module), re.MULTILINE)
        return {name: getattr(module, name) for name in getattr(module, "__all__", listed)}

    pages = [read(page) for page in (ROOT / "docs" / "reference" / "api").glob("*.md")]
    paths = [path for page in pages for path in REFERENCE.findall(page)]
    # The site would show the module where a function in it has the same name.
    assert not [path for path in paths if (ROOT / "src" / f"{path.replace('.', '/')}.py").exists()]
    shown = [resolved(path) for path in paths]
    wanted = {name: x for module in PUBLIC for name, x in exported(importlib.import_module(module)).items()}
    assert len(shown) == len(set(shown))
    assert set(FOLDERS) <= set(paths)
    for name, x in wanted.items():
        if not (inspect.isclass(x) or inspect.isfunction(x)):  # a value, which a text names
            assert any(re.search(rf"\b{name}\b", page) for page in pages), name
        elif not x.__module__.startswith(tuple(f"{folder}." for folder in FOLDERS)):
            assert x in shown, f"add a line `::: blocksparse.{name}` to a page in docs/reference/api"


@each("page", PAGES, path_of)
def test_figures_are_those_of_the_results(page: Path) -> None:
    """Or else `python -m benchmarks.figures` rewrites the page."""
    pytest.importorskip("matplotlib")
    from benchmarks.figures import rewritten

    text = read(page)
    assert rewritten(text, page) == text


@each("page", EVIDENCE, path_of)
def test_evidence_is_written_from_results(page: Path) -> None:
    """Each table is that of a file, which says its command, machine, date and versions."""
    text = read(page)
    if "<!-- no measurements: " in text:
        assert "<!-- table " not in text
        return
    assert "<!-- table " in text
    by_hand = TABLE.sub("", text)
    assert not re.search(r"^\|[-:| ]+\|$", by_hand, re.MULTILINE)


@each("page", PAGES, path_of)
def test_figures_outside_of_evidence_are_written_from_results(page: Path) -> None:
    """A time, a speed-up or a KL that was measured is followed by the file that it comes from."""
    text = read(page)
    if page in EVIDENCE and "<!-- no measurements: " not in text:
        return
    text = TABLE.sub("", text)
    text = FENCE.sub("", text)
    speed = r"(?<![\w.])\d*\.?\d+(?: ms\b| us\b| times as fast|x faster| x dense| TFLOP/s)"
    by_hand = rf"{speed}|KL (?:of |is )?0?\.\d+(?![\d<])"
    assert not re.findall(by_hand, text)


def test_the_demo_prints_what_the_evidence_has() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.results import Results

    printed = Results.named("cpu-demo")
    text = (ROOT / "docs" / "start" / "demo.md").read_text(encoding="utf-8")
    for tokens, block in zip(("4096", "7680"), text.split("speed-\n")[1:], strict=True):
        lines = re.findall(r"^(\w+) +([\d.]+) s .*? ([\d.]+)x +([\d.]+)%", block.split("```")[0], re.MULTILINE)
        assert len(lines) > 5
        for method, first, times, percent in lines:
            row = f"AVX-512, bf16, {tokens}, {method}"
            assert printed.cell(row, "first token") == float(first)
            assert printed.cell(row, "speedup over dense") == float(times)
            assert printed.cell(row, "density") == pytest.approx(float(percent) / 100, abs=6e-4)


def test_a_figure_that_differs_is_rewritten() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.figures import rewritten

    where = "<!-- whole-model; 128K; speedup -->"
    score = "<!-- tasks; xattention with Band(128), 0.9; score, 7680 -->"
    assert rewritten(f"(-1 to +1){score}", ROOT / "README.md") == f"(-20 to +5){score}"
    mean = "<!-- vllm-tasks; 32K, auto(); tasks, from unmodified vLLM -->"
    assert rewritten(f"-9.0 (-1.5 to +1.5){mean}", ROOT / "README.md") == f"+1.3 (-1.1 to +3.6){mean}"
    assert rewritten(f"7.1x{where}", ROOT / "README.md") == f"2.7x{where}"
    assert rewritten(f"7.1\n%{where}", ROOT / "README.md") == f"2.7\n%{where}"
    for shown in ("", "(0 to +1)", "-1 points"):
        with pytest.raises(ValueError, match=r"README\.md: write a figure before"):
            rewritten(shown + where, ROOT / "README.md")
    with pytest.raises(KeyError, match="12K"):
        rewritten("7<!-- whole-model; 12K; speedup -->", ROOT / "README.md")


@each("results", sorted((ROOT / "docs" / "evidence" / "results").glob("*.json")), path_of)
def test_results_say_where_they_come_from(results: Path) -> None:
    found = json.loads(results.read_text(encoding="utf-8"))
    assert all(found[fact] for fact in ("machine", "date", "versions", "command", "inputs", "kept"))
    assert len({tuple(row[: found["keys"]]) for row in found["rows"]}) == len(found["rows"])
    assert {len(row) for row in found["rows"]} == {len(found["columns"])}
    commands = INLINE.findall(found["command"])
    if "of the paper" not in found["command"]:
        assert any(COMMAND.match(command) or command.startswith("python examples/") for command in commands)
    assert any(f"<!-- table {results.stem} -->" in read(page) for page in PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")  # whose sample photograph is filmed
    runpy.run_path(str(script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 4


def test_every_preset_has_a_page() -> None:
    pages = {path.stem.replace("-", "_") for path in (ROOT / "docs" / "reference" / "papers").glob("*.md")}
    on_minference_page = {"a_shape", "tri_shape"}
    named = {*every_preset, *video_presets, "triangle_mix"}
    assert pages | on_minference_page | {"auto"} == named  # `auto` is no paper's
    text = (ROOT / "docs" / "reference" / "papers" / "minference.md").read_text(encoding="utf-8")
    assert all(f"{preset}(" in text for preset in on_minference_page)
