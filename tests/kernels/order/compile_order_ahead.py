"""Compile the kernels of coarse orders for targets that are not here; one line per kernel and target.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import sys
from typing import Any

from triton.backends.compiler import GPUTarget

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.order import coarse_order_triton, coarse_steps_triton
from blocksparse.kernels.order.coarse_order import SAMPLED, STEPS
from blocksparse.kernels.order.coarse_steps_triton import options_of_scores
from tests.kernels.ahead import (
    HARDWARE,
    ITEMSIZE,
    MATRIX_INSTRUCTION,
    SHARED,
    TARGETS,
    TEXT,
    for_target,
    multiplies_only,
)
from tests.kernels.order.compile_pooling_ahead import compile_kernel

ALIGNED = ("S", "width")  # sizes that are multiples of 16


def scores(name: str, target: GPUTarget, dtype: str, head_dim: int) -> int:
    failed, block_d = 0, max(16, power_of_2(head_dim))
    for kernel, own in (
        (coarse_steps_triton._range, {"SHARE": coarse_steps_triton.RANGE_SHARE, "SAMPLED": SAMPLED}),
        (coarse_steps_triton._steps, {"SHARE": coarse_steps_triton.SHARE, "STEPS": STEPS}),
    ):
        options = options_of_scores(head_dim, ITEMSIZE[dtype], HARDWARE[name])
        block = {key: options.pop(key) for key in ("BLOCK_M", "BLOCK_N")}
        types: dict[str, Any] = {
            **dict.fromkeys(("mean_ptr", "k_ptr"), f"*{dtype}"), **dict.fromkeys(("parts_ptr", "range_ptr"), "*fp32"),
            "steps_ptr": "*u8", **dict.fromkeys(("mean_strides", "k_strides"), ("i32",) * 3),
        }  # fmt: skip
        constants = {"D": head_dim, "BLOCK_D": block_d, **block, **own}
        compiled = compile_kernel(kernel, target, types, constants, ALIGNED, **options)
        found = compiled.asm[TEXT[target.backend]].count(MATRIX_INSTRUCTION[name])
        expected = dtype != "fp32"  # exact fp32 products run on the ordinary units
        failed += (expected and not found) or compiled.metadata.shared > SHARED[name]
        print(
            f"{name} {kernel.jit.__name__} {dtype} D={head_dim}: {found} x {MATRIX_INSTRUCTION[name]}, {compiled.metadata.shared} B shared"
        )
    return failed


def orders(name: str, target: GPUTarget) -> None:
    module = coarse_order_triton
    types: dict[str, Any] = {
        **dict.fromkeys(("words_ptr", "kept_ptr", "numbers_ptr", "out_ptr"), "*i32"),
        "out_strides": ("i32",) * 3,
    }  # fmt: skip
    for kernel, constants, warps in (
        (coarse_steps_triton.choose, {"TILE": coarse_steps_triton.TILE, "SAMPLE": coarse_steps_triton.SAMPLE}, 8),
        (module._count, {"STEPS": STEPS, "WIDE": module.WIDE}, 1),
        (module._order, {"STEPS": STEPS, "NARROW": module.NARROW, "PIECE": module.PIECE}, 1),
    ):
        signature = {key: types[key] for key in types if key in kernel.jit.arg_names}
        compiled = compile_kernel(kernel, target, signature, constants, ALIGNED, num_warps=warps)
        print(f"{name} {kernel.jit.__name__}: {compiled.metadata.shared} B shared")


def queries(name: str, target: GPUTarget, dtype: str, head_dim: int) -> int:
    module, block_d = coarse_order_triton, power_of_2(head_dim)
    types: dict[str, Any] = {
        "q_ptr": f"*{dtype}", **dict.fromkeys(("guide_ptr", "mean_ptr", "products_ptr"), "*fp32"),
        "q_strides": ("i32",) * 3,
    }  # fmt: skip
    failed = 0
    for S in (256, 1024):
        constants = {"D": head_dim, "BLOCK_D": block_d, "S": S, "ROWS": module.rows_of(S, block_d)}
        compiled = compile_kernel(module._mean_and_products_kernel, target, types, constants, num_warps=4)
        failed += compiled.metadata.shared > SHARED[name]
        print(f"{name} mean_and_products {dtype} D={head_dim} S={S}: {compiled.metadata.shared} B shared")
    return failed


def main() -> int:
    failed = 0
    for name, target in TARGETS.items():
        for dtype, head_dim in for_target(name, ("bf16", 128), ("fp16", 80), ("fp32", 64)):
            failed += scores(name, target, dtype, head_dim)
        for dtype, head_dim in for_target(name, ("bf16", 128), ("fp32", 80), ("bf16", 256)):
            failed += queries(name, target, dtype, head_dim)
        if not multiplies_only(name):
            orders(name, target)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
