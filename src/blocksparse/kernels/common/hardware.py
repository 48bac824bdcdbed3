"""What the hardware can do, asked once and in one place."""

from __future__ import annotations

import torch
from torch import Tensor


def device_of(x: Tensor) -> torch.cuda.device | torch.device:
    """A context in which to launch on the tensor's own device, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.device(x.device)


def is_hopper(device: torch.device) -> bool:
    """Whether warp-group products and the bulk copy engine of compute capability 9.x are there."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def has_descriptors(x: Tensor) -> bool:
    """Whether the GPU of `x` has tensor descriptors, Hopper or later; elsewhere Triton would emulate them."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)


def has_large_memory(x: Tensor) -> bool:
    """Whether a program may have 227 KiB of shared memory: Hopper and its successor; small GPUs of later numbers have less."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def converts_to_fp8(x: Tensor) -> bool:
    """Whether the GPU of `x` converts to fp8 (e4m3) in hardware: NVIDIA's from Ada on."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 9)
