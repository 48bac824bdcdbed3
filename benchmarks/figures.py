"""Figures and tables of the documentation, from the results that they come from: `python -m benchmarks.figures`.

A page shows a table of `docs/evidence/results` between `<!-- table NAME -->` and `<!-- end of table -->`. A figure
elsewhere is followed by where it stands, the row by its first cells: `4.8<!-- NAME; ROW; COLUMN -->`. A speedup is
written `1.5x`, a share `60 %`, and an interval `-1.2 (-3.4 to +1.0)`, or without its mean. This rewrites all of
them in README and docs, rounding a figure as the page does, and draws the charts of these tables. Between
`<!-- pages -->` and `<!-- end of pages -->` stands every page of the evidence. A test holds that nothing is left
to rewrite.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.charts import draw
from benchmarks.results import RESULTS, Results

ROOT = Path(__file__).parents[1]
PAGES = re.compile(r"(?<=<!-- pages -->\n).*?(?=<!-- end of pages -->)", re.DOTALL)
GROUP = re.compile(r"^      - (?P<name>[^:]+):\n(?P<pages>(?: {10}- .*\n)+)", re.MULTILINE)
TABLE = re.compile(r"(?<=<!-- table )(?P<name>[\w-]+) -->\n.*?(?=<!-- end of table -->)", re.DOTALL)
MARK = r"(?<!`)<!-- (?P<name>[\w-]+); (?P<row>[^;>]+); (?P<column>[^;>]+) -->"
FIGURE = re.compile(
    r"(?P<shown>(?:[-+][\d.]+ )?\([-+][\d.]+ to [-+][\d.]+\)|[\d.]+x?)"
    rf"(?P<where>(?:\s%)?{MARK})"
)


def rewritten(text: str, page: Path) -> str:
    """The text of a page with every table and every figure from its results.

    Raises:
        ValueError: what stands before a mark is no figure, which would not be rewritten.
    """
    ends = {found.end() for found in FIGURE.finditer(text)}
    for mark in re.finditer(MARK, text):
        if mark.end() not in ends:
            raise ValueError(f"{page.name}: write a figure before {mark[0]!r}, as 4.8, 1.5x, 60 % or (-1 to +2).")

    def table(found: re.Match[str]) -> str:
        link = Path(os.path.relpath(RESULTS / f"{found['name']}.json", page.parent)).as_posix()
        return f"{found['name']} -->\n\n{Results.named(found['name']).markdown(link)}\n"

    def figure(found: re.Match[str]) -> str:
        results, shown = Results.named(found["name"]), found["shown"]
        if shown.endswith(")"):
            interval = results.interval(found["row"], found["column"])
            return (interval[interval.index("(") :] if shown.startswith("(") else interval) + found["where"]
        value = results.cell(found["row"], found["column"])
        times = "x" if shown.endswith("x") else ""
        places = len(shown.removesuffix("x").partition(".")[2])
        return f"{value:.{places}f}{times}{found['where']}"

    return PAGES.sub(lambda _: overview(), FIGURE.sub(figure, TABLE.sub(table, text)))


def overview() -> str:
    """A table for each group of pages in the navigation: question, commands, machines."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    parts = []
    for group in GROUP.finditer(navigation):
        pages = re.findall(r"evidence/([\w-]+)\.md", group["pages"])
        if pages:
            head = f"### {group['name']}\n\n| question | command | machine |\n| --- | --- | --- |\n"
            parts.append(head + "".join(map(_in_overview, pages)))
    return "\n" + "\n".join(parts) + "\n"


def _in_overview(page: str) -> str:
    text = (ROOT / "docs" / "evidence" / f"{page}.md").read_text(encoding="utf-8")
    question = re.findall(r"^# (.+\?)$", text, re.MULTILINE)[0]
    tables = [Results.named(found["name"]) for found in TABLE.finditer(text)]

    def each(cells: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(cells)) or "-"

    commands = each(f"`{_short(command)}`" for table in tables for command in table.commands)
    if not tables:
        commands = re.findall(r"<!-- no measurements: (.+) -->", text)[0] + "; nothing is measured"
    return f"| [{question}]({page}.md) | {commands} | {each(table.chip for table in tables)} |\n"


def _short(command: str) -> str:
    """Without its options, which the page has."""
    return re.split(r" -(?!m )", re.sub(r"^torchrun .* -m", "torchrun -m", command))[0]


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
