"""Targets that are not here, and what a kernel that is compiled for one takes and waits for."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas

from blocksparse.kernels.common import hardware

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # which every launch asks for (`launch/launches.py`)


def triton_target(has: hardware.Hardware) -> GPUTarget:
    """The target as Triton names it."""
    if has.is_nvidia:
        return GPUTarget("cuda", int(has.name[3:]), has.warp)
    return GPUTarget("hip", has.name, has.warp)


def overwritten_barriers(ptx: str) -> list[int]:
    """Offsets in shared memory of barriers where the program also stores what is no barrier.

    Barriers are made at an offset that is added to a register, and what the compiler hands from warps to other warps is
    stored at constant offsets.
    """
    bases = set(re.findall(r"mov\.b\d+\s+(%r\d+), global_smem;", ptx))
    offset = {
        to: int(by) for to, base, by in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx) if base in bases
    }
    barriers = [offset[register] for register in re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx)]
    assert barriers
    stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem\+(\d+)\]", ptx)
    assert stores
    stored = {int(at) + i for lanes, bits, at in stores for i in range(int(lanes or 1) * int(bits) // 8)}
    return [at for at in barriers if stored & set(range(at, at + 8))]


def ping_pong_barriers(ptx: str, threads: int = 256) -> tuple[set[str], list[str]]:
    """Named barriers that so many threads meet at, as ping-pong scheduling does, and those of them that are wrong.

    The hardware has 16, and whoever writes a number in a kernel shares them with the compiler, whose own roles of warps take some
    too. So one is wrong if it is none of the 16, if nobody waits for it or nobody gives it, or if others meet at it as well.
    All are wrong if the compiler names one by a register, for that may be any.
    """
    found = re.findall(r"\bbar(?:rier)?(?:\.cta)?\.(sync|arrive|red)\S*\s+(%?\w+)(?:,\s*(\d+))?", ptx)
    assert found
    meeting: dict[str, set[str]] = {}
    others = {number for _, number, count in found if count != str(threads)}
    for operation, number, count in found:
        if count == str(threads):
            meeting.setdefault(number, set()).add(operation)
    numbers = {str(i) for i in range(16)}
    named = others <= numbers
    wrong = [
        x
        for x, how in meeting.items()
        if how != {"sync", "arrive"} or x in others or x not in numbers or not named
    ]
    return set(meeting), wrong


def unordered(ptx: str) -> list[str]:
    """Where matrix products might read rows that other threads of the gather kernel for Hopper are still writing.

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
    return found if steps.count("cp.async.wait_group") else ["no copies"]


def report_of(compiled: Any) -> dict[str, int]:
    """What the compiler says that a kernel takes: bytes of shared memory of a program, registers of a thread, and what
    of a thread had no room in them, in bytes on NVIDIA's GPUs, else in registers.
    """
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            tools = Path(triton.__file__).parent / "backends/nvidia/bin"
            command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", said)[0]
        spills = _stored(compiled, int(stack)) if int(stack) else 0
    else:
        text = compiled.asm["amdgcn"]
        registers, spills = (re.findall(rf"\.{x}:\s+(\d+)", text)[0] for x in ("vgpr_count", "vgpr_spill_count"))
    return {"shared": compiled.metadata.shared, "registers": int(registers), "spills": int(spills)}


def _stored(compiled: Any, stack: int) -> int:
    """Bytes of a thread that ptxas stores elsewhere for want of registers, asked as Triton asks it.

    All of the stack where it does not say: some versions of Triton ask for more.
    """
    arch = compiled.metadata.target.arch
    own = ["--regAllocOptLevel=2"] if "--regAllocOptLevel=2" in inspect.getsource(CUDABackend.make_cubin) else []
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        gpu = f"sm_{arch}{'a' * (arch >= 90)}"
        command = [get_ptxas(arch).path, "-v", *own, f"--gpu-name={gpu}", file.name, "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
    stores = re.findall(r"(\d+) bytes spill stores", result.stderr)
    return stack if result.returncode else sum(map(int, stores))
