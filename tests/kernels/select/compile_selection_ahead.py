"""Compile the kernels over blocks for targets that are not here; prints one line per target and kernel.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blocksparse.kernels.gemm import products_triton
from blocksparse.kernels.masks import blocks_triton, visibility_triton
from blocksparse.kernels.score import block_softmax_triton
from blocksparse.kernels.select import global_top_cdf_triton, top_cdf_triton, top_k_triton, vertical_slash_triton
from blocksparse.kernels.select.top_k_triton import width_of_rows
from tests.kernels.ahead import TARGETS, fp32_products, multiplies_only

PARTS = [getattr(global_top_cdf_triton, f"_{x}") for x in ("heaviest", "to_ticks", "search", "keep")]
TYPES: dict[str, Any] = {
    **{f"{name}_ptr": "*i1" for name in ("forced", "keep", "k_whole", "own")},
    **{f"{name}_ptr": "*fp32" for name in ("values", "logits", "q", "k", "tau", "ticks", "best")},
    **{f"{name}_ptr": "*fp64" for name in ("mass", "share")},
    **{
        f"{name}_ptr": "*i32"
        for name in ("full_count", "partial_count", "seen", "q_last", "k_first", "rank", "opened", "count")
    },
    **{f"{name}_ptr": "*i32" for name in ("before",)},
    **{f"{name}_ptr": "*i64" for name in ("total", "sums", "last_sums", "cuts", "last_cuts")},
    **dict.fromkeys(("positions", "position_ptrs"), ("*i32",) * 4),
    "position_strides": (("i32",) * 5,) * 4,
    **{
        f"{name}_strides": ("i32", "i32", "i32", "constexpr", "i32")
        for name in ("values", "forced", "also", "keep", "k_whole", "own", "seen", "q_last", "k_first", "rank")
    },
    **dict.fromkeys(
        (
            "rows",
            "cols",
            "k",
            "D",
            "n",
            "group",
            "least",
            "most",
            "count_stride",
            "count_others_stride",
            "others",
            "first_others",
            "mass_stride",
            "share_stride",
            "last_stride",
            "whole_stride",
            "run",
            "runs",
            "bands",
            "keys",
            "key_run",
            "distances",
            "bound_stride",
        ),
        "i32",
    ),
    **dict.fromkeys(("skipped", "near", "first", "eta", "first_row", "from_query", "segment"), "i32"),
    "out_ptr": "*i1",
    "state": "i64",
    **dict.fromkeys(("scale", "mass"), "fp32"),
    "number_ptr": "*fp32",
    "bound_ptr": "*fp64",
}
ALL_HEADS = dict.fromkeys(("number_ptr", "bound_ptr", "bound_stride"))


def compile_kernel(
    target: GPUTarget,
    kernel: Any,
    *,
    rows: int,
    cols: int,
    warps: int,
    index: str = "i16",
    pointers: dict[str, str] | None = None,
    **constants: Any,
) -> triton.compiler.CompiledKernel:
    types = {**TYPES, "index_ptr": f"*{index}", **(pointers or {})}
    constants = {"CAUSAL": True, "WINDOW": None, "ROWS": rows, "COLS": cols, "ALIGNED": True, **constants}
    constants = {name: value for name, value in constants.items() if name in kernel.jit.arg_names}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.jit.arg_names}
    values: dict[tuple[int, ...], Any] = {}
    aligned: list[tuple[int, ...]] = []
    for i, name in enumerate(kernel.jit.arg_names):
        kind = signature[name]
        if name in constants:
            values[(i,)] = constants[name]
        elif isinstance(kind, str):
            looked_at = name == "cols" and name not in kernel.jit.do_not_specialize
            aligned += [(i,)] if kind.startswith("*") or looked_at else []
        elif name == "position_strides":
            signature[name] = (("i32", "i32", "i32", "constexpr", "i32"),) * 4
            values |= {(i, at, 3): 1 for at in range(4)}
            aligned += [(i, at, axis) for at in range(4) for axis in (0, 1, 2, 4)]
        elif name.endswith("_strides"):
            values[(i, 3)] = 1
            aligned += [(i, axis) for axis in (0, 1, 2, 4)]
        else:
            aligned += [(i, at) for at in range(len(kind))]
    source = ASTSource(
        kernel.jit, signature, constexprs=values, attrs={at: [["tt.divisibility", 16]] for at in aligned}
    )
    return triton.compile(source, target=target, options={"num_warps": warps})


VARIANTS = (
    "top_cdf with always kept blocks", "top_cdf last dropped", "products of any rows", "lists in a window", "always kept blocks in a window",
    "prefix softmax", "refined", "vertical-slash blocks of some heads", *(f"global_top_cdf{part.jit.__name__} of some heads" for part in PARTS),
)  # fmt: skip


def main() -> int:
    for name, target in TARGETS.items():
        # Short and long rows for warps of 32 threads, and for those of 64.
        for cols in (64, 32768) if name in ("sm_90", "gfx942") else (64,):
            wide, warps = width_of_rows(cols)
            search = {"rows": 1, "cols": wide, "warps": warps}
            nothing_always = dict.fromkeys(("near", "first", "eta", "state", "from_query"))
            k_share = {"k": None, "FORCED_FIRST": True, "OF_ALL_KEYS": False}
            kernels: list[tuple[str, Any, dict[str, Any]]] = [
                ("top_cdf", top_cdf_triton._top_cdf_kernel, {**search, "CROSSING": True, "mass": None, **nothing_always}),
                ("top_cdf with always kept blocks", top_cdf_triton._top_cdf_kernel, {**search, "CROSSING": True, "mass": None}),
                ("top_cdf last dropped", top_cdf_triton._top_cdf_kernel, {**search, "CROSSING": False, **dict.fromkeys(("forced_ptr", "forced_strides", "mass_ptr", "mass_stride")), **nothing_always}),
                ("top_k share", top_k_triton._top_k_kernel, {**search, **k_share}),
                ("products", products_triton._block_products_kernel, {**ALL_HEADS, "rows": 1, "cols": 64, "warps": 4, "TILE": 64, "DIMS": 64 if name in ("sm_90", "sm_100") else 16, "SKIPS": True, "PRECISION": fp32_products(target)}),
                ("products of any rows", products_triton._block_products_kernel, {"rows": 1, "cols": 64, "warps": 4, "TILE": 64, "DIMS": 64 if name in ("sm_90", "sm_100") else 16, "SKIPS": False, "PRECISION": fp32_products(target), **dict.fromkeys(("q_last_ptr", "k_first_ptr", "q_last_strides", "k_first_strides"))}),
                ("lists", blocks_triton._block_lists_kernel, {"rows": max(512 // wide, 1), "cols": min(wide, 1024), "WHOLE": wide <= 1024, "warps": 1 if wide == 256 else 2, "index": "i16" if cols < 2**15 else "i32"}),
                ("lists in a window", blocks_triton._block_lists_kernel, {"rows": max(512 // wide, 1), "cols": min(wide, 1024), "WHOLE": wide <= 1024, "warps": 1 if wide == 256 else 2, "index": "i16" if cols < 2**15 else "i32", "WINDOW": 1024}),
                ("always kept blocks in a window", visibility_triton._keep_visible_kernel, {"rows": 16, "cols": 256, "warps": 4, "N": 1, "DIAGONAL": True, "WINDOW": 1024, "keep_ptr": None, "keep_strides": None}),
                ("softmax", block_softmax_triton._block_softmax_kernel, {**ALL_HEADS, "rows": 1, "cols": min(wide, 8192), "warps": 4, "WHOLE": wide <= 8192, "SEGMENT": 256, "seen_ptr": None, "seen_strides": None}),
                ("prefix softmax", block_softmax_triton._block_softmax_kernel, {"rows": 1, "cols": min(wide, 8192), "warps": 4, "WHOLE": wide <= 8192, "SEGMENT": None, "positions": None, "position_strides": None, "own_ptr": None, "own_strides": None}),
                ("refined", visibility_triton._keep_visible_kernel, {"rows": 16, "cols": 256, "warps": 4, "N": 4, "DIAGONAL": False}),
                ("divergence", block_softmax_triton._block_divergence_kernel, {"rows": 1, "cols": max(wide, 16), "warps": warps, "pointers": {"logits_ptr": "*fp32", "true_ptr": "*fp32", "out_ptr": "*fp32"}}),
                ("fewest lines", vertical_slash_triton._fewest, {**search, "pointers": {**dict.fromkeys(("lines_ptr", "bands_ptr"), "*fp32"), **dict.fromkeys(("taken_ptr", "bands_taken_ptr"), "*i32")}}),
                ("heaviest lines", vertical_slash_triton._heaviest, {**search, "COUNTED": False, "pointers": {**dict.fromkeys(("weight_ptr", "others_ptr"), "*fp32"), **dict.fromkeys(("count_ptr", "count_others_ptr", "last_ptr"), "*fp64"), **dict.fromkeys(("taken_ptr", "taken_others_ptr"), "*i1")}}),
                *((f"vertical-slash blocks{of}", vertical_slash_triton._vertical_slash_blocks_kernel, {**heads, "OTHERS": True, "KEY_RUN": 1, "RUN": 1, "rows": 8, "cols": 256, "warps": 4, "pointers": {"keys_ptr": "*i32", "distances_ptr": "*i32", "whole_ptr": "*fp64", "also_ptr": "*i1"}}) for of, heads in (("", ALL_HEADS), (" of some heads", {}))),
                ("routed", top_k_triton._routed_kernel, {"rows": 1, "cols": 256, "warps": 4, "TILE": 4096, "pointers": {"below_ptr": "*i1", "otherwise_ptr": "*i1"}}),
                ("run sums", products_triton._run_sums_kernel, {"rows": 1, "cols": 256, "warps": 4, "RUNS": 16, "WIDE": 128, "pointers": {"x_ptr": "*fp32", "out_ptr": "*fp32"}}),
                ("visiting order", top_k_triton._visiting_order_kernel, {"rows": 1, "cols": 256, "warps": 4, "CHUNK": 16}),
                ("always kept blocks", visibility_triton._keep_visible_kernel, {"rows": 16, "cols": 256, "warps": 4, "N": 1, "DIAGONAL": True, "keep_ptr": None, "keep_strides": None}),
                *((f"global_top_cdf{part.jit.__name__}", part, {"rows": 16, "cols": 256, "warps": 4, "TILE": 4096, "PASS": 2, "CROSSING": True, **ALL_HEADS}) for part in PARTS),
                *((f"global_top_cdf{part.jit.__name__} of some heads", part, {"rows": 16, "cols": 256, "warps": 4, "TILE": 4096, "PASS": 2, "CROSSING": True}) for part in PARTS),
            ]  # fmt: skip
            for title, kernel, options in kernels:
                # As `for_target` has it, but for warps of 64 threads, which search rows otherwise.
                if title in VARIANTS and (name in ("sm_80", "sm_100") or (name == "gfx942" and cols > 64)):
                    continue
                if multiplies_only(name) and kernel is not products_triton._block_products_kernel:
                    continue
                compiled = compile_kernel(target, kernel, **options)
                print(f"{name} {title} cols={cols}: {compiled.metadata.shared} B shared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
