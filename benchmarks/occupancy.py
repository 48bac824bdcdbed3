"""What tiles of the portable attention kernel would come to on GPUs that are not here, by a model.

    python -m benchmarks.occupancy --json docs/evidence/tiles.json

Compiles the kernel with many tiles for each GPU below, reads registers and shared memory from the compiler, and
prints a table. docs/evidence/tiles.md has it, and explains the model; nothing here is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tests.kernels.ahead import report_of, triton_target
from tests.kernels.launched import gathered

import blocksparse as bs
from blocksparse.kernels.common.hardware import TARGETS, Hardware
from blocksparse.kernels.common.tiles import TritonTiles, portable


class Rates(NamedTuple):
    """What a multiprocessor does per clock, by its vendor's documents; bytes of L2 are a share of the GPU's."""

    gpu: str
    peak: float  # TFLOP/s of dense products of bf16 with sums in fp32
    products: int  # floating-point operations of such products
    shared: int  # bytes read from shared memory
    l2: int  # bytes
    fp32: int  # operations of fp32
    exponentials: int
    schedulers: int = 4


# GA102 and Ampere's tuning guide; CDNA 3's white paper and instruction set.
RATES = {
    "sm_86": Rates("A10", 125, 1024, 128, 20, 128, 16),
    "gfx942": Rates("MI300X", 1307, 2048, 128, 54, 128, 16),
}
CANDIDATES = [
    TritonTiles(m, n, warps, stages)
    for m, n, warps in (
        (128, 128, 8), (128, 64, 8), (128, 64, 4), (128, 32, 8), (128, 32, 4),
        (64, 64, 8), (64, 64, 4), (64, 32, 8), (64, 32, 4), (32, 32, 4),
    )
    for stages in (1, 2)
]  # fmt: skip


def programs(has: Hardware, shared: int, registers: int, warps: int) -> int:
    """How many programs a multiprocessor holds at a time."""
    threads = warps * has.warp
    reserved = 1024 if has.is_nvidia else 0  # of each program, by CUDA
    by_registers = has.registers // (-(-registers // 8) * 8 * threads)
    by_memory = has.shared_per_sm // (shared + reserved) if shared <= has.shared else 0
    return min(by_registers, by_memory, has.threads // threads)


def clocks(rates: Rates, tiles: TritonTiles, D: int) -> dict[str, float]:
    """Clocks that each unit of a multiprocessor needs for one program and one tile of keys, in half precision.

    Every warp reads the whole tile of keys and of values from shared memory. A pair takes some 8 operations of
    fp32 and one exponential, and what is accumulated is rescaled.
    """
    pairs, loaded = tiles.block_m * tiles.block_n, 2 * tiles.block_n * D * 2
    return {
        "products": 4 * pairs * D / rates.products,
        "shared": tiles.num_warps * loaded / rates.shared,
        "l2": loaded / rates.l2,
        "fp32": (8 * pairs + tiles.block_m * D) / rates.fp32,
        "exponentials": pairs / rates.exponentials,
    }


def modelled(name: str, tiles: TritonTiles, D: int, report: dict[str, Any]) -> dict[str, Any]:
    """What the model makes of a compiler's report.

    The warps of a scheduler overlap: a step takes as long as its busiest unit, or as all units one after another
    shared among those warps, whichever is longer.
    """
    has, rates = TARGETS[name], RATES[name]
    at_once = programs(has, report["shared"], report["registers"], tiles.num_warps)
    needs = clocks(rates, tiles, D)
    overlapping = max(at_once * tiles.num_warps / rates.schedulers, 1)
    step = max(max(needs.values()), sum(needs.values()) / overlapping)
    share = needs["products"] / step if at_once and not report["spills"] else 0.0
    return {
        "target": name, "D": D, "tiles": repr(tiles), **report, "programs": at_once,
        "warps": at_once * tiles.num_warps, "share": round(share, 2), "TFLOP/s": round(share * rates.peak),
    }  # fmt: skip


def compiled(name: str, tiles: TritonTiles, D: int) -> Any:
    """The kernel in bf16 with these tiles, for blocks of 128."""
    q, k, v = (torch.zeros(1, heads, 4096, D, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with gathered(name) as launched, torch.no_grad():
        bs.mean_pooling(executor=bs.TritonExecutor(tiles))(q, k, v)
    (kernel,) = (x for x in launched.values() if x.name == "sparse_attention_triton._kernel")
    return kernel.compiled(triton_target(TARGETS[name]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(RATES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.targets:
        for D in (64, 128, 256):
            taken = {portable(block, block, D, 2, TARGETS[name]) for block in (64, 128)}
            for tiles in (*CANDIDATES, *(taken - set(CANDIDATES))):
                row = modelled(name, tiles, D, report_of(compiled(name, tiles, D))) | {"taken": tiles in taken}
                rows.append(row)
                print(json.dumps(row), flush=True)
    if args.json:
        said = {"triton": triton.__version__, "rates": {k: v._asdict() for k, v in RATES.items()}, "rows": rows}
        args.json.write_text(json.dumps(said, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
