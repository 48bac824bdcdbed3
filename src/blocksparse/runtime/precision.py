"""The dtypes of calls. Autocast is off inside of one, so that its result depends on its inputs alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

AUTOCAST_TAKES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*AUTOCAST_TAKES, torch.float64)
"""What q, k and v may be of."""

_AS_IT_IS = nullcontext()
# torch.compile recompiles when the autocast dtype changes, even with autocast off: so it is set to the default.
_FIRST_DTYPE = {"cpu": torch.bfloat16, "cuda": torch.float16}


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of `x`. It does nothing if autocast is off already."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _AS_IT_IS
    return torch.autocast(device, dtype=_FIRST_DTYPE.get(device), enabled=False)
