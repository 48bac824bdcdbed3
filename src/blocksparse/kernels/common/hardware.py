"""What the hardware can do: the questions that several kernels and executors ask, in one place."""

from __future__ import annotations

import torch
from torch import Tensor


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
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)


def has_large_memory(x: Tensor) -> bool:
    """Whether a program may have 227 KiB of shared memory, as on Hopper and its successor.

    Small GPUs of higher compute capability have less.
    """
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def converts_to_fp8(x: Tensor) -> bool:
    """Whether the GPU of `x` converts to fp8 (e4m3) in hardware, as NVIDIA's do from Ada on."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 9)
