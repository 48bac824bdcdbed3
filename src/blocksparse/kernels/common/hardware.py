"""What the hardware has and can do: the questions that several kernels and executors ask, in one place."""

from __future__ import annotations

import functools

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Hardware:
    """What a GPU has, as far as kernels ask.

    A program is what CUDA calls a thread block; a multiprocessor is AMD's compute unit, its shared memory the LDS.
    """

    name: str  # as compilers call the architecture: sm_90, gfx942
    shared: int  # bytes of shared memory that a program may take
    shared_per_sm: int  # bytes of shared memory of a multiprocessor
    registers: int  # 32-bit registers of a multiprocessor
    threads: int  # threads that a multiprocessor holds at a time
    warp: int  # threads of a warp

    @property
    def is_nvidia(self) -> bool:
        return self.name.startswith("sm_")

    @property
    def is_hopper(self) -> bool:
        """The only GPUs on which tiles were measured."""
        return self.capability[0] == 9

    @property
    def is_rdna(self) -> bool:
        """AMD's GPUs for consumers and workstations, with 32 threads a warp and 256 registers a thread."""
        return self.name.startswith("gfx") and self.warp == 32

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether matrix products read their operands from shared memory, not from registers: wgmma and tcgen05."""
        return self.capability[0] in (9, 10, 11)

    @property
    def copies_past_registers(self) -> bool:
        """Whether AMD's GPU copies whole vectors from memory to shared memory by itself, as Triton has it from 3.8 on."""
        return self.name == "gfx950"

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) of sm_90; (0, 0) of GPUs that are not NVIDIA's."""
        return divmod(int(self.name[3:]), 10) if self.is_nvidia else (0, 0)


_KIB = 1024
_NVIDIA, _CDNA, _RDNA = 65536, 131072, 98304  # registers

# From CUDA's table of compute capabilities, and AMD's of accelerators and GPUs.
TARGETS = {
    x.name: x
    for x in (
        Hardware("sm_75", 64 * _KIB, 64 * _KIB, _NVIDIA, 1024, 32),  # T4, RTX 20
        Hardware("sm_80", 163 * _KIB, 164 * _KIB, _NVIDIA, 2048, 32),  # A100
        Hardware("sm_86", 99 * _KIB, 100 * _KIB, _NVIDIA, 1536, 32),  # A10, A40, RTX 30
        Hardware("sm_89", 99 * _KIB, 100 * _KIB, _NVIDIA, 1536, 32),  # L4, L40, RTX 40
        Hardware("sm_90", 227 * _KIB, 228 * _KIB, _NVIDIA, 2048, 32),  # H100, H200, GH200
        Hardware("sm_100", 227 * _KIB, 228 * _KIB, _NVIDIA, 2048, 32),  # B200
        Hardware("sm_120", 99 * _KIB, 100 * _KIB, _NVIDIA, 1536, 32),  # RTX 50, RTX PRO 6000
        Hardware("gfx90a", 64 * _KIB, 64 * _KIB, _CDNA, 2048, 64),  # MI210, MI250
        Hardware("gfx942", 64 * _KIB, 64 * _KIB, _CDNA, 2048, 64),  # MI300, MI325
        Hardware("gfx950", 160 * _KIB, 160 * _KIB, _CDNA, 2048, 64),  # MI350, MI355
        Hardware("gfx1100", 64 * _KIB, 64 * _KIB, _RDNA, 1024, 32),  # RX 7900
        Hardware("gfx1201", 64 * _KIB, 64 * _KIB, _RDNA, 1024, 32),  # RX 9070
    )
}
INTERPRETER = Hardware("interpreter", 2**30, 2**30, _NVIDIA, 2048, 32)
"""Triton's interpreter on a CPU, which runs tiles of every size."""


def hardware_of(x: Tensor) -> Hardware:
    """What the GPU of `x` has; `INTERPRETER` for tensors on a CPU."""
    return _asked(x.get_device()) if x.is_cuda else INTERPRETER


@functools.lru_cache(maxsize=64)
def _asked(index: int) -> Hardware:
    """What PyTorch says that GPU `index` has. Some builds do not say how much memory a program may opt in to."""
    has = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    name = has.gcnArchName.partition(":")[0] if amd else f"sm_{has.major}{has.minor}"
    known = TARGETS.get(name)
    shared = known.shared if known else has.shared_memory_per_block
    per_sm = known.registers if known else _CDNA if amd else _NVIDIA
    return Hardware(
        name,
        getattr(has, "shared_memory_per_block_optin", 0) or shared,
        has.shared_memory_per_multiprocessor,
        getattr(has, "regs_per_multiprocessor", 0) or per_sm,
        has.max_threads_per_multi_processor,
        has.warp_size,
    )


def fp32_products() -> str:
    """How kernels multiply fp32 numbers, as Triton names it; other dtypes are not concerned.

    "tf32x3" splits each number into two of TF32 and adds three products in the tensor cores. That errs no more than
    single products of fp32 ("ieee") do, and is many times as fast, since Triton compiles tiles of those to code that
    keeps almost nothing in registers. AMD's GPUs multiply fp32 as it is.
    """
    return "tf32x3" if torch.version.hip is None else "ieee"


def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.x, and so its products of warp groups and its bulk copy engine."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def has_descriptors(x: Tensor) -> bool:
    """Whether the GPU of `x` has tensor descriptors, as Hopper and later ones do; elsewhere Triton would emulate them."""
    return x.is_cuda and hardware_of(x).capability >= (9, 0)


def converts_to_fp8(x: Tensor) -> bool:
    """Whether the GPU of `x` converts to fp8 (e4m3) in hardware, as NVIDIA's do from Ada on."""
    return x.is_cuda and hardware_of(x).capability >= (8, 9)
