"""The tables of `benchmarks.distributed`: all its figures, and those of the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.report import NONE, Row, cell, gibibytes, milliseconds, ratio, tokens
from benchmarks.report import table as markdown

# The columns that the documentation has, and those that it leaves out.
SHOWN = (
    "tokens", "scheme", "GPUs", "density", "call, ms", "speedup over one GPU", "speedup over dense",
    "longest attention over mean", "communication alone, share of the call", "peak of a rank, GiB",
    "peak over its share",
)  # fmt: skip
MORE = ("attention, ms", "masks, ms", "communication alone, ms", "sent, GiB")
NAMES = {
    "one process": "one process", "ulysses": "`Ulysses`", "all-gather": "`AllGatherKV`", "ring": "`Ring`",
    "ulysses, balanced": "`Ulysses`, heads balanced by density",
}  # fmt: skip


def like(rows: list[Row], row: Row, *, ranks: int, dense: bool) -> Row:
    """The row of this length on so many ranks with dense attention, or without; empty if there is none."""
    wanted = row["N"], ranks, dense
    found = (x for x in rows if (x["N"], x["ranks"], x.get("dense", False)) == wanted and "why" not in x)
    return next(found, {})


def _each(rows: list[Row]) -> Iterator[list[str]]:
    """The cells of every row that could be measured."""
    for row in (row for row in rows if "why" not in row):
        ranks, ms, dense = row["ranks"], row["ms"], row.get("dense", False)
        one = like(rows, row, ranks=1, dense=dense) if ranks > 1 else {}
        whole = {} if dense else like(rows, row, ranks=ranks, dense=True)
        over_one, over_dense = ratio(one.get("ms"), ms), ratio(whole.get("ms"), ms)
        sent, peak, one_peak = row.get("bytes_sent"), row["peak_bytes"], one.get("peak_bytes")
        over_share = None if peak is None else ratio(peak * ranks, one_peak)
        yield [
            tokens(row["N"]),
            "dense, " * dense + NAMES[row["scheme"]],
            str(ranks),
            cell(row["density"], 3),
            milliseconds(ms),
            NONE if over_one is None else f"{over_one:.2f}x",
            NONE if over_dense is None else f"{over_dense:.1f}x",
            NONE if sent is None else cell(row["longest_over_mean"], 3),
            NONE if sent is None else f"{100 * row['communication_ms'] / ms:.0f} %",
            gibibytes(peak),
            cell(over_share, 2),
            milliseconds(row["attention_ms"]),
            milliseconds(row["masks_ms"]),
            NONE if sent is None else milliseconds(row["communication_ms"]),
            gibibytes(sent),
        ]


def table(rows: list[Row]) -> str:
    """A row for each length and scheme; rows that could not be measured say why below."""
    why = "".join(
        f"\n{tokens(row['N'])} tokens, {row['scheme']} on {row['ranks']}: {row['why']}\n"
        for row in rows
        if "why" in row
    )
    return markdown((*SHOWN, *MORE), _each(rows)) + "\n" + why


def as_results(rows: list[Row]) -> Row:
    """Columns and rows of a file in docs/evidence/results."""
    return {"columns": SHOWN, "rows": [cells[: len(SHOWN)] for cells in _each(rows)]}
