"""Compile all kernels, as presets launch them, for GPUs that are not here, and look at what the compiler made of them.

    python -m tests.kernels.compile_ahead                                   # all targets: about an hour of one core
    python -m tests.kernels.compile_ahead sm_86 gfx942 --dims 128 --json ahead.json
    python -m tests.kernels.compile_ahead --order                           # one kernel, with and without its branches

Prints a line per target, kernel, dtype and head dim, and ends with 1 if one of them is wrong (`against`): it takes more
than its target has or than was foretold, multiplies without the target's matrix unit, or breaks a rule of Hopper's
kernels. It sees no GPU, and no kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from attrs import evolve
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

import blocksparse as bs
from blocksparse.kernels.common.hardware import TARGETS, Hardware
from blocksparse.testing import every_preset, video_presets
from tests.kernels.ahead import overwritten_barriers, ping_pong_barriers, report_of, triton_target, unordered
from tests.kernels.foretold import foretold
from tests.kernels.launched import Variant, gathered
from tests.kernels.machine_code import assembled, machine_code, wrong_order

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DIMS = {"bf16": (64, 96, 128, 256), "fp32": (64, 128)}
# The kernels that multiply matrices, or files of nothing else. What others take depends on the kind of GPU alone: they are
# compiled for one of each.
MULTIPLY = {
    "strided_means_triton._group_max_kernel", "strided_products_triton", "coarse_steps_triton._range", "coarse_steps_triton._steps",
    "gather_attention_hopper", "gather_attention_triton", "int8_attention_hopper", "last_queries_triton", "pooled_sums_triton",
    "products_triton._block_products_kernel", "mean_correction_triton", "segments_triton._sums",
    "segments_triton._weights", "sparse_attention_hopper", "sparse_attention_triton",
}  # fmt: skip
KINDS = {"sm_90", "gfx942", "gfx1100"}
ONLY_HOPPER = {"split_kv", "tile_operands_triton", "tile_rotation_triton"}
# The kernels that attend. They must not spill in half precision, but on Hopper, where their tiles are measured, and with
# the widest heads on RDNA 3, where no tiles are known that do not.
MAIN = {
    "gather_attention_hopper",
    "gather_attention_triton",
    "int8_attention_hopper",
    "sparse_attention_hopper",
    "sparse_attention_triton",
}
MAY_SPILL = {*(("sm_90", D) for D in DIMS["bf16"]), ("gfx1100", 256)}
SHOWN = {
    "BLOCK_M", "BLOCK_N", "BLOCK_K", "ROWS", "KEYS", "TILE", "CONSUMERS", "STAGES", "TMA", "num_warps", "num_stages",
}  # fmt: skip
TOKENS, HEADS, KV_HEADS = 4096, 4, 2
# A video of so many tokens: what its presets need besides, and fewer steps of k-means, which no kernel takes.
GRID = (4, 32, 32)
OF_VIDEO: dict[str, dict[str, Any]] = {
    "dfs_attn": {"order": bs.HilbertOrder(GRID)},
    "radial": {"grid": GRID},
    "nabla": {"grid": GRID},
    "lva": {"grid": GRID, "period": 2, "radius": 1},
    "svg2": {"iterations": 1},
}
# Instructions of matrix units. Before 3.8 Triton has no 8-bit integer products for sm_100's own, and takes the older ones.
MATRIX = re.compile(r"mma\.sync|wgmma|tcgen05\.mma|v_s?w?mfma|v_s?wmma|v_swmmac")
INTEGER = re.compile(r"\.s8\.s8|kind::i8|_i8|_iu8")
FP8 = {"sm_90": ".e4m3.e4m3", "sm_100": "f8f6f4"}  # others have no such format, or take it as fp16
ON_HOPPER = ("wgmma.mma_async", "setmaxnreg")
Call = Callable[[Tensor, Tensor, Tensor], object]


def pipelines(hardware: Hardware) -> dict[str, bs.Pipeline[Any, Any, Any]]:
    """Every preset for text with the kernels that it has at any length, 8 bits, and what no preset selects by."""
    found = {}
    for name, preset in every_preset.items():
        pipeline = preset()
        if isinstance(pipeline.executor, bs.AutoExecutor):
            pipeline = evolve(pipeline, executor=bs.TritonExecutor())
        found[name] = pipeline
    found["flash_prefill, mean correction"] = bs.flash_prefill(mean_correction=True, executor=bs.TritonExecutor())
    found["minference, by head"] = bs.minference([100, 200, 300, 400], 500, executor=bs.TritonExecutor())
    found["xattention, sums"] = evolve(bs.xattention(pattern="sum"), executor=bs.TritonExecutor())
    pooled = found["mean_pooling"]
    fp8 = hardware.capability >= (8, 9)
    return {
        **found,
        "8 bits": evolve(pooled, executor=bs.Int8Executor(fp8)),
        "8 bits, blocks": evolve(pooled, executor=bs.Int8Executor(fp8, scales="block")),
        "8 bits, blocks of 64": bs.mean_pooling(block=64, executor=bs.Int8Executor(fp8)),
        "8 bits, exact values": evolve(pooled, executor=bs.Int8Executor(False)),
        "blocks of 64": bs.mean_pooling(block=64, executor=bs.TritonExecutor()),
        "pv_skip": evolve(pooled, executor=bs.TritonExecutor(pv_skip=-3.0)),
        "top k": evolve(pooled, selector=bs.TopK(share=0.25)),
        "random": evolve(pooled, selector=bs.Random(0.25)),
    }


def calls(hardware: Hardware) -> dict[str, Call]:
    """Calls of these, of the presets for video, of a page table, and of the end of a long prompt."""
    video = {
        name: evolve(preset(**OF_VIDEO.get(name, {})), executor=bs.TritonExecutor())
        for name, preset in video_presets.items()
    }
    found: dict[str, Call] = {name: partial(pipeline, causal=False) for name, pipeline in video.items()}
    found |= pipelines(hardware)
    found["flex_prefill, in a window"] = partial(pipelines(hardware)["flex_prefill"], window=1024)
    pooled = pipelines(hardware)["mean_pooling"]
    found["softcap"] = partial(pooled, softcap=30.0)
    found["a window, sinks"] = partial(pooled, window=1024, sinks=[0.0, 1.0, 2.0, 3.0])
    return {**found, "pages": read_pages, "long": partial(end_of_long, pipelines(hardware)["mean_pooling"])}


def read_pages(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Keys and values of one request from pages of 128 tokens, gathered."""
    keys, values = (x.view(-1, TOKENS // 128, 128, x.shape[3]).transpose(0, 1) for x in (k, v))
    table = bs.PageTable(torch.arange(TOKENS // 128)[None], [TOKENS], page_size=128)
    table.gather(keys, values)


def end_of_long(pipeline: bs.Pipeline[Any, Any, Any], q: Tensor, k: Tensor, v: Tensor) -> None:
    """So many keys that lists of few queries are split (`hopper/split_kv.py`)."""
    pipeline(q[:, :, :512], k.repeat(1, 1, 16, 1), v.repeat(1, 1, 16, 1))


def variants(name: str, dtype: str, head_dim: int, *, hopper: bool = False) -> dict[str, tuple[Variant, set[str]]]:
    """What calls launch there, and which ones."""
    found: dict[str, tuple[Variant, set[str]]] = {}
    with gathered(name, hopper=hopper) as launched:
        for title, call in calls(TARGETS[name]).items():
            launched.clear()
            sizes = (HEADS, KV_HEADS, KV_HEADS)
            q, k, v = (torch.zeros(1, heads, TOKENS, head_dim, dtype=DTYPES[dtype]) for heads in sizes)
            try:
                call(q, k, v)
            except bs.UnsupportedError as error:
                print(f"{name} {dtype} D={head_dim} {title}: refused: {error.because}")
                continue
            for key, variant in launched.items():
                found.setdefault(key, (variant, set()))[1].add(title)
    return found


def report(name: str, dtype: str, head_dim: int, variant: Variant) -> dict[str, Any]:
    """What the compiler says of a kernel."""
    began = time.perf_counter()
    constants = variant.named()
    said = {"target": name, "kernel": variant.name, "dtype": dtype, "D": head_dim, "constants": constants}
    try:
        compiled = variant.compiled(triton_target(TARGETS[name]))
    except Exception as error:
        return {**said, "failed": f"{type(error).__name__}: {error}"[:300]}
    needed = foretold(TARGETS[name], variant.name, constants, variant.itemsizes())
    multiplies = re.search(r"tt\.dot|warp_group_dot|tc_gen5_mma", compiled.asm["ttgir"]) is not None
    broken = broken_rules(name, dtype, variant, compiled, multiplies)
    seconds = round(time.perf_counter() - began, 1)
    report = {**report_of(compiled), "multiplies": multiplies, "needed": needed, "seconds": seconds}
    return {**said, **report, "broken": broken}


def broken_rules(name: str, dtype: str, variant: Variant, compiled: Any, multiplies: bool) -> list[str]:
    """What no result shows: which instructions there are, and for Hopper's kernels where they stand."""
    text, module = compiled.asm.get("ptx") or compiled.asm["amdgcn"], variant.name.partition(".")[0]
    asked = variant.options.num_warps, variant.options.num_stages
    got = compiled.metadata.num_warps, compiled.metadata.num_stages
    # Exact products of fp32 run on the ordinary units; means of blocks are fp32, for which RDNA has no other.
    ordinary = dtype == "fp32" or (module == "products_triton" and name.startswith("gfx1"))
    eight = module in MAIN and variant.dtypes()[:3]
    has = variant.named()
    whole_rows = variant.name.endswith("._strided_means_kernel") and has["D"] == has["BLOCK_D"]
    broken = {
        f"it has {got} warps and stages, and asks for {asked}": "_hopper" not in module and got != asked,
        "its products are not those of the matrix unit": multiplies and not ordinary and not MATRIX.search(text),
        "its products are not those of integers": eight and "i8" in eight and not INTEGER.search(text),
        "its products are not those of fp8": eight and "fp8e4nv" in eight and FP8.get(name, "") not in text,
        "it loads less than 16 bytes at a time": whole_rows
        and (name, dtype) == ("sm_90", "bf16")
        and re.search(r"ld\.global\S*\.([bu]16|v2)", text),
    }
    return [why for why, holds in broken.items() if holds] + (
        of_hopper(variant, compiled) if "_hopper" in module else []
    )


def of_hopper(variant: Variant, compiled: Any) -> list[str]:
    """What is wrong with barriers, copies and the order of instructions (`machine_code.py`, `hopper/consumer.py`)."""
    has, ptx, module = variant.named(), compiled.asm["ptx"], variant.name.partition(".")[0]
    wrong = [f"no {x}" for x in ON_HOPPER if x not in ptx]
    wrong += [f"an overwritten barrier at {at}" for at in overwritten_barriers(ptx)]
    if module == "gather_attention_hopper":
        return wrong + unordered(ptx)
    alone = module == "sparse_attention_hopper" and has["CONSUMERS"] == 2 and has["DV"] == 64
    barriers, others = ping_pong_barriers(ptx)
    if others or len(barriers) != 2 * alone:
        wrong.append(f"ping-pong barriers {sorted(barriers)}, wrong: {others}")
    # With one stage a step waits for its product with values before the powers, and no order is asked for.
    if module == "sparse_attention_hopper" and has["STAGES"] > 1:
        wrong += wrong_order(code_of(compiled), consumers=has["CONSUMERS"], scores=scores_in_fp32(variant))
    return wrong


def scores_in_fp32(variant: Variant) -> int:
    """Weights of a thread that stay in fp32 in a step: of narrow values, where a row has no maximum of its own."""
    has, softcap = variant.named(), variant.signature["reference"] != "constexpr"
    return 0 if softcap or has["DV"] != 64 else has["BLOCK_N"] // 2


def code_of(compiled: Any) -> list[tuple[int, str]]:
    with tempfile.TemporaryDirectory() as folder:
        (cubin := Path(folder, "kernel.cubin")).write_bytes(compiled.asm["cubin"])
        return machine_code(cubin)


def order_of_one() -> int:
    """What is wrong with the order of one kernel, and of the same PTX without the branches that keep this order."""
    (variant,) = (
        x for x, titles in variants("sm_90", "bf16", 64, hopper=True).values()
        if x.name == "sparse_attention_hopper._kernel" and "mean_pooling" in titles
    )  # fmt: skip
    kernel = variant.compiled(triton_target(TARGETS["sm_90"]))
    how = {"consumers": 2, "scores": scores_in_fp32(variant)}
    wrong = wrong_order(code_of(kernel), **how)
    without, branches = re.subn(r"setp\.lt\.f32 p, c, \S+; @p bra DONE; ", "", kernel.asm["ptx"])
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        assembled(without, get_ptxas(90).path, cubin)
        seen = wrong_order(machine_code(cubin), **how)
    print(f"Triton {triton.__version__}, wrong order: {wrong}; without {branches} branches: {seen}")
    return int(bool(wrong) or not seen)


def least_shared(name: str) -> int:
    """Bytes that a program may take on this target, or on each GPU of its kind where it stands for them."""
    has = TARGETS[name]
    alike = [
        x.shared
        for x in TARGETS.values()
        if (x.is_nvidia, x.warp) == (has.is_nvidia, has.warp) and x.name != "sm_75"
    ]
    return min(alike)


def multiplies(kernel: str) -> bool:
    return not MULTIPLY.isdisjoint({kernel, kernel.partition(".")[0]})


def against(said: dict[str, Any]) -> list[str]:
    """What is wrong with a kernel."""
    if "failed" in said:
        return ["it does not compile"]
    module = said["kernel"].partition(".")[0]
    alone = multiplies(said["kernel"]) or module in ONLY_HOPPER
    has = TARGETS[said["target"]].shared if alone else least_shared(said["target"])
    wrong = list(said["broken"])
    if said["multiplies"] and not alone:
        wrong.append("it multiplies matrices, so MULTIPLY lacks it")
    if said["shared"] > has:
        wrong.append(f"it takes more than the {has} B that there are")
    if said["needed"] is not None and said["shared"] > said["needed"]:
        wrong.append(f"it takes more than the {said['needed']} B that were foretold")
    if (
        module in MAIN
        and said["dtype"] != "fp32"
        and said["spills"]
        and (said["target"], said["D"]) not in MAY_SPILL
    ):
        wrong.append("it spills")
    return wrong


def line(said: dict[str, Any]) -> str:
    """A kernel and what the compiler says of it, to read."""
    what = "{target} {dtype} D={D} {kernel}".format(**said)
    launched = " ".join(f"{name}={value}" for name, value in said["constants"].items() if name in SHOWN)
    if "failed" in said:
        return f"{what} {launched}: {said['failed']}"
    return f"{what} {launched}: {said['shared']} B shared, {said['registers']} registers, {said['spills']} spilled"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=[x for x in TARGETS if x != "sm_75"])
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--dims", nargs="*", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--order", action="store_true", help="only the order of one kernel for Hopper")
    parser.add_argument(
        "--once", action="store_true", help="each kernel once, for further targets only if it multiplies"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if args.order:
        return order_of_one()
    failed, reports, seen = 0, [], set()
    for name in args.targets:
        for dtype in args.dtypes:
            for head_dim in (x for x in DIMS[dtype] if not args.dims or x in args.dims):
                launched = variants(name, dtype, head_dim)
                if name == "sm_90":
                    launched |= variants(name, dtype, head_dim, hopper=True)
                for variant, presets in launched.values():
                    sizes = {x: size for x, size in variant.named().items() if x not in ("Q_SPLIT", "K_SPLIT")}
                    kind = f"{name} {variant.name}" + f" {variant.dtypes()} {sizes}" * (not args.once)
                    wanted = name == args.targets[0] if args.once else name in KINDS
                    if kind in seen or not (multiplies(variant.name) or wanted):
                        continue
                    seen.add(kind)
                    said = report(name, dtype, head_dim, variant)
                    wrong = against(said)
                    failed += bool(wrong)
                    reports.append({**said, "presets": sorted(presets)})
                    print(line(said), *wrong, sep="; ", flush=True)
    if args.json:
        args.json.write_text("[\n" + ",\n".join(map(json.dumps, reports)) + "\n]\n")
    print(f"{len(reports)} kernels with Triton {triton.__version__}, {failed} of them wrong")
    return int(failed > 0)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
