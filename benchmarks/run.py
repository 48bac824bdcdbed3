"""The tables of speed in docs/evidence in one go: `python -m benchmarks.run [TABLE ...]`.

On a GPU all tables but `cpu`, elsewhere `cpu`, unless tables are named. Each call is checked against float64
before it is timed, and one that fails is not timed. `results.json` grows row by row: a run cut short keeps what
it has.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks import (
    audit_table,
    call_tables,
    crossover_table,
    eight_bit_tables,
    gather_tables,
    kernel_tables,
    s2o_tables,
    serving_table,
    stage_tables,
    whole_block_tables,
    window_table,
)
from benchmarks.cases import FULL, QUICK, TINY, Plan
from benchmarks.peers import SPARSE, peer_from
from benchmarks.report import Row, markdown
from benchmarks.timing import reason

# Calls and serving last: they capture graphs, and after the profiler of the latter launches take longer.
GPU_TABLES = (
    "rates", "wide", "blocks", "windows", "eight_bit", "whole_blocks", "gather", "stages", "s2o",
    "growth", "crossover", "audit", "calls", "serving",
)  # fmt: skip

Table = Callable[[Plan, torch.device], Iterator[Row]]


def environment(device: torch.device) -> dict[str, str]:
    """What the figures depend on besides the code."""
    found = {"date": datetime.now(UTC).date().isoformat()}
    if device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(device)
        found["driver"] = _driver()
    else:
        found["CPU"] = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    found["torch"] = torch.__version__
    for package in ("triton", "flash-attn-4", "nvidia-cudnn-frontend"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def run(tables: dict[str, Table], plan: Plan, device: torch.device, path: Path) -> Row:
    """Measure the tables in order and write `path` after every row."""
    results: Row = {"environment": environment(device), "roofs": kernel_tables.roofs(device), "tables": {}}
    for name, table in tables.items():
        start = time.perf_counter()
        rows: list[Row] = results["tables"].setdefault(name, [])
        try:
            for row in table(plan, device):
                rows.append(row)
                path.write_text(json.dumps(results, indent=1), encoding="utf-8")
                print(f"{name} {time.perf_counter() - start:6.1f} s  {_short(row)}", flush=True)
        except Exception as error:  # the other tables are still worth having
            print(f"{name} ended early: {reason(error)}", flush=True)
            results.setdefault("ended_early", {})[name] = reason(error)
    path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


def _short(row: Row) -> str:
    figures = " ".join(f"{name}={f.get('ms', float('nan')):.3f}" for name, f in row.get("figures", {}).items())
    given = " ".join(
        f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if k != "figures"
    )
    return f"{given} {figures}"


def wrong(results: Row) -> list[str]:
    """Figures that are missing because an output was wrong."""
    found = []
    for name, rows in results["tables"].items():
        for row in rows:
            for why in (row.get("why"), *(figure.get("why") for figure in row.get("figures", {}).values())):
                if why is not None and why.startswith("WrongOutputError"):
                    found.append(f"{name}, {row.get('N')} tokens: {why}")
    return found


def main() -> None:
    every = (*GPU_TABLES, "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(every))
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder of results.json")
    parser.add_argument("--quick", action="store_true", help="few and small shapes: does everything run?")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="rates, cpu: one more, see peers.peer_from",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(every):
        parser.error(f"no such table: {', '.join(sorted(unknown))}; there are {', '.join(every)}")

    gpu = torch.cuda.is_available()
    named = arguments.tables or (GPU_TABLES if gpu else every if arguments.quick else ("cpu",))
    device = torch.device("cuda" if gpu and set(named) != {"cpu"} else "cpu")
    if not gpu and not arguments.quick and set(named) != {"cpu"}:
        parser.error("these tables need a GPU; --quick tries the program at shapes that a CPU can do")
    plan = (QUICK if gpu else TINY) if arguments.quick else FULL
    others = {name: peer_from(Path(path)) for name, _, path in (x.partition("=") for x in arguments.peer)}
    tables: dict[str, Table] = {
        "rates": partial(kernel_tables.rates, peers={**SPARSE, **others}),
        "wide": kernel_tables.wide,
        "blocks": kernel_tables.blocks,
        "windows": window_table.windows,
        "eight_bit": eight_bit_tables.eight_bit,
        "whole_blocks": whole_block_tables.whole_blocks,
        "gather": gather_tables.gather,
        "stages": stage_tables.stages,
        "s2o": s2o_tables.s2o,
        "growth": stage_tables.growth,
        "crossover": crossover_table.crossover,
        "audit": audit_table.audit,
        "calls": call_tables.calls,
        "serving": serving_table.serving,
        "cpu": lambda plan, _: call_tables.cpu(plan, torch.device("cpu"), peers=others),
    }
    torch.manual_seed(time.time_ns() % 2**31)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = run(
        {name: tables[name] for name in every if name in named}, plan, device, arguments.out / "results.json"
    )
    print(f"\n{markdown(results)}")
    if failed := wrong(results):
        sys.exit("wrong outputs, not timed:\n" + "\n".join(failed))


if __name__ == "__main__":
    with torch.no_grad():
        main()
