"""The same calls compiled by several versions of Triton, in one run:

    python -m benchmarks.triton_versions installed 3.9=/folder/with/triton-3.9 --out build/triton-versions.json

A process for each version compiles the calls and checks them against float64, all processes at once. Then they
take turns on the GPU: each times all its calls while the others wait, and again, round after round. Printed are
milliseconds of the first version, and the others' times over it.

Two processes with the same machine code differ by up to 7 %, since their memory lies elsewhere. With `--processes`
each version gets several, one after another, and how far those of the first lie apart is printed, too.

`--compile` ends before the turns: Triton's cache is then filled. `--variables` sets some of a version's process,
and `--only` takes a part of the calls, to find out what makes a difference:

    python -m benchmarks.triton_versions 3.9=FOLDER x=FOLDER --only D=256 --variables x PTXAS_OPTIONS=-O2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import FULL
from benchmarks.eight_bit_tables import TOLERANCE, executor_call, int8_kernel_call
from benchmarks.gather_tables import gather_call, portable_gather_call, random_maps
from benchmarks.inputs import Case
from benchmarks.peers import OURS, PORTABLE, kernel_call, portable_call
from benchmarks.report import Row
from benchmarks.timing import check, medians, reason
from blocksparse.kernels.attention.gather_attention import gather_attention

# Head dim, block of queries and of keys, share of the blocks: of the tables `rates`, `blocks` and `wide`.
RATES = (
    (128, 128, 128, 0.3),
    (128, 128, 128, 0.1),
    (64, 128, 128, 0.1),
    (256, 128, 128, 0.1),
    (128, 128, 64, 0.1),
    (128, 64, 64, 0.1),
)
EIGHT_BITS = 0.1  # share of the blocks in the table `eight_bit`

Checked = Iterator[tuple[str, Callable[[], Tensor], Callable[[Tensor], None]]]
"""A call's name, the call, and what raises where its output is wrong."""


def rates(N: int, device: torch.device) -> Checked:
    """Hopper's and the portable kernel, where there is one, and 8 bits."""
    for D, q_block, k_block, density in RATES:
        case = Case(N, FULL.Hq, FULL.Hkv, D, q_block, k_block, density, FULL.dtype)
        q, k, v = case.inputs(device)
        mask = case.mask(q, k)
        for name, build in {OURS: kernel_call, PORTABLE: portable_call}.items():
            what = f"{name}, D={D}, blocks of {q_block} and {k_block}, {density:.0%}"
            yield what, build(q, k, v, mask), partial(check, q=q, k=k, v=v, mask=mask)
        if (D, q_block, k_block, density) == (FULL.D, *FULL.blocks[0], EIGHT_BITS):
            for values, build_call in product(TOLERANCE, (executor_call, int8_kernel_call)):
                what = f"8 bits, {values} {'call' if build_call is executor_call else 'kernel'}"
                near = partial(check, q=q, k=k, v=v, mask=mask, tolerance=2 * TOLERANCE[values])
                yield what, build_call(q, k, v, mask, values == "fp8"), near


def gathers(N: int, device: torch.device) -> Checked:
    """Keys through index maps, as in the table `gather`."""
    sizes = (FULL.Hq, FULL.Hkv, FULL.Hkv)
    q, k, v = (torch.randn(1, heads, N, FULL.D, device=device, dtype=FULL.dtype) for heads in sizes)
    permutation = random_maps(N, FULL.Hkv, FULL.segment, min(N, 2048), device)
    scores = bs.NoScorer(FULL.blocks[0][0])(q, k, permutation, bs.AttentionSpec(scale=FULL.D**-0.5))
    mask = bs.Ranked(bs.Everything())(scores)
    verify = partial(check, q=q, k=k, v=v, mask=mask)
    yield "gather", gather_call(gather_attention, q, k, v, mask), verify
    yield "portable gather", portable_gather_call(q, k, v, mask), verify


def calls(N: int, device: torch.device) -> Checked:
    """Whole calls of the presets of the table `calls`, sparse at any length."""
    q, k, v = FULL.inputs(N, device)
    for preset in FULL.presets:
        if preset.automatic:
            pipeline = FULL.pipeline(preset, sparse=True)
            mask = pipeline.trace(q, k, v).visited
            yield f"call of {preset.name}", partial(pipeline, q, k, v), partial(check, q=q, k=k, v=v, mask=mask)


def work(N: int, only: list[str]) -> None:
    """One version's process: says when it is ready, then times its calls once for each line that it reads.

    Those in whose names one of the words `only` stands; all if there is no word.
    """
    import triton

    device = torch.device("cuda")
    torch.manual_seed(0)
    ready: dict[str, Callable[[], Tensor]] = {}
    missing: dict[str, str] = {}
    for group in (rates, gathers, calls):
        name = group.__name__
        try:
            for name, call, verify in group(N, device):
                if not only or any(word in name for word in only):
                    verify(call())
                    ready[name] = call
        except Exception as error:  # the other groups are still worth having
            missing[name] = reason(error)
    print(json.dumps({"triton": triton.__version__, "calls": list(ready), "missing": missing}), flush=True)
    for line in sys.stdin:
        figures = medians(ready, device=device, budget_ms=float(line))
        print(json.dumps({name: figure.ms for name, figure in figures.items()}), flush=True)


def start(folder: str, variables: dict[str, str], N: int, only: list[str]) -> subprocess.Popen[str]:
    """A process that finds Triton in this folder first."""
    paths = [x for x in (folder, os.environ.get("PYTHONPATH")) if x]
    code = "import torch; torch.set_grad_enabled(False); from benchmarks.triton_versions import work; "
    code += f"work({N}, {only!r})"
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def answer(process: subprocess.Popen[str]) -> Any:
    """The next line of a process, as JSON."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a version's process ended before it answered")
    return json.loads(line)


def compared(rounds: dict[str, list[list[dict[str, float]]]]) -> list[Row]:
    """A row for each call: milliseconds by version, each over the first's, and what processes differ by.

    `rounds` has a list for each version: for each of its processes what it measured, round by round. Processes
    that ran at the same time are compared round by round, since the clock of a GPU moves.
    """
    first = next(iter(rounds))
    rows = []
    for name in rounds[first][0][0]:
        by_process = {
            version: [statistics.median(x[name] for x in its) for its in processes]
            for version, processes in rounds.items()
            if name in processes[0][0]
        }
        over = {
            version: statistics.median(
                x[name] / y[name]
                for its, others in zip(rounds[version], rounds[first], strict=True)
                for x, y in zip(its, others, strict=True)
            )
            for version in by_process
        }
        ms = {version: statistics.median(x) for version, x in by_process.items()}
        spread = max(by_process[first]) / min(by_process[first])
        rows.append({"call": name, "ms": ms, "over": over, "by_process": by_process, "spread": spread})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="NAME[=FOLDER]")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="of each version, one after another")
    parser.add_argument("--budget", type=float, default=30.0, help="milliseconds spent on a call in a round")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="calls in whose names one of these stands"
    )
    parser.add_argument(
        "--variables", nargs="+", action="append", default=[], metavar=("NAME", "VARIABLE=VALUE"),
        help="of the environment of one version's process; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("build/triton-versions.json"))
    arguments = parser.parse_args()
    variables = {name: dict(x.split("=", 1) for x in given) for name, *given in arguments.variables}
    rounds: dict[str, list[list[dict[str, float]]]] = {name.partition("=")[0]: [] for name in arguments.versions}
    for _ in range(arguments.processes):
        processes = {
            name: start(folder, variables.get(name, {}), arguments.tokens, arguments.only)
            for name, _, folder in (x.partition("=") for x in arguments.versions)
        }
        said = {name: answer(process) for name, process in processes.items()}
        print(json.dumps({name: {**x, "calls": len(x["calls"])} for name, x in said.items()}), flush=True)
        for turn in range(0 if arguments.compile else arguments.rounds):
            for name in list(processes)[:: 1 if turn % 2 else -1]:
                stdin = processes[name].stdin
                assert stdin is not None
                print(arguments.budget, file=stdin, flush=True)
                measured = answer(processes[name])
                rounds[name] += [[]] if turn == 0 else []
                rounds[name][-1].append(measured)
            rows = compared(rounds)
            result = {
                "GPU": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "versions": said,
                "rows": rows,
            }
            result |= {"variables": variables} if variables else {}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({**result, "rounds": rounds}, indent=1) + "\n")
        for process in processes.values():
            process.communicate()
    if not arguments.compile:
        first = next(iter(rounds))
        for row in rows:
            others = " ".join(f"{name} {x:.3f}" for name, x in row["over"].items() if name != first)
            apart = "" if arguments.processes == 1 else f"; processes of {first} differ by {row['spread'] - 1:.1%}"
            print(f"{row['call']}: {row['ms'][first]:.3f} ms; {others}{apart}")


if __name__ == "__main__":
    main()
