"""Every python block of README and docs runs, every link leads somewhere, and what users write type-checks.

A fence may say more: `gpu` runs where a GPU is, `no-run` needs a host that is not here, `rejected` is for mypy,
which must report what stands behind `# E: `.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python(?P<kind>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]+)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *kinds: str) -> list[str]:
    """The code of a page's blocks of these kinds, each at its own line of the page, so that errors point there."""
    text = page.read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, match.start("code")) + match["code"]
        for match in FENCE.finditer(text)
        if match["kind"].strip() in kinds
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each_page
def test_blocks_run(page: Path) -> None:
    """In order, in one namespace per page."""
    if page.stem in ("transformers", "diffusers"):
        pytest.importorskip(page.stem)
    namespace: dict[str, object] = {"__name__": page.stem}
    for code in blocks(page, "", "gpu") if torch.cuda.is_available() else blocks(page, ""):
        exec(compile(code, str(page), "exec", dont_inherit=True), namespace)


@each_page
def test_fences_are_known(page: Path) -> None:
    kinds = {match["kind"].strip() for match in FENCE.finditer(page.read_text(encoding="utf-8"))}
    assert kinds <= {"", "gpu", "no-run", "rejected"}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / match["path"]).exists(), match["path"]


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")  # whose sample photograph is filmed
    runpy.run_path(str(script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 4


def test_every_preset_has_a_page() -> None:
    from blocksparse.testing import every_preset

    pages = {path.stem.replace("-", "_") for path in (ROOT / "docs" / "papers").glob("*.md")}
    on_minference_page = {"a_shape", "tri_shape"}
    assert pages | on_minference_page | {"auto"} == set(every_preset)  # `auto` is no paper's
    text = (ROOT / "docs" / "papers" / "minference.md").read_text(encoding="utf-8")
    assert all(f"{preset}(" in text for preset in on_minference_page)


def test_what_users_write_type_checks(tmp_path: Path) -> None:
    """The page on writing stages is one program: strict mypy accepts it, but for the block it must reject."""
    mypy_api = pytest.importorskip("mypy.api")
    page = ROOT / "docs" / "write-your-own-stage.md"
    program = "\n".join(code.strip("\n") for code in blocks(page, "", "rejected"))
    file = tmp_path / "written_by_a_user.py"
    file.write_text(program, encoding="utf-8")
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary", "--no-pretty"]
    printed, failed, _ = mypy_api.run([*config, str(file)])
    assert not failed, failed
    expected = {
        number: line.split("# E: ")[1].strip()
        for number, line in enumerate(program.splitlines(), 1)
        if "# E: " in line
    }
    found = re.findall(rf"{re.escape(file.name)}:(\d+): error: (.*?)(?:  \[[\w-]+\])?$", printed, re.MULTILINE)
    assert {int(number): text for number, text in found} == expected
    assert expected
