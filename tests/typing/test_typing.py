"""What mypy must accept and what it must reject, with the sentence expected."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ERROR = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: (?P<text>.+?)(  \[[\w-]+\])?$")


def errors(folder: str) -> list[tuple[str, int, str]]:
    """(file, line, text) of every error that strict mypy finds in one of the folders here.

    In a process of its own, which has nothing else in memory to search for cycles.
    """
    files = [str(path) for path in sorted((HERE / folder).glob("*.py"))]
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary", "--no-pretty"]
    command = [sys.executable, "-m", "mypy", *config, *files]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ran.stderr
    assert ran.returncode in (0, 1)
    found = [match for line in ran.stdout.splitlines() if (match := ERROR.match(line))]
    return [(Path(match["file"]).name, int(match["line"]), match["text"]) for match in found]


@pytest.mark.slow  # it reads all of the package
def test_accepted() -> None:
    assert errors("accepted") == []


@pytest.mark.slow
def test_rejected() -> None:
    expected = {
        (path.name, number): line.split("# E: ")[1].strip()
        for path in (HERE / "rejected").glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# E: " in line
    }
    found: dict[tuple[str, int], str] = {}
    for file, line, text in errors("rejected"):
        found.setdefault((file, line), text)
    assert expected.keys() == found.keys()
    wrong = {place: found[place] for place, text in expected.items() if not found[place].startswith(text)}
    assert not wrong
