"""How much memory the largest tensor takes that a call makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the most numbers, and the most bytes, that lie in the memory of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                taken = x.untyped_storage().nbytes()
                self.numbers = max(self.numbers, taken // x.element_size())
                self.nbytes = max(self.nbytes, taken)
        return out
