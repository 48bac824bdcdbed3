"""Operations with a reference implementation in plain torch, and a kernel for some of the calls.

    @on_gpus(torch.float32)
    def run_sums(x: Tensor, run: int) -> Tensor: ...

is `run_sums_triton`, of the module of the same name and with the same arguments, for fp32 on a GPU. Every other call
runs the function as written, and so does every call of `run_sums.reference`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, final

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@final
class Dispatched(Generic[P, R]):
    """An operation: `kernel` for the calls that `takes` says, `otherwise` for the others."""

    def __init__(
        self, otherwise: Callable[P, R], takes: Callable[..., bool], kernel: Callable[[], Callable[P, R]]
    ) -> None:
        functools.update_wrapper(self, otherwise)
        self.reference: Callable[P, R] = getattr(otherwise, "reference", otherwise)
        self.kernel = functools.cache(kernel)
        self.otherwise, self._takes = otherwise, takes

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        return (self.kernel() if self._takes(*args, **named) else self.otherwise)(*args, **named)

    def __reduce__(self) -> str:
        """Copied and pickled by name, as functions are."""
        name: str = self.__dict__["__qualname__"]
        return name


def on_gpus(
    *dtypes: torch.dtype,
    of: Callable[..., Tensor] = lambda x, *_, **__: x,
    where: Callable[..., bool] | None = None,
) -> Callable[[Callable[P, R]], Dispatched[P, R]]:
    """The operation is a Triton kernel for tensors on a GPU, of these dtypes or, if there are none here, of any.

    A function `name` of the module `path` takes `name_triton` of `path_triton`, which is imported at the first such call.

    Args:
        of: gives the tensor that decides, of all arguments of a call. The first one unless given.
        where: whether the kernel takes a call of such a tensor, by all of its arguments. All of them unless given.
    """

    def takes(*args: Any, **named: Any) -> bool:
        x = of(*args, **named)
        return x.is_cuda and (not dtypes or x.dtype in dtypes) and (where is None or where(*args, **named))

    def dispatched(otherwise: Callable[P, R]) -> Dispatched[P, R]:
        module, name = f"{otherwise.__module__}_triton", f"{otherwise.__name__}_triton"
        return Dispatched(otherwise, takes, lambda: getattr(importlib.import_module(module), name))

    return dispatched


def compiled(kernel: Callable[P, R], takes: Callable[..., bool]) -> Callable[[Callable[P, R]], Dispatched[P, R]]:
    """The operation is this function for the calls that `takes` says, by all of their arguments."""
    return lambda otherwise: Dispatched(otherwise, takes, lambda: kernel)
