"""Compile the kernels that order and pool tokens for targets that are not here; one line per kernel and target.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.layout import gather_triton
from blocksparse.kernels.masks import blocks_triton
from blocksparse.kernels.order import segments_triton
from blocksparse.kernels.score import block_mean_triton
from tests.kernels.ahead import (
    HARDWARE,
    ITEMSIZE,
    MATRIX_INSTRUCTION,
    SHARED,
    TARGETS,
    TEXT,
    for_target,
    fp32_products,
    multiplies_only,
)


def compile_kernel(
    kernel: Any,
    target: GPUTarget,
    types: dict[str, Any],
    constants: dict[str, Any],
    aligned: tuple[str, ...] = (),
    /,
    **options: int,
) -> Any:
    """Pointers and strides are multiples of 16, as those of whole tensors are, and `aligned` sizes; others any int32."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.jit.arg_names
    }
    position = {name: i for i, name in enumerate(kernel.jit.arg_names)}
    multiples: list[tuple[int, ...]] = [
        (position[name],)
        for name, type_ in signature.items()
        if name in aligned or (isinstance(type_, str) and type_.startswith("*"))
    ]
    multiples += [
        (position[name], axis)
        for name, type_ in signature.items()
        if isinstance(type_, tuple)
        for axis in range(len(type_))
    ]
    source = ASTSource(
        kernel.jit,
        signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={path: [["tt.divisibility", 16]] for path in multiples},
    )
    return triton.compile(source, target=target, options=options)


def importance(name: str, target: GPUTarget, dtype: str, head_dim: int) -> int:
    failed, tma = 0, name in ("sm_90", "sm_100")
    module, block_d = segments_triton, max(16, power_of_2(head_dim))
    for kernel, options_of, own in (
        (module._sums, module.options_of_sums, {}),
        (module._weights, module.options_of_weights, {"SPLITS": 32}),
    ):
        options = options_of(head_dim, ITEMSIZE[dtype], HARDWARE[name])
        block = {key: options.pop(key) for key in ("BLOCK_M", "BLOCK_N")}
        keys = f"tensordesc<{dtype}[1, 1, {block['BLOCK_N']}, {block_d}]>" if tma else f"*{dtype}"
        types = {
            "q_ptr": f"*{dtype}", "k_source": keys, "scale": "fp32", "mean": "fp32",
            **dict.fromkeys(("peak_ptr", "total_ptr", "out_ptr"), "*fp32"),
            **dict.fromkeys(("q_strides", "k_strides"), ("i32",) * 3),
        }  # fmt: skip
        constants: dict[str, Any] = {"D": head_dim, "BLOCK_D": block_d, "CAUSAL": True, "TMA": tma, **block, **own}
        constants["PRECISION"] = fp32_products(target)
        compiled = compile_kernel(kernel, target, types, constants, **options)
        found = compiled.asm[TEXT[target.backend]].count(MATRIX_INSTRUCTION[name])
        expected = (
            dtype != "fp32" or target.backend == "cuda"
        )  # elsewhere fp32 is multiplied by the ordinary units
        failed += (expected and not found) or compiled.metadata.shared > SHARED[name]
        print(
            f"{name} {kernel.jit.__name__} {dtype} D={head_dim}: {found} x {MATRIX_INSTRUCTION[name]}, {compiled.metadata.shared} B shared"
        )
    return failed


def others(name: str, target: GPUTarget, dtype: str, head_dim: int) -> None:
    block_d, strides = power_of_2(head_dim), {f"{x}_strides": ("i32",) * 3 for x in "xy"}
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "x_out_ptr", "y_out_ptr"), f"*{dtype}")
    types: dict[str, Any] = {**pointers, **strides, "index_ptr": "*i32", "index_strides": ("i32",) * 2}
    in_part = {"wanted_ptr": "*i1", "wanted_strides": ("i32",) * 2}
    for two, scatter, wanted in ((True, False, False), (True, False, True), (False, True, False)):
        constants = {
            "DX": head_dim, "DY": head_dim, "BLOCK_DX": block_d, "BLOCK_DY": block_d, "ROWS": 8192 // block_d,
            "BLOCK": 128, "TWO": two, "SCATTER": scatter, **({} if wanted else dict.fromkeys(in_part)),
        }  # fmt: skip
        given = types | in_part if wanted else types
        compile_kernel(gather_triton._gather_rows_kernel, target, given, constants, num_warps=4)
    cache: dict[str, Any] = dict.fromkeys(("keys_ptr", "values_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    cache |= {"pages_ptr": "*i32", **{f"{x}_strides": ("i32",) * 4 for x in ("keys", "values")}}
    cache |= {f"{x}_strides": ("i32",) * 2 for x in "kv"}
    paged = {"PAGE": 16, "D": head_dim, "DV": head_dim, "BLOCK_D": block_d, "BLOCK_DV": block_d}
    compile_kernel(
        gather_triton._gather_pages_kernel, target, cache, paged | {"ROWS": 8192 // block_d}, num_warps=4
    )
    types = {**types, "centre_ptr": "*fp32", "out_ptr": "*fp32"}
    types |= {"number_ptr": "*fp32", "bound_ptr": "*fp64"}
    for similarity in (False, True):
        of_all_heads: dict[str, Any] = (
            dict.fromkeys(("number_ptr", "bound_ptr", "bound_stride")) if similarity else {}
        )
        constants = {
            "D": head_dim, "BLOCK_D": block_d, "BLOCK": 128, "ROWS": 1024 // block_d,
            "PADDED": False, "INDEXED": similarity, "CENTRED": similarity, "SIMILARITY": similarity, **of_all_heads,
        }  # fmt: skip
        compile_kernel(block_mean_triton._kernel, target, types, constants, num_warps=1)
    types = {
        "q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "q_out_ptr": "*fp32", "k_out_ptr": "*fp32", "k_index_ptr": "*i32",
        "q_strides": ("i32",) * 3, "k_strides": ("i32",) * 3, "k_index_strides": ("i32",) * 2,
    }  # fmt: skip
    constants = {
        "D": head_dim, "BLOCK_D": block_d, "Q_BLOCK": 128, "K_BLOCK": 64, "Q_ROWS": 1024 // block_d,
        "K_ROWS": 1024 // block_d, "PADDED": False,
    }  # fmt: skip
    in_order: dict[str, Any] = dict.fromkeys(("q_index_ptr", "q_index_strides"))
    compile_kernel(block_mean_triton._both, target, types, {**constants, **in_order}, num_warps=1)
    print(f"{name} gather_rows, gather_pages, block_mean {dtype} D={head_dim}")


def orders(name: str, target: GPUTarget) -> None:
    types: dict[str, Any] = {"values_ptr": "*fp32", "index_ptr": "*i32"}
    for S, rows, warps in for_target(name, (256, 1, 1), (64, 4, 1), (1024, 1, 4)):
        for coarse in (False, True):
            constants = {"S": S, "ROWS": rows, "COARSE": coarse, "PARTS": 1 if coarse else 6}
            compile_kernel(segments_triton._segment_sort_kernel, target, types, constants, num_warps=warps)
    types = {
        **{f"{side}{name}_ptr": "*i32" for side in "qk" for name in ("", "_first", "_last")}, "k_whole_ptr": "*i1",
        "q_made_ptr": "*i32", "k_made_ptr": "*i32", "q_strides": ("i32",) * 3, "k_strides": ("i32",) * 3,
    }  # fmt: skip
    constants = {
        "Q_BLOCK": 128,
        "K_BLOCK": 64,
        "Q_WIDE": 128,
        "K_WIDE": 64,
        "TILE": 2048,
        "Q_COPIES": 1,
        "K_COPIES": 4,
    }
    given, in_order = {"k_made_ptr": None}, dict.fromkeys(("q_ptr", "q_strides", "k_ptr", "k_strides"))
    for missing in (given, in_order):
        compile_kernel(blocks_triton._block_bounds_kernel, target, types, {**constants, **missing}, num_warps=4)
    print(f"{name} segment_sort, block_bounds")


def main() -> int:
    failed = 0
    for name, target in TARGETS.items():
        for dtype, head_dim in for_target(name, ("bf16", 128), ("bf16", 256), ("fp16", 64), ("fp32", 80)):
            failed += importance(name, target, dtype, head_dim)
        if multiplies_only(name):
            continue
        for dtype, head_dim in for_target(name, ("bf16", 128), ("fp32", 80)):
            others(name, target, dtype, head_dim)
        orders(name, target)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
