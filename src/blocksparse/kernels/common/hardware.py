"""What a GPU can do, and the shared memory that kernels need of it.

That memory is an upper bound of what Triton's compiler reports. `python -m tests.kernels.compile_ahead` compares the two for
every target and kernel (docs/support.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Hardware:
    """The properties of a GPU that kernels need.

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
    """The properties of the GPU of `x`; `INTERPRETER` for tensors on a CPU."""
    return _asked(x.get_device()) if x.is_cuda else INTERPRETER


@functools.lru_cache(maxsize=64)
def _asked(index: int) -> Hardware:
    """The properties that PyTorch reports for GPU `index`. Some builds do not report the memory a program may opt in to."""
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
    """Triton's name for the way in which kernels multiply fp32 numbers; it does not apply to other dtypes.

    "tf32x3" splits each number into two of TF32 and adds three products in the tensor cores. Its error is no larger than
    that of single products of fp32 ("ieee"). It is many times faster, since Triton compiles "ieee" tiles to code that keeps
    almost nothing in registers. AMD's GPUs multiply fp32 as it is.
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


_SMALL = 3072  # bytes for positions, barriers, and what warps tell each other


def needed(
    hardware: Hardware,
    *,
    held: int = 0,
    loaded: tuple[int, ...],
    stages: int,
    between: int = 0,
    then: int = 0,
    single: bool = False,
    second: bool = False,
) -> int:
    """Bytes of shared memory of a program that multiplies tiles in a loop.

    Args:
        held: bytes of the tile that is loaded once. It is multiplied in every step.
        loaded: bytes of each tile that every step loads.
        stages: `num_stages`. The compiler spreads a load and the product that waits for it over so many steps.
        between: bytes of a tile that threads exchange within a step.
        then: the same, when its products are done. 0 if there is none.
        single: whether these are numbers of fp32. NVIDIA's GPUs multiply them in two parts.
        second: whether the second operand is held. AMD's kernels keep it in shared memory as well.
    """
    if single and hardware.is_nvidia:
        held, between, then = 2 * held, 2 * between, 2 * then
    if stages == 1:
        buffers = max(loaded)  # one after the other
    elif hardware.multiplies_from_shared:
        buffers = sum(loaded) * stages  # a product still reads its operands when the next loads begin
    elif hardware.copies_past_registers:
        buffers = sum(loaded) * stages * 17 // 16  # no register holds a tile on its way; rows are padded
    else:
        buffers = sum(loaded) * (stages - 1)
    # Triton 3.8 keeps the second part of a tile that it multiplies in shared memory.
    part = (
        max(loaded) if single and hardware.is_nvidia and stages > 1 and not hardware.multiplies_from_shared else 0
    )
    between += max(part, then)
    if hardware.is_nvidia:
        return held + buffers + between + _SMALL
    if second:
        return held + buffers + between
    return max(held, buffers + between)  # what is held leaves shared memory before the loop begins


def of_attention(
    hardware: Hardware,
    options: dict[str, int],
    row_bytes: int,
    value_bytes: int,
    weight_bytes: int,
    out_bytes: int,
) -> int:
    """Shared memory of attention: a tile of queries is held, tiles of keys and values are loaded, weights change hands.

    A query or a key has `row_bytes`, a value `value_bytes`, a weight `weight_bytes`, and an output `out_bytes`. A tile of
    outputs changes hands at the end.
    """
    M, N, single = options["BLOCK_M"], options["BLOCK_N"], weight_bytes == 4
    # There weights stay in registers, as the first operand of a product may, if each warp has whole rows.
    from_shared, warps = hardware.multiplies_from_shared and not single, options.get("num_warps", 4)
    in_registers = from_shared and 16 * warps <= max(M, 64)
    weight_bytes = 8 if from_shared else weight_bytes
    loop = needed(
        hardware,
        held=M * row_bytes,
        loaded=(N * row_bytes, N * value_bytes),
        stages=options["num_stages"],
        between=0 if in_registers else M * N * weight_bytes,
        single=single,
    )
    return max(loop, M * out_bytes)


def fitted(
    options: dict[str, int], needs: Callable[[dict[str, int]], int], hardware: Hardware, *, rows: bool = True
) -> dict[str, int]:
    """The options of a launch, with smaller tiles and fewer stages while `needs` says that they need too much.

    Options are BLOCK_M, BLOCK_N, num_warps and num_stages, and others, which stay. Without `rows` BLOCK_M stays too. The
    smallest ones are returned even if they do not fit.
    """
    while needs(options) > hardware.shared:
        M, N, stages = options["BLOCK_M"], options["BLOCK_N"], options["num_stages"]
        if stages > 2:
            smaller = {"num_stages": stages - 1}
        elif rows and max(N, 16) < M:
            smaller = {"BLOCK_M": M // 2, "num_warps": min(options["num_warps"], max(M // 32, 4))}
        elif N > 16:
            smaller = {"BLOCK_N": N // 2}
        elif stages > 1:
            smaller = {"num_stages": 1}
        else:
            break
        options = {**options, **smaller}
    return options
