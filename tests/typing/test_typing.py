"""What mypy must accept and what it must reject, with the sentence expected."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_docs import blocks

pytest.importorskip("mypy")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ERROR = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: (?P<text>.+?)(  \[[\w-]+\])?$")


def place(path: Path, line: int) -> tuple[bool, str, int]:
    return path.parent.name == "accepted", path.name, line


def errors(files: list[Path]) -> dict[tuple[bool, str, int], str]:
    """The first error that strict mypy finds in each line, by whether its file is accepted, that file and the line.

    In a process of its own, which has nothing else in memory to search for cycles.
    """
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary", "--no-pretty"]
    command = [sys.executable, "-m", "mypy", *config, *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ran.stderr
    assert ran.returncode in (0, 1)
    found: dict[tuple[bool, str, int], str] = {}
    for match in filter(None, map(ERROR.match, ran.stdout.splitlines())):
        found.setdefault(place(Path(match["file"]), int(match["line"])), match["text"])
    return found


@pytest.mark.slow  # it reads all of the package, once for all files
def test_accepted_and_rejected(tmp_path: Path) -> None:
    """Errors stand where a line announces them, and nowhere else; also in what a user writes by our page."""
    page = ROOT / "docs" / "start" / "write-your-own-stage.md"
    written = tmp_path / "written_by_a_user.py"
    written.write_text("\n".join(code.strip("\n") for code in blocks(page, "", "rejected")), encoding="utf-8")
    files = [*sorted(HERE.glob("accepted/*.py")), *sorted(HERE.glob("rejected/*.py")), written]
    expected = {
        place(path, number): line.split("# E: ")[1].strip()
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "# E: " in line
    }
    assert {file for _, file, _ in expected} == {path.name for path in files if path.parent.name != "accepted"}
    assert not any(accepted for accepted, *_ in expected)
    found = errors(files)
    assert expected.keys() == found.keys()
    wrong = {where: found[where] for where, text in expected.items() if not found[where].startswith(text)}
    assert not wrong
