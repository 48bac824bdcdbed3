"""Figures and tables of the documentation, from the results that they come from: `python -m benchmarks.figures`.

A page shows a table of `docs/evidence/results` between `<!-- table NAME -->` and `<!-- end of table -->`. A figure
elsewhere is followed by where it stands, as in `4.8<!-- NAME; ROW; COLUMN -->`, the row by its first cells; what
a cell has in brackets as in `(-2 to +5)<!-- NAME; ROW; COLUMN -->`. This rewrites all of them in README and docs,
rounding a figure as the page does, and draws the charts of these tables. A test holds that nothing is left to
rewrite.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.charts import draw
from benchmarks.results import RESULTS, Results

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(?<=<!-- table )(?P<name>[\w-]+) -->\n.*?(?=<!-- end of table -->)", re.DOTALL)
FIGURE = re.compile(
    r"(?P<shown>[\d.]+|\([-+\d]+ to [-+\d]+\))"
    r"(?P<where><!-- (?P<name>[\w-]+); (?P<row>[^;>]+); (?P<column>[^;>]+) -->)"
)


def rewritten(text: str, page: Path) -> str:
    """The text of a page with every table and every figure from its results."""

    def table(found: re.Match[str]) -> str:
        link = Path(os.path.relpath(RESULTS / f"{found['name']}.json", page.parent)).as_posix()
        return f"{found['name']} -->\n\n{Results.named(found['name']).markdown(link)}\n"

    def figure(found: re.Match[str]) -> str:
        results, shown = Results.named(found["name"]), found["shown"]
        if shown.startswith("("):
            return results.interval(found["row"], found["column"]) + found["where"]
        value = results.cell(found["row"], found["column"])
        digits = f"{value:.{len(shown.partition('.')[2])}f}"
        return (digits.removeprefix("0") if shown.startswith(".") else digits) + found["where"]

    return FIGURE.sub(figure, TABLE.sub(table, text))


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := rewritten(text, page)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    for path in draw(ROOT / "docs" / "pictures"):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
