"""Compile the kernels over cells for targets that are not here; prints one line per target and configuration.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from tests.kernels.ahead import MATRIX_INSTRUCTION, SHARED, TARGETS, TEXT, for_target
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blocksparse.kernels.multiplying.cell_products_triton import Tiles, tiles_for
from blocksparse.kernels.scoring import cell_sums_triton, group_max_triton

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_cells(
    target: GPUTarget,
    kernel: Any,
    dtype: str,
    head_dim: int,
    tiles: Tiles,
    *,
    tma: bool,
    short: bool,
    **sizes: int,
) -> triton.compiler.CompiledKernel:
    constants = {
        "D": head_dim, "GROUP": 16, "CAUSAL": True, "FLIPPED": True, "PER_TOKEN": False, "PADDED": False,
        "TMA": tma, "SHORT": short, "segment": None, "q_last_ptr": None, "k_first_ptr": None,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, **sizes,
    }  # fmt: skip
    if not short:
        constants |= {"q_filler_ptr": None, "k_filler_ptr": None}
    if not tma:
        constants |= {"q_source": None, "k_source": None}
    blocks = {"q_source": tiles.block_m, "k_source": tiles.block_n}
    types = {
        **{f"{name}_ptr": f"*{dtype}" for name in ("q", "k", "q_filler", "k_filler")},
        **{f"{name}_ptr": "*fp32" for name in ("sums", "peak", "total", "best")},
        **{name: f"tensordesc<{dtype}[1, 1, 1, {n}, {tiles.block_k}]>" for name, n in blocks.items()},
        **{f"{name}_strides": ("i32",) * 3 for name in ("q", "k")},
        **{f"{name}_strides": ("i32",) * 2 for name in ("q_last", "k_first")},
        "weight_log2": "fp32",
    }  # fmt: skip
    names = kernel.jit.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    position = {name: i for i, name in enumerate(names)}
    pointers = [name for name, type_ in signature.items() if isinstance(type_, str) and type_.startswith("*")]
    aligned: list[tuple[int, ...]] = [(position[name],) for name in pointers]
    aligned += [(position[f"{name}_strides"], axis) for name in ("q", "k") for axis in range(3)]
    source = ASTSource(
        kernel.jit,
        signature,
        constexprs={(position[name],): value for name, value in constants.items() if name in position},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return triton.compile(source, target=target, options=options)


def main() -> int:
    failed = 0
    kernels = {
        "cell_mass": (cell_sums_triton.sums_of_tiles, {"SLOTS": 8, "WIDE": 16}),
        "group_max": (group_max_triton._kernel, {"SLOTS": 64, "HIGH": 4, "WIDE": 4}),
    }
    for name, target in TARGETS.items():
        for op, (kernel, sizes) in kernels.items():
            for dtype, head_dim, short in for_target(
                name, ("bf16", 128, False), ("fp16", 80, True), ("bf16", 128, True), ("fp32", 64, True)
            ):
                tma = name in ("sm_90", "sm_100") and dtype != "fp32"
                tiles = tiles_for(torch.empty(0, head_dim, dtype=DTYPES[dtype]), tma=tma)
                compiled = compile_cells(target, kernel, dtype, head_dim, tiles, tma=tma, short=short, **sizes)
                found = compiled.asm[TEXT[target.backend]].count(MATRIX_INSTRUCTION[name])
                expected = dtype != "fp32"  # exact fp32 products run on the ordinary units
                failed += (expected and not found) or compiled.metadata.shared > SHARED[name]
                print(
                    f"{name} {op} {dtype} D={head_dim} short={short}: {found} x {MATRIX_INSTRUCTION[name]}, {compiled.metadata.shared} B shared"
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
