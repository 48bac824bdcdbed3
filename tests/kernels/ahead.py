"""Targets that are not here, for the scripts that compile kernels for them."""

from __future__ import annotations

import os
import re
from typing import TypeVar

from triton.backends.compiler import GPUTarget

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # which every launch asks for (`runtime/launches.py`)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MATRIX_INSTRUCTION = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "v_mfma"}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}  # bytes per program
TEXT = {"cuda": "ptx", "hip": "amdgcn"}
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}


def fp32_products(target: GPUTarget) -> str:
    """How kernels multiply fp32 numbers there; `kernels.common.hardware` asks which PyTorch runs."""
    return "tf32x3" if target.backend == "cuda" else "ieee"


Variant = TypeVar("Variant")


def for_target(name: str, *variants: Variant) -> tuple[Variant, ...]:
    """All variants of a kernel for sm_90, the first for other targets: a compilation takes a second and more."""
    return variants if name == "sm_90" else variants[:1]


def multiplies_only(name: str) -> bool:
    """Whether only kernels with products are compiled for a target: on sm_80 all others are those of sm_90."""
    return name == "sm_80"


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
