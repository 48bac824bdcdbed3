"""The tables of `docs/evidence/results`, each with the command, the machine and the date that made it."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "docs" / "evidence" / "results"


COMMAND = re.compile(r"`((?:blocksparse|make|python|torchrun) [^`]*)`")


class Results(NamedTuple):
    """One table, cells as they are shown."""

    machine: str
    date: str
    command: str
    source: str  # how it was made, in a sentence
    columns: list[str]
    rows: dict[str, list[str]]  # by their first cells in plain text, joined by commas
    kept: str  # what the run itself wrote, a path from the folder of results, or "the figures as printed"

    @classmethod
    def named(cls, name: str) -> Results:
        read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        source = "{machine}, {date}, {versions}. {command}. Inputs: {inputs}. ".format(**read)
        rows = {", ".join(_plain(row[: read["keys"]])): row for row in read["rows"]}
        return cls(read["machine"], read["date"], read["command"], source, read["columns"], rows, read["kept"])

    @property
    def chip(self) -> str:
        """The machine in a word or two."""
        found = re.search(r"H\d00|EPYC|Xeon", self.machine)
        return self.machine if found is None else found[0] if found[0].startswith("H") else f"CPU ({found[0]})"

    @property
    def commands(self) -> list[str]:
        """The commands of this project that made it; none for figures of a paper."""
        return COMMAND.findall(self.command)

    def cell(self, row: str, column: str) -> float:
        return float(self._found(r"\d*\.?\d+", row, column))

    def has(self, row: str, column: str) -> bool:
        """Whether the cell has a figure, not a dash."""
        return self.rows[row][_plain(self.columns).index(column)] != "-"

    def interval(self, row: str, column: str) -> str:
        """The cell's interval in brackets, behind its mean if the cell has one."""
        return self._found(r"([-+][\d.]+ )?\(.*\)", row, column)

    def _found(self, pattern: str, row: str, column: str) -> str:
        text = self.rows[row][_plain(self.columns).index(column)]
        found = re.search(pattern, text)
        if found is None:
            raise ValueError(f"{row!r}, {column!r} must match {pattern}, got {text!r}")
        return found[0]

    def markdown(self, link: str) -> str:
        """The table and how it was made, for a page from which `link` leads to the file."""
        lines = (self.columns, ["---"] * len(self.columns), *self.rows.values())
        table = "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)
        table = re.sub(r"(?<=\d) (?=(?:ms|s|%|KiB) )", "\N{NO-BREAK SPACE}", table)
        source = f"{self.source[0].upper()}{self.source[1:]}[JSON]({link})"
        if self.kept.endswith(".json"):
            source += f", [raw data]({link.rpartition('/')[0]}/{self.kept})"
        return f"{table}\n{textwrap.fill(source, 115, break_on_hyphens=False)}\n"


def _plain(cells: list[str]) -> list[str]:
    """What a marker may hold inside of a table: no bars, and no marks of Markdown."""
    return [re.sub(r" *\\\| *", " with ", cell).replace("`", "").replace("*", "") for cell in cells]
