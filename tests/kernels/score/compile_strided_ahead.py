"""Compile the kernels over cells for targets that are not here; prints one line per target and configuration.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import blocksparse as bs
from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.gemm import strided_products_triton
from blocksparse.kernels.gemm.pooled_sums_triton import pooled_tiles, sums_of_pooled
from blocksparse.kernels.gemm.strided_products_triton import ProductTiles, tiles_for
from blocksparse.kernels.score import strided_means_triton
from tests.kernels.ahead import MATRIX_INSTRUCTION, SHARED, TARGETS, TEXT, for_target, fp32_products, report_of
from tests.kernels.launched import gathered

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_strided(
    target: GPUTarget,
    kernel: Any,
    dtype: str,
    head_dim: int,
    tiles: ProductTiles,
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


def compile_pooled(
    target: GPUTarget, dtype: str, head_dim: int, *, tma: bool, changed: dict[str, Any]
) -> triton.compiler.CompiledKernel:
    """The kernel over pooled tokens; `changed` names types of arguments that are None unless given, or None again."""
    wide = 8
    tiles = pooled_tiles(torch.empty(0, head_dim, dtype=DTYPES[dtype]), wide)
    block_d = max(power_of_2(head_dim), 16)
    constants: dict[str, Any] = {
        "D": head_dim, "BLOCK_D": block_d, "WIDE": wide, "CAUSAL": True, "PRECISION": fp32_products(target),
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
    }  # fmt: skip
    of_descriptors = {
        "q_source": f"tensordesc<{dtype}[{tiles.block_m}, {block_d}]>",
        "k_source": f"tensordesc<{dtype}[{tiles.block_n}, {block_d}]>",
    }
    types: dict[str, Any] = {
        "q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "sums_ptr": "*fp32", "peak_ptr": "*fp32", "total_ptr": "*fp32",
        "weight_log2": "fp32",
    }  # fmt: skip
    optional = (
        "q_source",
        "k_source",
        "q_last_ptr",
        "k_first_ptr",
        "q_floor_ptr",
        "k_last_ptr",
        "behind",
        "segment",
    )
    given = {**(of_descriptors if tma else {}), **changed}
    types |= given
    constants |= {name: None for name in (*optional, "q_last_strides", "k_first_strides") if name not in given}
    names = sums_of_pooled.jit.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    position = {name: i for i, name in enumerate(names)}
    source = ASTSource(
        sums_of_pooled.jit,
        signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in ("q_ptr", "k_ptr", "sums_ptr")},
    )
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return triton.compile(source, target=target, options=options)


IN_SOME_ORDER = {
    **{f"{name}_ptr": "*i32" for name in ("q_last", "k_first", "q_floor", "k_last")},
    **{f"{name}_strides": ("i32",) * 2 for name in ("q_last", "k_first")},
}


def check_pooled(name: str, target: GPUTarget) -> int:
    """How many of the kernels over pooled tokens lack matrix instructions, or take more memory than there is."""
    failed = 0
    variants: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("bf16", 128, {}), ("fp16", 80, IN_SOME_ORDER), ("bf16", 256, {"behind": "i32"}), ("fp32", 128, {}),
        ("fp16", 64, {"segment": "i32"}),
    )  # fmt: skip
    for dtype, head_dim, changed in for_target(name, *variants):
        tma = name in ("sm_90", "sm_100") and dtype != "fp32"
        compiled = compile_pooled(target, dtype, head_dim, tma=tma, changed=changed)
        text = compiled.asm[TEXT[target.backend]]
        instruction = MATRIX_INSTRUCTION[name]
        found = text.count(instruction)
        failed += not found or compiled.metadata.shared > SHARED[name]
        print(f"{name} pooled {dtype} D={head_dim}: {found} x {instruction}, {compiled.metadata.shared} B shared")
    return failed


def check_means(name: str, target: GPUTarget) -> int:
    """Whether the kernel that pools tokens reads them in other steps than of 16 bytes."""
    constants: dict[str, Any] = {
        "D": 128, "BLOCK_D": 128, "SLOTS": 16, "UNROLLED": 16, "CELLS": 8, "PADDED": False, "q_index_ptr": None,
        "k_index_ptr": None, "q_index_strides": None, "k_index_strides": None,
    }  # fmt: skip
    types = {**{f"{x}_ptr": "*bf16" for x in ("q", "k", "q_out", "k_out")}, "q_strides": ("i32",) * 3}
    types |= {"k_strides": ("i32",) * 3}
    names = strided_means_triton._strided_means_kernel.jit.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    position = {name: i for i, name in enumerate(names)}
    aligned: list[tuple[int, ...]] = [(position[name],) for name in types if name.endswith("_ptr")]
    aligned += [(position[name], axis) for name in ("q_strides", "k_strides") for axis in range(3)]
    source = ASTSource(
        strided_means_triton._strided_means_kernel.jit,
        signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    found, others = (
        len(re.findall(rf"ld\.global\S*\.{kind}", compiled.asm["ptx"])) for kind in ("v4", "[bu]16|v2")
    )
    print(f"{name} strided_means: {found} loads of 16 bytes, {others} of fewer")
    return int(found < 32 or others > 0)


def check_block_products(name: str) -> int:
    """How many forms of the products of pooled blocks spill more than a few bytes of a thread."""
    failed = 0
    q, k = torch.zeros(1, 2, 4096, 64), torch.zeros(1, 1, 4096, 64)
    with gathered(name) as launched:
        bs.MeanPoolScorer(128)(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0))
    for variant in launched.values():
        if variant.name == "products_triton._block_products_kernel":
            spills = report_of(variant.compiled(TARGETS[name]))["spills"]
            failed += spills > 64
            print(f"{name} block_products: {spills} spilled")
    return failed


def main() -> int:
    failed = 0
    torch.set_grad_enabled(False)
    kernels = {
        "strided_mass": (strided_products_triton.sums_of_tiles, {"SLOTS": 8, "WIDE": 16}),
        "group_max": (strided_means_triton._group_max_kernel, {"SLOTS": 64, "HIGH": 4, "WIDE": 4}),
    }
    for name, target in TARGETS.items():
        failed += check_pooled(name, target) + check_block_products(name)
        failed += check_means(name, target) if name == "sm_90" else 0
        for op, (kernel, sizes) in kernels.items():
            for dtype, head_dim, short in for_target(
                name, ("bf16", 128, False), ("fp16", 80, True), ("bf16", 128, True), ("fp32", 64, True)
            ):
                tma = name in ("sm_90", "sm_100") and dtype != "fp32"
                tiles = tiles_for(torch.empty(0, head_dim, dtype=DTYPES[dtype]), tma=tma)
                compiled = compile_strided(target, kernel, dtype, head_dim, tiles, tma=tma, short=short, **sizes)
                found = compiled.asm[TEXT[target.backend]].count(MATRIX_INSTRUCTION[name])
                expected = dtype != "fp32"  # exact fp32 products run on the ordinary units
                failed += (expected and not found) or compiled.metadata.shared > SHARED[name]
                print(
                    f"{name} {op} {dtype} D={head_dim} short={short}: {found} x {MATRIX_INSTRUCTION[name]}, {compiled.metadata.shared} B shared"
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
