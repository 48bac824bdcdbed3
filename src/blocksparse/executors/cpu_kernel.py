"""Whether attention on a CPU runs by the compiled kernel, and how that is compiled ahead of its first call."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from blocksparse.inputs import differentiates
from blocksparse.kernels.attention.cpu_attention import SOURCE, cpu_kernel, cpu_kernel_refuses, cpu_products
from blocksparse.kernels.common.compiled import UnavailableError, compile_for_wheel, load
from blocksparse.user_error import UserError

# Queries of a call from which the kernel is faster than PyTorch's: it packs keys first, which pays off with many.
_QUERIES = 64


def takes_dense(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether dense attention of these runs by the kernel, because that is faster than PyTorch's.

    Where a CPU has matrix units for bf16 (Intel's AMX), PyTorch's dense attention uses them, and is taken.
    """
    if q.shape[2] < _QUERIES or differentiates(q, k, v) or cpu_kernel_refuses(q, k, v):
        return False
    return q.dtype != torch.bfloat16 or cpu_products() != "AMX"


def about_kernel() -> str:
    """A phrase: that attention on this CPU runs by the compiled kernel, or why not."""
    found = cpu_kernel()
    if found.why_not is not None:
        return f"no compiled kernel: {found.why_not}"
    return f"compiled kernel, which multiplies bf16 as {cpu_products()}"


def compile_kernel() -> tuple[Path | None, float, str]:
    """Compile the kernel anew: where it is, unless it cannot be kept; in how many seconds; how it multiplies bf16.

    Raises:
        UserError: it cannot be compiled.
    """
    found = load(SOURCE, anew=True)
    if found.why_not is not None:
        raise UserError(f"the kernel cannot be compiled: {found.why_not}")
    return found.path, found.seconds, cpu_products()


def compile_kernels_for_wheel(folder: Path) -> list[Path]:
    """Compile the kernel for every kind of CPU that a wheel serves, into `folder`.

    Raises:
        UserError: it cannot be compiled.
    """
    try:
        return compile_for_wheel(SOURCE, folder)
    except UnavailableError as error:
        raise UserError(f"the kernel cannot be compiled: {error}") from None
