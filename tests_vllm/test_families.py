"""The table of model types on the page "When attention is sparse" is what the layers of vLLM's models say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import HERE

PAGE = HERE.parent / "docs" / "start" / "when-sparse.md"
MLA = "MLA"  # as in families.py
BEGIN, END = "<!-- layers of vLLM -->\n", "<!-- end of layers -->"


def outcome(layers: dict[str, int]) -> str | None:
    """What a model's layers do, for a row of the table; None for a model without attention."""
    if MLA in layers:
        return "none: the engine does not start (MLA)"
    reasons = ", ".join(f"`{reason}`" for reason in sorted(layers.keys() - {"sparse"}))
    if not reasons:
        return "all attention layers" if layers else None
    return f"all but those with {reasons}" if "sparse" in layers else f"none: {reasons}"


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int] | str]:
    out = tmp_path_factory.mktemp("families") / "layers.json"
    subprocess.run([sys.executable, HERE / "families.py", out], check=True, capture_output=True, timeout=900)
    found: dict[str, dict[str, int] | str] = json.loads(out.read_text())
    return found


def test_the_table_of_model_types(layers: dict[str, dict[str, int] | str]) -> None:
    rows: dict[str, list[str]] = {}
    for kind, found in layers.items():
        if not isinstance(found, str) and (what := outcome(found)) is not None:
            rows.setdefault(what, []).append(f"`{kind}`")
    lines = [f"| {what} | {', '.join(kinds)} |" for what, kinds in sorted(rows.items())]
    table = "\n".join(["| sparse layers | model types |", "|---|---|", *lines, ""])
    page = PAGE.read_text(encoding="utf-8")
    assert table == page[page.index(BEGIN) + len(BEGIN) : page.index(END)], f"put this on the page:\n\n{table}"


def test_most_models_can_be_made(layers: dict[str, dict[str, int] | str]) -> None:
    """Others have no configuration by default, or kernels that a CPU lacks."""
    assert sum(isinstance(found, dict) for found in layers.values()) >= 60
