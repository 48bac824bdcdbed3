"""The kernels of two trees of this repository in turns, row by row, in one run:

    git archive OLD src benchmarks | tar x -C /folder/of/old
    python -m benchmarks.two_trees before=/folder/of/old after=. --out build/two-trees.json

A process for each tree, with the `src` and `benchmarks` of its own, builds the rows of the tables `rates`,
`blocks`, `wide`, `eight_bit` and `softcaps`, after others have compiled them and checked them against float64.
Then the two take turns at each row, the one first in one turn and the other first in the next; before each call
the GPU rests. Milliseconds are medians of the turns. The ratio is that of calls of one turn, since the clock of a
GPU moves from one turn to the next: the geometric mean of two medians, of the turns of either order. A row that a
tree cannot run is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TABLES = "rates", "blocks", "wide", "eight_bit", "softcaps"
_COMPILING = 4  # processes of a tree
_REST = 0.04  # seconds before a call, so that who comes second finds a GPU with as much power to spend


class Point(NamedTuple):
    """What a row measures; head dim of keys and of values."""

    table: str
    what: str  # kernel, portable, fp8 call, ..., softcap 50
    N: int
    D: int
    Dv: int
    q_block: int
    k_block: int
    density: float

    def __str__(self) -> str:
        dims = f"{self.D}" if self.Dv == self.D else f"{self.D}/{self.Dv}"
        blocks = f"{self.q_block} and {self.k_block}"
        return f"{self.table}: {self.what}, {self.N} tokens, D={dims}, blocks of {blocks}, {self.density:.0%}"


def points(tables: Sequence[str], N: int) -> Iterator[Point]:
    """The rows; `N` tokens, and four times as many in one."""
    made = {
        "rates": [
            *(Point("rates", "kernel", N, D, D, 128, 128, d) for D in (128, 64) for d in (0.3, 0.1)),
            Point("rates", "kernel", N, 128, 128, 128, 128, 0.05),
            Point("rates", "kernel", 4 * N, 128, 128, 128, 128, 0.1),
            *(Point("rates", "portable", N, D, D, 128, 128, 0.1) for D in (128, 64)),
        ],
        "blocks": [
            Point("blocks", "kernel", N, D, D, *blocks, d)
            for D, blocks, d in (
                *((128, blocks, d) for blocks in ((64, 64), (128, 64)) for d in (0.3, 0.1)),
                *((64, (64, 64), d) for d in (0.3, 0.1)),
                (64, (128, 64), 0.1),
            )
        ],
        "wide": [
            Point("wide", "kernel", N, D, Dv, 128, 128, d)
            for D, Dv, d in ((256, 256, 0.3), (256, 256, 0.1), (192, 128, 0.3), (192, 128, 0.1), (96, 96, 0.3))
        ],
        "eight_bit": [
            Point("eight_bit", f"{values} {what}", N, 128, 128, 128, 128, d)
            for values in ("fp8", "bf16")
            for what in ("call", "kernel")
            for d in (0.3, 0.1)
        ],
        "softcaps": [
            *(
                Point("softcaps", what, N, D, D, 128, 128, d)
                for D in (128, 64, 256)
                for d in (0.3, 0.1)
                for what in ("plain", "softcap 50", "sinks")
            ),
            *(Point("softcaps", what, N, 128, 128, 64, 64, 0.1) for what in ("plain", "softcap 50", "sinks")),
        ],
    }
    return (point for table in tables for point in made[table])


def build(point: Point) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """The call, and what raises where its output is wrong: by the tree's own `benchmarks`."""
    from benchmarks.eight_bit_tables import TOLERANCE, executor_call, int8_kernel_call
    from benchmarks.inputs import Case
    from benchmarks.peers import kernel_call, portable_call
    from benchmarks.timing import check

    torch.manual_seed(1)
    heads = 16 if point.D > 128 or point.table == "wide" else 32
    sizes = point.N, heads, 8, point.D, point.q_block, point.k_block, point.density, torch.bfloat16
    case = Case(*sizes) if point.Dv == point.D else Case(*sizes, point.Dv)
    q, k, v = case.inputs(torch.device("cuda"))
    mask = case.mask(q, k)
    near = partial(check, q=q, k=k, v=v, mask=mask)
    if point.table == "eight_bit":
        values, what = point.what.split()
        made = (executor_call if what == "call" else int8_kernel_call)(q, k, v, mask, values == "fp8")
        return made, partial(near, tolerance=2 * TOLERANCE[values])
    if point.table == "softcaps":
        import blocksparse as bs

        sinks = torch.zeros(heads, device="cuda") if point.what == "sinks" else None
        softcap = 50.0 if point.what == "softcap 50" else None
        spec = bs.AttentionSpec(scale=point.D**-0.5, softcap=softcap, sinks=sinks)
        return kernel_call(q, k, v, mask, spec=spec), partial(near, spec=spec)
    return (portable_call if point.what == "portable" else kernel_call)(q, k, v, mask), near


def milliseconds(call: Callable[[], object], budget_ms: float = 8.0) -> float:
    """Of one call, among as many as the budget holds, after half as many that warm the clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def of(count: int) -> float:
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return max(float(begin.elapsed_time(end)) / count, 0.02)

    time.sleep(_REST)
    call()
    count = max(3, int(budget_ms / of(1)))
    of(max(2, count // 2))
    return of(count)


def compile_some(tables: Sequence[str], N: int, first: int) -> None:
    """Compile and check every row of a share of them."""
    for point in list(points(tables, N))[first::_COMPILING]:
        try:
            call, verify = build(point)
            verify(call())
        except Exception as error:  # the others are still worth having
            print(f"cannot run {point}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
        call = verify = None  # type: ignore[assignment]
        torch.cuda.empty_cache()


def answer_lines(tables: Sequence[str], N: int) -> None:
    """Build all rows, name them, and time one for each line that names it."""
    calls: dict[str, Callable[[], Tensor]] = {}
    for point in points(tables, N):
        try:
            call, _ = build(point)
            call()
            calls[str(point)] = call
        except Exception as error:
            print(f"cannot run {point}: {type(error).__name__}"[:300], file=sys.stderr, flush=True)
    torch.cuda.synchronize()
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        print(json.dumps(milliseconds(calls[line.strip()])), flush=True)


def start(folder: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of this file with the packages of a tree."""
    tree = Path(folder).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree)))}
    return subprocess.Popen(
        [sys.executable, "-P", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def answer(process: subprocess.Popen[str], line: str | None = None) -> Any:
    """What a process says, to a line if one is given."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line is not None:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return json.loads(process.stdout.readline())


def compared(turns: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row for each call: medians of each tree's turns, and the second's time over the first's."""
    rows = []
    for name, its in turns.items():
        first, second = its.values()
        each = [y / x for x, y in zip(first, second, strict=True)]
        # In one turn the first comes first, in the next the second, and who comes second finds a hotter GPU.
        ratio = statistics.geometric_mean(
            statistics.median(ratios) for ratios in (each[::2], each[1::2]) if ratios
        )
        ms = {f"{tree} ms": statistics.median(found) for tree, found in its.items()}
        rows.append({"row": name, **ms, "ratio": ratio, "turns": its})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="two of them")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES[:4])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("two-trees.json"))
    parser.add_argument("--work", choices=["compile", "answer"], help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work is not None:
        torch.set_grad_enabled(False)
        if options.work == "compile":
            compile_some(options.tables, options.tokens, options.share)
        else:
            answer_lines(options.tables, options.tokens)
        return
    trees = dict(tree.split("=", 1) for tree in options.trees if "=" in tree)
    if len(trees) != 2 or len(options.trees) != 2:
        parser.error("two trees are compared, NAME=FOLDER each")
    same = ["_", "--tables", *options.tables, "--tokens", str(options.tokens), "--work"]
    compiling = [
        start(tree, *same, "compile", "--share", str(i)) for i in range(_COMPILING) for tree in trees.values()
    ]
    for process in compiling:
        process.communicate()
    working = {name: start(tree, *same, "answer") for name, tree in trees.items()}
    named = {name: answer(process) for name, process in working.items()}
    first, second = named
    turns: dict[str, dict[str, list[float]]] = {
        name: {first: [], second: []} for name in named[first] if name in named[second]
    }
    for turn in range(options.turns):
        for name, its in turns.items():
            for tree in (first, second) if turn % 2 == 0 else (second, first):
                its[tree].append(answer(working[tree], name))
        found = {"trees": list(trees), "rows": compared(turns)}
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for row in compared(turns):
        print(f"{row['row']:80} {row[f'{first} ms']:.4f} {row[f'{second} ms']:.4f} {row['ratio']:.3f}")
    for process in working.values():
        process.communicate()


if __name__ == "__main__":
    main()
