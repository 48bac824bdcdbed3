"""What the inner loops of Hopper's kernels are made of, as another Triton compiles them for sm_90.

    PYTHONPATH=.triton-3.9.0:src:. python -m tests.kernels.hot_loops
    PYTHONPATH=.triton-3.9.0:src:. python -m tests.kernels.hot_loops --ptxas OTHER/ptxas --options=--regAllocOptLevel=4

Prints for each kernel what ptxas says of registers and spills, and counts the instructions of each loop that multiplies
and has no other loop in it. With `--ptxas` another assembler than Triton's own makes the code. It sees no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from blocksparse.kernels.common.hardware import TARGETS
from tests.kernels.ahead import triton_target
from tests.kernels.compile_ahead import HEADS, KV_HEADS, TOKENS, pipelines
from tests.kernels.launched import gathered
from tests.kernels.machine_code import BEHIND, assembled, loops, machine_code

CALLS = (("mean_pooling", 64), ("mean_pooling", 128), ("mean_pooling", 256), ("8 bits", 128), ("s2o", 128))
KERNELS = ("sparse_attention_hopper", "int8_attention_hopper", "gather_attention_hopper")
SHOWN = ("HGMMA", "IGMMA", "QGMMA", "LDL", "STL", "MOV", "UMOV", "R2UR", "F2FP", "FMUL", "FFMA", "BAR", "EX2")


def kernels() -> dict[str, Any]:
    """The attention kernels of these calls, as Triton compiled them."""
    found = {}
    for title, head_dim in CALLS:
        with gathered("sm_90", hopper=True) as launched:
            sizes = (HEADS, KV_HEADS, KV_HEADS)
            q, k, v = (torch.zeros(1, heads, TOKENS, head_dim, dtype=torch.bfloat16) for heads in sizes)
            pipelines(TARGETS["sm_90"])[title](q, k, v)
        for variant in launched.values():
            if variant.name.partition(".")[0] in KERNELS:
                found[f"{title}, D={head_dim}"] = variant.compiled(triton_target(TARGETS["sm_90"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptxas", default=get_ptxas(90).path)
    parser.add_argument(
        "--options", nargs="*", default=["--regAllocOptLevel=2"], help="Triton 3.7 to 3.9 give this"
    )
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    print(f"Triton {triton.__version__}, {args.ptxas} {' '.join(args.options)}")
    with tempfile.TemporaryDirectory() as folder:
        for title, kernel in kernels().items():
            cubin = Path(folder) / "kernel.cubin"
            print(f"{title}: {assembled(kernel.asm['ptx'], args.ptxas, args.options, cubin)}")
            for counts in loops(machine_code(cubin)):
                shown = ", ".join(f"{counts[x]} {x}" for x in SHOWN if counts[x])
                total = counts.total() - counts["EX2"] - counts[BEHIND]
                print(f"  a loop of {total} instructions: {shown}, {counts[BEHIND]} {BEHIND}")
    return 0


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
