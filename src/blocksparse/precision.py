"""What a call computes depends on its inputs alone, not on the autocast that a caller has on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_AS_IT_IS = nullcontext()
# torch.compile compiles anew for each autocast dtype, even where autocast is off: so that is torch's first.
_FIRST_DTYPE = {"cpu": torch.bfloat16, "cuda": torch.float16}


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of `x`; free where it is off anyway."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _AS_IT_IS
    return torch.autocast(device, dtype=_FIRST_DTYPE.get(device), enabled=False)
