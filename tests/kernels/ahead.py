"""Targets that are not here, for the scripts that compile kernels for them."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget

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


def as_on_hopper(name: str, dtype: str) -> bool:
    """Whether sm_90 has compiled the same: exact fp32 products run on the ordinary units, and take longest to compile."""
    return name == "sm_100" and dtype == "fp32"
