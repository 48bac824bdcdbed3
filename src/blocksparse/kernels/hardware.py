"""What the hardware can do, asked once and in one place."""

from __future__ import annotations

import torch
from torch import Tensor


def is_hopper(device: torch.device) -> bool:
    """Whether warp-group products and the bulk copy engine of compute capability 9.x are there."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def copies_in_bulk(x: Tensor) -> bool:
    """Whether tensor descriptors can read `x`: rows contiguous, and aligned to 16 bytes."""
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    )
