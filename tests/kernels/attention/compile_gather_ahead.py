"""Compile the gather kernel for targets that are not here; prints one line per target and configuration.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import re
import sys

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from blocksparse.kernels.attention import gather_attention_hopper, gather_attention_triton
from blocksparse.kernels.hopper.tile_scheduler import registers
from tests.kernels.ahead import (
    HARDWARE,
    ITEMSIZE,
    MATRIX_INSTRUCTION,
    SHARED,
    TARGETS,
    TEXT,
    for_target,
    fp32_products,
    overwritten_barriers,
)


def compile_gather_attention(
    name: str, dtype: str, head_dim: int, block: int, commit: bool
) -> triton.compiler.CompiledKernel:
    target = TARGETS[name]
    launch = gather_attention_triton.launch_options(block, block, head_dim, ITEMSIZE[dtype], HARDWARE[name])
    padded = max(16, triton.next_power_of_2(head_dim))
    constants = {
        "D": head_dim, "DV": head_dim, "BLOCK_D": padded, "BLOCK_DV": padded, "Q_BLOCK": block, "K_BLOCK": block,
        "BLOCK_M": launch["BLOCK_M"], "BLOCK_N": launch["BLOCK_N"],
        "AHEAD": gather_attention_triton._AHEAD, "CAUSAL": True, "COMMIT": commit, "MEAN": not commit,
        "PRECISION": fp32_products(target),
    }  # fmt: skip
    types = {
        **{f"{name}_ptr": f"*{dtype}" for name in ("q", "k", "v", "out")},
        **{f"{name}_ptr": "*fp32" for name in ("lse", "tau")},
        **{f"{name}_ptr": "*i32" for name in (
            "visited", "index", "opened", "count", "q_position", "k_position", "group")},
        **{f"{name}_strides": ("i32",) * 3 for name in ("q", "k", "v", "out", "k_position")},
        **{f"{name}_strides": ("i32",) * 2 for name in ("lse", "q_position")},
        **dict.fromkeys(("rows", "cols", "offset", "heads_per_key", "heads_per_map", "patience"), "i32"),
        "scale_log2": "fp32",
    }  # fmt: skip
    kernel = gather_attention_triton._kernel.jit
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    position = {name: i for i, name in enumerate(kernel.arg_names)}
    aligned: list[tuple[int, ...]] = [(position[f"{name}_ptr"],) for name in ("q", "k", "v", "out", "k_position")]
    aligned += [(position[f"{name}_strides"], axis) for name in ("q", "k", "v", "out") for axis in range(3)]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {name: launch[name] for name in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=target, options=options)
    row_bytes, itemsize = padded * ITEMSIZE[dtype], ITEMSIZE[dtype]
    foretold = gather_attention_triton.shared_memory(HARDWARE[name], launch, row_bytes, itemsize)
    if compiled.metadata.shared > foretold:
        raise RuntimeError(f"{launch} takes {compiled.metadata.shared} B of shared memory, not {foretold}")
    return compiled


def compile_hopper(
    dtype: str, head_dim: int, q_block: int, k_block: int, *, causal: bool, mean: bool
) -> triton.compiler.CompiledKernel:
    """The kernel for Hopper, as `gather_attention_hopper` launches it."""
    kernel = gather_attention_hopper._kernel.jit
    tiles = gather_attention_hopper.tile_options(q_block, k_block, head_dim)
    consumers, per_sm = tiles["CONSUMERS"], 3 - tiles["CONSUMERS"]
    constants = {
        "D": head_dim, **tiles, "CAUSAL": causal, "MEAN": mean,
        "CONSUMER_REGISTERS": gather_attention_hopper._consumer_registers(consumers, per_sm),
    }  # fmt: skip
    types: dict[str, object] = {
        **{f"{name}_ptr": f"*{dtype}" for name in ("q", "k", "v", "out")},
        **{f"{name}_ptr": "*fp32" for name in ("lse", "tau")},
        **{f"{name}_ptr": "*i32" for name in (
            "visited", "index", "opened", "count", "q_position", "k_position", "group")},
        **{f"{name}_strides": ("i32",) * 3 for name in ("q", "k", "v", "out", "k_position")},
        "q_position_strides": ("i32",) * 2,
        **dict.fromkeys(("lse_stride_b", "lse_stride_h", "rows", "cols", "offset", "heads_per_map", "patience"), "i32"),
        "scale_log2": "fp32",
    }  # fmt: skip
    position = {name: i for i, name in enumerate(kernel.arg_names)}
    aligned: list[tuple[int, ...]] = [(position[f"{name}_ptr"],) for name in ("q", "k", "v", "out", "k_position")]
    aligned += [(position[f"{name}_strides"], axis) for name in ("q", "k", "v", "out") for axis in range(3)]
    source = GluonASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {"num_warps": 4, "maxnreg": registers(consumers, per_sm)}
    return triton.compile(source, target=TARGETS["sm_90"], options=options)


def unordered(ptx: str) -> list[str]:
    """Where matrix products might read rows that other threads are still writing: nowhere, or the test fails.

    Keys and values: each thread waits for its own copies (`cp.async.wait_group`), the four warps meet (`bar.sync`), and the
    thread that then tells the consumers orders what it has seen before what the tensor cores read
    (`fence.proxy.async`, which PTX lets stand anywhere between a write and its reader). Triton 3.9 has the warps meet once
    more behind it. Queries: each thread stores and fences its own, and the four warps of a consumer meet before its first
    product.
    """
    steps = re.findall(
        r"cp\.async\.wait_group|bar\.sync|fence\.proxy\.async|mbarrier\.arrive|st\.shared\.v4|wgmma\.mma_async",
        ptx,
    )
    found = []
    for i, step in enumerate(steps):
        if step == "cp.async.wait_group":
            until = steps[i + 1 : steps.index("mbarrier.arrive", i)]
            if until[:2] != ["bar.sync", "fence.proxy.async"] or {*until[2:]} - {"bar.sync"}:
                found.append(f"copies: {until}")
        elif step == "st.shared.v4" and steps[i + 1] == "fence.proxy.async":
            until = steps[i + 2 : steps.index("wgmma.mma_async", i)]
            if "bar.sync" not in until:
                found.append(f"queries: {until}")
    counted = steps.count("cp.async.wait_group")
    return found if counted else ["no copies"]


def main() -> int:
    failed = 0
    for dtype, head_dim, q_block, k_block, causal, mean in (
        ("bf16", 128, 128, 128, True, False),
        ("bf16", 128, 64, 64, True, False),
        ("fp16", 64, 128, 256, False, True),
        ("fp16", 64, 64, 32, True, True),
    ):
        kernel = compile_hopper(dtype, head_dim, q_block, k_block, causal=causal, mean=mean)
        found = {name: kernel.asm["ptx"].count(name) for name in ("wgmma.mma_async", "cp.async.cg", "setmaxnreg")}
        fits = kernel.metadata.shared <= 227 * 1024 * q_block // 128
        overwritten = overwritten_barriers(kernel.asm["ptx"])
        races = unordered(kernel.asm["ptx"])
        failed += not (fits and all(found.values()) and not overwritten and not races)
        print(
            f"sm_90 Hopper {dtype} D={head_dim} blocks={q_block}x{k_block}: {found}, {kernel.metadata.shared} B shared, "
            f"overwritten barriers: {overwritten}, unordered: {races}"
        )
    for name, target in TARGETS.items():
        for dtype, head_dim, block, commit in for_target(
            name,
            ("bf16", 128, 128, True),
            ("bf16", 256, 128, False),
            ("fp16", 80, 64, False),
            ("fp32", 32, 64, True),
        ):
            kernel = compile_gather_attention(name, dtype, head_dim, block, commit)
            text = kernel.asm[TEXT[target.backend]]
            found = text.count(MATRIX_INSTRUCTION[name])
            expected = dtype != "fp32"  # exact fp32 products run on the ordinary units
            failed += (expected and not found) or kernel.metadata.shared > SHARED[name]
            print(
                f"{name} {dtype} D={head_dim} block={block}: {found} x {MATRIX_INSTRUCTION[name]}, {kernel.metadata.shared} B shared"
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
