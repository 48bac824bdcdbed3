"""Which tiles are fastest, by head dim and block shape: `python -m benchmarks.tune`.

What `kernels/common/tiles.py` holds comes from here. Each candidate is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

import blocksparse as bs
from benchmarks.cases import FULL
from benchmarks.inputs import Case
from benchmarks.kernel_tables import density_of, pairs_kept
from benchmarks.peers import kernel_call
from benchmarks.timing import Candidate, check, measure, release
from blocksparse.kernels.common.hardware import is_hopper
from blocksparse.kernels.common.tiles import Tiles

BLOCKS = ((128, 128), (128, 64), (64, 64))


def candidates(device: torch.device) -> list[Tiles]:
    """Tiles worth trying; those that do not fit a shape say so."""
    portable: list[Tiles] = [
        bs.TritonTiles(m, n, warps, stages)
        for (m, n), warps, stages in itertools.product(((128, 128), (128, 64), (64, 64)), (4, 8), (2, 3, 4))
    ]
    if not is_hopper(device):
        return portable
    hopper: list[Tiles] = [
        bs.HopperTiles(consumers, n, stages, per_sm)
        for consumers, n, stages, per_sm in itertools.product((2, 1), (128, 64), (2, 3, 4), (1, 2, 3))
        if per_sm == 1 or consumers == 1
    ]
    return [*hopper, *portable]


def tune(case: Case, device: torch.device, budget_ms: float) -> dict[str, Any]:
    """TFLOP/s of every candidate, the fastest first."""
    release(device)
    q, k, v = case.inputs(device)
    mask = case.mask(q, k)
    verify = partial(check, q=q, k=k, v=v, mask=mask)
    calls = {
        repr(tiles): Candidate(partial(kernel_call, q, k, v, mask, tiles=tiles), verify)
        for tiles in candidates(device)
    }
    figures = measure(calls, device=device, budget_ms=budget_ms)
    tflop = 4e-12 * case.D * pairs_kept(mask)
    rates = {name: tflop / figure.ms * 1e3 for name, figure in figures.items() if figure.ms is not None}
    best = dict(sorted(rates.items(), key=lambda item: -item[1]))
    shape = {"N": case.N, "D": case.D, "q_block": case.q_block, "k_block": case.k_block}
    return {**shape, "density": density_of(mask), "tflops": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    device, rows = torch.device("cuda"), []
    for D in arguments.head_dims:
        for q_block, k_block in BLOCKS:
            case = Case(
                arguments.tokens, FULL.Hq, FULL.Hkv, D, q_block, k_block, arguments.density, torch.bfloat16
            )
            rows.append(tune(case, device, budget_ms=30.0))
            first = itertools.islice(rows[-1]["tflops"].items(), 4)
            print(f"D={D} {q_block}x{k_block}: " + ", ".join(f"{x} {y:.0f}" for x, y in first), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with torch.no_grad():
        main()
