"""Which device is current."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_WHERE_IT_IS = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context in which kernels are launched on the device of `x`, whichever device is current outside."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _WHERE_IT_IS  # to switch to the current device costs the host microseconds a launch
    return torch.cuda.device(x.device)
