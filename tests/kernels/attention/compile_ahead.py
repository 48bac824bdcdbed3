"""Compile every kernel for targets that are not here; prints one line per kernel, target and configuration.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them. With `--order` it
compiles one kernel for Hopper, and prints what is wrong with the order of its instructions (`machine_code.py`).
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from blocksparse.kernels.attention import int8_attention_hopper, sparse_attention_hopper, sparse_attention_triton
from blocksparse.kernels.common import hardware
from blocksparse.kernels.common.hardware import of_attention
from blocksparse.kernels.common.sizes import padded_keys, padded_values
from blocksparse.kernels.common.tiles import HopperTiles, TritonTiles, portable, tuned_int8
from blocksparse.kernels.hopper import split_kv
from blocksparse.kernels.hopper.tile_scheduler import consumer_registers, registers
from tests.kernels.ahead import (
    MATRIX_INSTRUCTION,
    SHARED,
    TARGETS,
    TEXT,
    for_target,
    fp32_products,
    overwritten_barriers,
    ping_pong_barriers,
    report_of,
    triton_target,
)
from tests.kernels.machine_code import assembled, machine_code, wrong_order

# Kinds of kernels, the second with lists that are split; others are named by the type of their 8-bit values.
PLAIN, SPLIT_KV = "16 bits", "16 bits, split"
# Before 3.8 Triton has no 8-bit integer products for sm_100's own matrix unit, and takes the older one.
INTEGER_INSTRUCTION = {
    "sm_80": r"\.s8\.s8",
    "sm_90": r"\.s8\.s8",
    "sm_100": r"\.s8\.s8|tcgen05\.mma\S*kind::i8",
    "gfx942": "_i8",
}
FP8_INSTRUCTION = {"sm_90": ".e4m3.e4m3", "sm_100": "f8f6f4"}  # the others have no such format


def compile_sparse_attention(
    name: str,
    dtype: str,
    head_dim: int,
    block: int,
    tma: bool,
    *,
    pv_skip: bool = False,
    int8_qk: bool = False,
    fp8_pv: bool = False,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    index: str = "i16",
    tiles: TritonTiles | None = None,
) -> triton.compiler.CompiledKernel:
    has = hardware.TARGETS[name]
    target = triton_target(has)
    itemsize = {"fp16": 2, "bf16": 2, "fp32": 4}[dtype]
    key_bytes, value_bytes = 1 if int8_qk else itemsize, 1 if fp8_pv else itemsize
    config = tiles or portable(block, block, head_dim, key_bytes, has, value_bytes=value_bytes, out_bytes=itemsize)
    padded = max(32 if int8_qk or fp8_pv else 16, triton.next_power_of_2(head_dim))
    q_dtype, v_dtype = "i8" if int8_qk else dtype, "fp8e4nv" if fp8_pv else dtype
    # Arguments that are None are constants too.
    on = {"pv_skip": pv_skip, "q_scale": int8_qk, "k_scale": int8_qk, "k_copy": int8_qk, "v_scale": fp8_pv}
    absent = [f"{name}_ptr" for name, given in on.items() if not given]
    absent += [f"{name}_strides" for name, given in on.items() if not given and name != "pv_skip"]
    absent += [name for name, given in (("window", window), ("cap", softcap), ("sinks_ptr", sinks)) if not given]
    constants = {
        "D": head_dim, "DV": head_dim, "BLOCK_D": padded, "BLOCK_DV": padded,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "Q_SPLIT": block // config.block_m, "K_SPLIT": block // config.block_n,
        "CAUSAL": True, "TMA": tma, "PRECISION": fp32_products(target), **dict.fromkeys(absent),
    }  # fmt: skip

    def source_type(dtype: str) -> str:
        return f"tensordesc<{dtype}[1, 1, {config.block_n}, {padded}]>" if tma else f"*{dtype}"

    types = {
        "q_ptr": f"*{q_dtype}", "k_source": source_type(q_dtype), "v_source": source_type(v_dtype),
        "out_ptr": f"*{dtype}", "lse_ptr": "*fp32",
        **{f"{name}_ptr": "*i32" for name in (
            "full_count", "partial_count", "q_position", "k_position", "k_copy")},
        "index_ptr": f"*{index}",
        **{f"{name}_ptr": "*fp32" for name in ("pv_skip", "q_scale", "k_scale", "v_scale", "sinks")},
        **{f"{name}_strides": ("i32",) * 3 for name in ("q", "k", "v", "out")},
        **{f"{name}_strides": ("i32",) * 2 for name in (
            "lse", "count", "index", "q_position", "k_position", "q_scale", "k_scale", "k_copy", "v_scale")},
        **dict.fromkeys(("M", "N", "cols", "heads_per_key", "heads_per_mask", "q_lead", "window"), "i32"),
        **dict.fromkeys(("factor", "cap"), "fp32"),
    }  # fmt: skip
    kernel = sparse_attention_triton._kernel.jit
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    position = {name: i for i, name in enumerate(kernel.arg_names)}
    pointers = [name for name, type_ in signature.items() if isinstance(type_, str) and type_.startswith("*")]
    aligned: list[tuple[int, ...]] = [(position[name],) for name in pointers]
    aligned += [(position[f"{name}_strides"], axis) for name in ("q", "k", "v", "out") for axis in range(3)]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    options |= sparse_attention_triton.most_registers(has, config.num_warps, padded * value_bytes)
    compiled = triton.compile(source, target=target, options=options)
    got = compiled.metadata.num_warps, compiled.metadata.num_stages
    if got != (config.num_warps, config.num_stages):
        raise RuntimeError(f"asked for {config}, compiled with {got[0]} warps and {got[1]} stages")
    launch = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "num_stages": config.num_stages}
    rows = padded * key_bytes, padded * value_bytes
    foretold = of_attention(has, launch, *rows, value_bytes, padded * itemsize)
    if compiled.metadata.shared > foretold:
        raise RuntimeError(f"{config} takes {compiled.metadata.shared} B of shared memory, not {foretold}")
    return compiled


def compile_hopper(
    tiles: HopperTiles, dtype: str, head_dim: int, q_block: int, k_block: int, *, causal: bool, in_order: bool,
    eight: str | None = None, index: str = "i16", value_dim: int | None = None, split: bool = False,
    changed: tuple[str, ...] = (),
) -> triton.compiler.CompiledKernel:  # fmt: skip
    """A kernel for Hopper, as its launch function launches it; `eight` is the type of values beside int8 keys.

    `changed` names what else the layer asks for: window, cap (a softcap, with or without reference) and sinks_ptr.
    """
    kernel = (sparse_attention_hopper if eight is None else int8_attention_hopper)._kernel.jit
    value_dim = value_dim or head_dim
    piece, padded = min(k_block, tiles.block_n), padded_keys(head_dim)
    constants = {
        "DQ": padded, "DV": padded_values(value_dim), "CONSUMERS": tiles.consumers, "BLOCK_N": tiles.block_n,
        "STAGES": tiles.num_stages, "PIECES": tiles.block_n // piece, "K_SPLIT": k_block // piece,
        "Q_SPLIT": q_block // (64 * tiles.consumers), "CAUSAL": causal, "Q_IN_ORDER": in_order, "K_IN_ORDER": in_order,
        "SPLIT_KV": split, **dict.fromkeys(("work_ptr", "split_out_ptr", "split_sums_ptr") if not split else ()),
        **dict.fromkeys({"window", "cap", "reference", "sinks_ptr"} - set(changed)),
        "FP8": eight == "fp8e4nv", "SKIP": not in_order,
        "CONSUMER_REGISTERS": consumer_registers(tiles.consumers, tiles.per_sm),
        **tiles.buffers(head_dim, value_dim),
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}

    def source_type(dtype: str, rows: int, wide: int) -> str:
        bits = 16 if dtype in ("fp16", "bf16") else 8
        layout = gl.NVMMASharedLayout(wide * bits // 8, bits, rank=4)
        return f"tensordesc<{dtype}[1, 1, {rows}, {wide}],{layout!r}>"

    def numbers_type(n: int) -> str:
        return f"tensordesc<fp32[1, 1, {n}],{gl.NVMMASharedLayout(0, 32, rank=3)!r}>"

    of_q, wide = (dtype, 64) if eight is None else ("i8", padded)
    halves = source_type(dtype, piece, 64)
    types: dict[str, object] = {
        "q_desc": source_type(of_q, 64, wide), "k_desc": source_type(of_q, piece, wide),
        "v_desc": source_type("fp8e4nv", padded, piece) if eight == "fp8e4nv" else halves,
        "out_desc": source_type(dtype, 64, 64), "lse_ptr": "*fp32", "scale_log2": "fp32",
        **{f"{name}_ptr": "*i32" for name in (
            "full_count", "partial_count", "q_position", "k_position", "counter")},
        "index_ptr": f"*{index}",
        "pv_skip_ptr": "*fp32",
        "work_ptr": "*i64", "split_out_ptr": "*fp32", "split_sums_ptr": "*fp32",
        "window": "i32", "cap": "fp32", "reference": "fp32", "sinks_ptr": "*fp32",
        **{f"{name}_desc": numbers_type(64 * tiles.consumers) for name in ("q_scale", "taken")},
        **{f"{name}_desc": numbers_type(piece) for name in ("k_token", "v_token")},
        **{f"{name}_desc": numbers_type(32) for name in ("k_tile", "v_tile")},
        **{f"{name}_stride_{axis}": "i32" for name in ("count", "index", "lse") for axis in "bh"},
        **{f"{name}_strides": ("i32", "i32") for name in ("q_position", "k_position")},
        **dict.fromkeys(
            ("tiles", "M", "N", "cols", "rows", "kv_heads", "group", "heads_per_mask", "offset"), "i32"),
    }  # fmt: skip
    source = GluonASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={},
    )
    options = {"num_warps": 4, "maxnreg": registers(tiles.consumers, tiles.per_sm)}
    return triton.compile(source, target=TARGETS["sm_90"], options=options)


def wrong_order_of(
    tiles: HopperTiles, value_dim: int, kernel: triton.compiler.CompiledKernel, changed: tuple[str, ...] = ()
) -> list[str]:
    """What is wrong with the order of a kernel's instructions (`wrong_order`).

    With one stage a step waits for its product with values before the powers, and no order is asked for.
    """
    if tiles.num_stages == 1:
        return []
    in_fp32 = padded_values(value_dim) == 64 and "reference" not in changed
    with tempfile.TemporaryDirectory() as folder:
        (cubin := Path(folder, "kernel.cubin")).write_bytes(kernel.asm["cubin"])
        code = machine_code(cubin)
    return wrong_order(code, consumers=tiles.consumers, scores=tiles.block_n // 2 if in_fp32 else 0)


def compile_split_kv(name: str, dtype: str, **constants: int | None) -> triton.compiler.CompiledKernel:
    """The kernel that splits lists, or the one that combines the results."""
    kernel = getattr(split_kv, name).jit
    types: dict[str, object] = {
        **dict.fromkeys(("full_count_ptr", "partial_count_ptr"), "*i32"), "work_ptr": "*i64",
        **dict.fromkeys(("split_out_ptr", "split_sums_ptr", "sinks_ptr", "lse_ptr"), "*fp32"), "out_ptr": f"*{dtype}",
        "out_strides": ("i32",) * 3,
    }  # fmt: skip
    signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
    values = {(kernel.arg_names.index(x),): value for x, value in constants.items()}
    options = {"num_warps": 8 if name == "_split" else 4}
    return triton.compile(
        ASTSource(kernel, signature, constexprs=values, attrs={}), target=TARGETS["sm_90"], options=options
    )


def main() -> int:
    failed = 0
    for name, dtype, constants in (
        ("_split", "bf16", {"Q_SPLIT": 2, "ENTRIES": 4096}),
        ("_combine", "bf16", {"Q_SPLIT": 1, "TILE": 128, "DV": 256, "ROWS": 32, "sinks_ptr": None}),
        ("_combine", "fp16", {"Q_SPLIT": 1, "TILE": 64, "DV": 64, "ROWS": 32}),
    ):
        kernel = compile_split_kv(name, dtype, **constants)
        print(f"sm_90 split_kv.{name} {dtype} {constants}: {kernel.metadata.shared} B shared")
    for tiles, dtype, dims, q_block, k_block, causal, in_order, kind, *changed in (
        (HopperTiles(2, 128, 2), "bf16", 128, 128, 128, True, True, PLAIN),
        (HopperTiles(2, 128, 2), "bf16", 128, 128, 128, True, True, SPLIT_KV),
        (HopperTiles(1, 64, 2, 2), "bf16", 128, 64, 64, True, False, SPLIT_KV),
        (HopperTiles(2, 64, 2), "bf16", 256, 128, 128, True, True, SPLIT_KV),
        (HopperTiles(2, 128, 2), "bf16", 128, 128, 64, True, True, PLAIN),
        (HopperTiles(2, 64, 2), "fp16", 256, 128, 128, True, True, SPLIT_KV),
        (HopperTiles(2, 128, 2), "bf16", 128, 128, 64, True, False, PLAIN),
        (HopperTiles(2, 128, 2), "fp16", 96, 256, 256, False, False, PLAIN),
        (HopperTiles(1, 128, 2, 2), "fp16", 64, 64, 64, True, False, PLAIN),
        (HopperTiles(1, 64, 2), "fp16", 256, 64, 64, True, False, PLAIN),
        (HopperTiles(2, 128, 2), "bf16", (192, 128), 128, 128, True, True, PLAIN),
        (HopperTiles(1, 64, 1, 2), "bf16", (192, 128), 64, 64, True, False, PLAIN),
        (HopperTiles(2, 128, 4), "bf16", 64, 128, 128, True, True, SPLIT_KV, "window", "sinks_ptr"),
        (HopperTiles(2, 64, 2), "bf16", 256, 128, 128, True, True, PLAIN, "window", "cap", "reference"),
        (HopperTiles(1, 64, 2, 2), "fp16", 128, 64, 64, True, False, PLAIN, "window", "cap", "sinks_ptr"),
        (tuned_int8(128, 128, 128, True), "bf16", 128, 128, 128, True, True, "fp8e4nv"),
        (tuned_int8(128, 128, 128, False), "bf16", 128, 128, 256, True, False, "bf16"),
        (tuned_int8(64, 64, 64, True), "fp16", 64, 64, 64, False, False, "fp8e4nv"),
    ):
        index = "i32" if k_block == 256 else "i16"  # lists of both types
        head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
        eight = None if kind in (PLAIN, SPLIT_KV) else kind
        shown = f"{head_dim}" if value_dim == head_dim else f"{head_dim},{value_dim}"
        kernel = compile_hopper(
            tiles, dtype, head_dim, q_block, k_block, causal=causal, in_order=in_order,
            eight=eight, index=index, value_dim=value_dim,
            split=kind == SPLIT_KV, changed=tuple(changed),
        )  # fmt: skip
        found = {
            name: kernel.asm["ptx"].count(name)
            for name in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg")
        }
        fits = kernel.metadata.shared <= 227 * 1024 // tiles.per_sm
        overwritten = overwritten_barriers(kernel.asm["ptx"])
        barriers, wrong = ping_pong_barriers(kernel.asm["ptx"])
        expected = 2 if eight is None and tiles.consumers == 2 and value_dim == 64 else 0  # `hopper/consumer.py`
        order = [] if eight else wrong_order_of(tiles, value_dim, kernel, tuple(changed))
        right = fits and all(found.values()) and not overwritten and len(barriers) == expected and not wrong
        failed += not right or bool(order)
        print(
            f"sm_90 {tiles} {dtype} D={shown} blocks={q_block}x{k_block} {kind} {changed} lists={index}: {found}, "
            f"{kernel.metadata.shared} B shared, overwritten barriers: {overwritten}, ping-pong barriers: {sorted(barriers)}, wrong: {wrong}, "
            f"wrong order: {order}"
        )
    for name, target in TARGETS.items():
        with_tma = (False, True) if name in ("sm_90", "sm_100") else (False,)
        for dtype, head_dim, block in for_target(
            name, ("bf16", 128, 128), ("bf16", 256, 128), ("fp16", 64, 64), ("fp32", 32, 64)
        ):
            for tma in with_tma if head_dim == 128 else with_tma[-1:]:
                index = "i32" if head_dim == 64 else "i16"  # lists of both types
                kernel = compile_sparse_attention(name, dtype, head_dim, block, tma, index=index)
                text = kernel.asm[TEXT[target.backend]]
                found = text.count(MATRIX_INSTRUCTION[name])
                expected = dtype != "fp32"  # exact fp32 products run on the ordinary units
                failed += (expected and not found) or kernel.metadata.shared > SHARED[name]
                print(
                    f"{name} {dtype} D={head_dim} block={block} tma={tma} lists={index}: {found} x {MATRIX_INSTRUCTION[name]}, {kernel.metadata.shared} B shared"
                )
        if name == "sm_90":  # for others a window comes with softcap and sinks
            kernel = compile_sparse_attention(name, "bf16", 128, 128, with_tma[-1], window=True)
            print(f"{name} bf16 D=128 block=128 in a window: {kernel.metadata.shared} B shared")
        for softcap, sinks in for_target(name, (True, True), (True, False), (False, True)):
            kernel = compile_sparse_attention(
                name, "bf16", 64, 128, with_tma[-1], window=sinks, softcap=softcap, sinks=sinks
            )
            print(f"{name} bf16 D=64 softcap={softcap} sinks={sinks}: {kernel.metadata.shared} B shared")
        for head_dim, pv_skip, int8_qk, fp8_pv in for_target(
            name, (80, True, True, False), (128, True, True, True), (128, False, False, True)
        ):
            kernel = compile_sparse_attention(
                name, "bf16", head_dim, 128, with_tma[-1], pv_skip=pv_skip, int8_qk=int8_qk, fp8_pv=fp8_pv
            )
            text = kernel.asm[TEXT[target.backend]]
            int8 = len(re.findall(INTEGER_INSTRUCTION[name], text))
            fp8 = text.count(FP8_INSTRUCTION[name]) if fp8_pv else 0
            failed += (int8_qk and not int8) + (fp8_pv and not fp8)
            print(
                f"{name} D={head_dim} pv_skip={pv_skip} int8_qk={int8_qk} fp8_pv={fp8_pv}: {int8} integer and {fp8} fp8 products, {kernel.metadata.shared} B shared"
            )
    # The form of the kernel that takes the most registers.
    for name, head_dim in (("sm_86", 64), ("sm_100", 256), ("gfx942", 256)):
        kernel = compile_sparse_attention(name, "bf16", head_dim, 128, name == "sm_100", pv_skip=True)
        spills = report_of(kernel)["spills"]
        failed += spills > 0
        print(f"{name} bf16 D={head_dim} pv_skip=True: {spills} spilled")
    return int(failed > 0)


def order_of_one() -> int:
    """What is wrong with the order of one kernel, and of the same PTX without the branches that keep this order."""
    tiles = HopperTiles(2, 128, 4)
    kernel = compile_hopper(tiles, "bf16", 64, 128, 128, causal=True, in_order=True)
    wrong = wrong_order_of(tiles, 64, kernel)
    without, branches = re.subn(r"setp\.lt\.f32 p, c, \S+; @p bra DONE; ", "", kernel.asm["ptx"])
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        assembled(without, get_ptxas(90).path, [], cubin)
        seen = wrong_order(machine_code(cubin), consumers=2, scores=64)
    print(f"Triton {triton.__version__}, wrong order: {wrong}; without {branches} branches: {seen}")
    return int(bool(wrong) or not seen)


if __name__ == "__main__":
    sys.exit(order_of_one() if "--order" in sys.argv[1:] else main())
