"""Two trees take turns: rows of both, ratios turn by turn, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import two_trees


class Answering:
    """A process that builds some rows and says how long each takes, in turns."""

    def __init__(self, rows: dict[str, list[float]]) -> None:
        self.stdin, self.stdout = io.StringIO(), self
        self._said: Iterator[str] = iter([json.dumps(list(rows))])
        self._times = {name: iter(times) for name, times in rows.items()}

    def readline(self) -> str:
        if asked := self.stdin.getvalue().splitlines():
            self.stdin.seek(0)
            self.stdin.truncate()
            return json.dumps(next(self._times[asked[-1]]))
        return next(self._said)

    def communicate(self) -> tuple[str, str]:
        return "", ""


def test_rows_have_names_of_their_own() -> None:
    names = [str(point) for point in two_trees.points(two_trees.TABLES, 32768)]
    assert len(set(names)) == len(names)
    assert {name.partition(":")[0] for name in names} == set(two_trees.TABLES)
    assert "rates: kernel, 131072 tokens, D=128, blocks of 128 and 128, 10%" in names


def test_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock halves in the second turn, and who comes second is slower by a quarter: not so the ratio."""
    trees = {"old": {"both": [2.0, 5.0], "gone": [1.0] * 2}, "new": {"both": [1.25, 2.0], "new": [1.0] * 2}}
    started: list[tuple[str, ...]] = []

    def start(folder: str, *arguments: str) -> Any:
        started.append((folder, *arguments))
        return Answering(trees[folder] if "answer" in arguments else {})

    monkeypatch.setattr(two_trees, "start", start)
    out = tmp_path / "found.json"
    two_trees.main(["before=old", "after=new", "--turns", "2", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["row"] == "both"
    assert (row["before ms"], row["after ms"]) == (3.5, 1.625)
    assert row["ratio"] == pytest.approx(0.5)
    assert row["turns"] == {"before": [2.0, 5.0], "after": [1.25, 2.0]}
    assert "0.500" in capsys.readouterr().out
    assert sum("compile" in arguments for arguments in started) == 8
    with pytest.raises(SystemExit):
        two_trees.main(["before=old"])
