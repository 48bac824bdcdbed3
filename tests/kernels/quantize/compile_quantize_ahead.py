"""Compile the kernels that round to 8 bits for targets that are not here; one line per kernel and target.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import sys
from typing import Any

from triton.backends.compiler import GPUTarget

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.quantize import tile_operands_triton, tile_rotation_triton, tokens_triton
from tests.kernels.ahead import ITEMSIZE, SHARED, TARGETS, for_target, multiplies_only
from tests.kernels.order.compile_pooling_ahead import compile_kernel

_INDEX = {"index_ptr": "*i32", "index_strides": ("i32",) * 2}
_NO_INDEX = {"index_ptr": None, "index_strides": None}


def compiled(
    kernel: Any, target: GPUTarget, types: dict[str, Any], constants: dict[str, Any], warps: int, **options: int
) -> Any:
    """Arguments whose type is None are None."""
    given = {name: type_ for name, type_ in types.items() if type_ is not None}
    absent = {name: None for name, type_ in types.items() if type_ is None}
    return compile_kernel(kernel, target, given, {**absent, **constants}, num_warps=warps, **options)


def int8(target: GPUTarget, dtype: str, head_dim: int, *, queries: bool, indexed: bool, shared: bool) -> int:
    """Queries with what smoothing takes, or smoothed keys and plain ones; bytes of shared memory."""
    module, block_d = tokens_triton, power_of_2(head_dim)
    rows, warps = module.tile_of(head_dim, 128 if shared else 0)
    types = {
        "x_ptr": f"*{dtype}", "values_ptr": "*i8", "scales_ptr": "*fp32", "mean_ptr": "*fp32",
        "taken_ptr": "*fp32" if queries else None, "plain_ptr": "*i32" if queries else None,
        "x_strides": ("i32",) * 3, "plain_strides": ("i32",) * 2 if queries else None, "factor": "fp32",
        **(_INDEX if indexed else _NO_INDEX),
    }  # fmt: skip
    constants = {
        "D": head_dim, "BLOCK_D": block_d, "STEP": 128 if shared else rows, "ROWS": rows, "BLOCK": 128,
        "SHARED": shared, "COPIES": 1 if queries else 2,
        "HEADS_PER_SOURCE": 1, "HEADS_PER_MEAN": 4 if queries else 1,
    }  # fmt: skip
    return int(compiled(module._int8_tokens_kernel, target, types, constants, warps).metadata.shared)


def fp8(target: GPUTarget, dtype: str, head_dim: int, *, indexed: bool) -> int:
    """Values; bytes of shared memory."""
    types = {
        "x_ptr": f"*{dtype}", "values_ptr": "*u8", "scales_ptr": "*fp32", "x_strides": ("i32",) * 3,
        **(_INDEX if indexed else _NO_INDEX),
    }  # fmt: skip
    constants = {
        "D": head_dim, "BLOCK_D": power_of_2(head_dim), "ROWS": tokens_triton.rows_of(head_dim),
        "HARDWARE": target.arch in (90, 100),
    }  # fmt: skip
    return int(compiled(tokens_triton._fp8_values_kernel, target, types, constants, 4).metadata.shared)


def tile_operands(target: GPUTarget, dtype: str, head_dim: int, *, indexed: bool, tile: int) -> dict[str, Any]:
    """Queries, keys and values in tiles, compiled, by name; smoothed where indexed."""
    module, cuda = tile_operands_triton, target.backend == "cuda"
    common = {"x_ptr": f"*{dtype}", "x_strides": ("i32",) * 3, **(_INDEX if indexed else _NO_INDEX)}
    rotated = {**common, "mean_ptr": "*fp32" if indexed else None, "values_ptr": "*i8", "root": "fp32"}
    queries = {**rotated, "scale_ptr": "*fp32", "taken_ptr": rotated["mean_ptr"], "factor": "fp32"}
    keys = {**rotated, **dict.fromkeys(("tile_scale_ptr", "token_scale_ptr"), "*fp32")}
    values = {**common, "values_ptr": "*i32", **dict.fromkeys(("tile_log2_ptr", "of_tokens_ptr"), "*fp32")}
    hardware = {"HARDWARE": target.arch in (90, 100), "mean_ptr": None, "heads_per_mean": 1}
    found = {}
    for name, kernel, types, own in (
        ("queries", tile_rotation_triton.query_kernel, queries, {"heads_per_mean": 4}),
        ("keys", tile_rotation_triton.key_kernel, keys, {"TILE": tile}),
        ("values", tile_operands_triton.value_kernel, values, {"TILE": tile, **hardware}),
    ):
        rows, warps = module.rows_of(head_dim, rotates=name != "values", queries=name == "queries")
        constants = {"D": head_dim, "ROWS": rows, **own}
        options = module.options_of(warps, ITEMSIZE[dtype], cuda=cuda)
        found[name] = compiled(kernel, target, types, constants, options.pop("num_warps"), **options)
    return found


def main() -> int:
    failed = 0
    for name, target in TARGETS.items():
        for dtype, head_dim, indexed in for_target(name, ("bf16", 128, True), ("fp32", 80, False)):
            shared = [fp8(target, dtype, head_dim, indexed=indexed)]  # sm_80 has no instruction for it
            if not multiplies_only(name):
                shared += [
                    int8(target, dtype, head_dim, queries=queries, indexed=indexed, shared=block)
                    for queries in (False, True)
                    for block in (False, True)
                ]
            failed += max(shared) > SHARED[name]
            print(f"{name} int8_tokens, fp8_values {dtype} D={head_dim} indexed={indexed}: {max(shared)} B shared")
        # Only Hopper has a kernel that reads these.
        for dtype, head_dim in (("bf16", 128), ("fp16", 64), ("fp32", 128)) if name == "sm_90" else ():
            for indexed, tile in ((False, 64), (True, 128)):
                kernels = tile_operands(target, dtype, head_dim, indexed=indexed, tile=tile)
                bytes_ = max(int(kernel.metadata.shared) for kernel in kernels.values())
                failed += bytes_ > SHARED[name]
                print(
                    f"{name} tile_operands {dtype} D={head_dim} tile={tile} indexed={indexed}: {bytes_} B shared"
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
