"""What the inner loops of Hopper's kernels are made of, as another Triton compiles them for sm_90.

    PYTHONPATH=.triton-3.9.0:src:. python -m tests.kernels.hot_loops
    PYTHONPATH=.triton-3.9.0:src:. python -m tests.kernels.hot_loops --ptxas OTHER/ptxas --options=--regAllocOptLevel=4

Prints for each kernel what ptxas says of registers and spills, and counts the instructions of each loop that multiplies
and has no other loop in it. With `--ptxas` another assembler than Triton's own makes the code. It sees no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from tests.kernels.ahead import triton_target
from tests.kernels.compile_ahead import HEADS, KV_HEADS, TOKENS, pipelines
from tests.kernels.launched import gathered
from triton.backends.nvidia.compiler import get_ptxas

from blocksparse.kernels.common.hardware import TARGETS

CALLS = (("mean_pooling", 64), ("mean_pooling", 128), ("mean_pooling", 256), ("8 bits", 128), ("s2o", 128))
KERNELS = ("sparse_attention_hopper", "int8_attention_hopper", "gather_attention_hopper")
SHOWN = ("HGMMA", "IGMMA", "QGMMA", "LDL", "STL", "MOV", "UMOV", "R2UR", "F2FP", "FMUL", "FFMA", "BAR", "EX2")
BEHIND = "EX2 behind the last wait"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


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


def assembled(ptx: str, ptxas: str, options: list[str], cubin: Path) -> str:
    """What `ptxas` says while it assembles; an older one reads text of its own version."""
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 12" in version:
        ptx = re.sub(r"^\.version 9\..*", ".version 8.7", ptx, flags=re.MULTILINE)
    text = cubin.with_suffix(".ptx")
    text.write_text(ptx)
    command = [ptxas, "-v", "-lineinfo", *options, "--gpu-name=sm_90a", str(text), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill stores", said)
    return f"{registers[-1]} registers, {spilled[-1]} B spilled"


def loops(cubin: Path) -> list[Counter[str]]:
    """Counts of the instructions of each loop that multiplies and contains no other."""
    command = [str(TOOLS / "cuobjdump"), "-sass", str(cubin)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    ends = []
    for at, text in code:
        to = re.search(r"BRA\S*\s+(?:\S+,\s*)?0x([0-9a-f]+)", text)
        if to and int(to[1], 16) < at:
            ends.append((int(to[1], 16), at))
    inner = [x for x in ends if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in ends)]
    counts = []
    for first, last in sorted(inner):
        words = [re.sub(r"^@\S+ ", "", text).split()[0].split(".") for at, text in code if first <= at <= last]
        names = ["MOV" if "MOV" in x[1:] else x[0] for x in words]  # IMAD.MOV
        if any("GMMA" in name for name in names):
            waits = [i for i, x in enumerate(words) if x[:2] == ["WARPGROUP", "DEPBAR"]]
            powers = [i for i, x in enumerate(words) if x[:2] == ["MUFU", "EX2"]]
            behind = {"EX2": len(powers), BEHIND: sum(i > max(waits, default=0) for i in powers)}
            counts.append(Counter(names) | Counter(behind))
    return counts


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
            for counts in loops(cubin):
                shown = ", ".join(f"{counts[x]} {x}" for x in SHOWN if counts[x])
                total = counts.total() - counts["EX2"] - counts[BEHIND]
                print(f"  a loop of {total} instructions: {shown}, {counts[BEHIND]} {BEHIND}")
    return 0


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
