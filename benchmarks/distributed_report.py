"""The table of `benchmarks.distributed`."""

from __future__ import annotations

from benchmarks.report import Row, gibibytes, milliseconds, tokens
from benchmarks.report import table as markdown


def alone(rows: list[Row], N: int) -> Row | None:
    """The row of one process at this length."""
    return next((row for row in rows if row["N"] == N and row.get("ranks") == 1), None)


def table(rows: list[Row]) -> str:
    """A row for each length and scheme; rows that could not be measured say why below."""
    body = []
    for row in (row for row in rows if "why" not in row):
        one = alone(rows, row["N"])
        sent = row.get("bytes_sent")
        body.append(
            [
                tokens(row["N"]),
                row["scheme"],
                str(row["ranks"]),
                f"{row['density']:.3f}",
                milliseconds(row["ms"]),
                "-" if one is None or row is one else f"{one['ms'] / row['ms']:.2f}",
                milliseconds(row["attention_ms"]),
                milliseconds(row["masks_ms"]),
                milliseconds(row["communication_ms"]) if sent else "-",
                gibibytes(sent),
                gibibytes(row["peak_bytes"]),
            ]
        )
    head = (
        "tokens", "scheme", "ranks", "density", "call, ms", "speedup over one GPU", "attention, ms", "masks, ms",
        "communication alone, ms", "sent, GiB", "peak, GiB",
    )  # fmt: skip
    why = "".join(f"\n{tokens(row['N'])} tokens: {row['why']}\n" for row in rows if "why" in row)
    return markdown(head, body) + "\n" + why
