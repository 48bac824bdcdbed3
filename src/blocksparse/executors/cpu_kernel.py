"""Status of the compiled CPU kernel, and its compilation in advance."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from blocksparse.calls.inputs import differentiates
from blocksparse.checks.user_error import UserError
from blocksparse.kernels.attention.cpu_attention import SOURCE, cpu_kernel, cpu_kernel_refuses, cpu_products
from blocksparse.kernels.common.compiled import UnavailableError, compile_for_wheel, load
from blocksparse.kernels.scoring import cpu_scores

_SOURCES = SOURCE, cpu_scores.SOURCE

# Queries of a call from which the kernel is faster than PyTorch's: it packs keys first, which pays off with many.
_QUERIES = 64


def takes_dense(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel runs dense attention on these inputs, where it is faster than PyTorch's."""
    return q.shape[2] >= _QUERIES and not differentiates(q, k, v) and not cpu_kernel_refuses(q, k, v)


def about_kernel() -> str:
    """A phrase: that attention on this CPU runs by the compiled kernel, or why not."""
    found = cpu_kernel()
    if found.why_not is not None:
        return f"no compiled kernel: {found.why_not}"
    return f"compiled kernel, which multiplies bf16 as {cpu_products()}"


def compile_kernels() -> list[tuple[Path | None, float]]:
    """Compile the kernels again: where each is, None if it cannot be kept, and how many seconds that took.

    Raises:
        UserError: one cannot be compiled.
    """
    made = []
    for source in _SOURCES:
        found = load(source, anew=True)
        if found.why_not is not None:
            raise UserError(f"{source.name} cannot be compiled: {found.why_not}")
        made.append((found.path, found.seconds))
    return made


def compile_kernels_for_wheel(package: Path) -> list[Path]:
    """Compile the kernels for every kind of CPU that a wheel serves, into `package`, the folder of this package.

    Raises:
        UserError: one cannot be compiled.
    """
    home = SOURCE.parents[2]
    try:
        return [
            path
            for source in _SOURCES
            for path in compile_for_wheel(source, package / source.relative_to(home).parent / "compiled")
        ]
    except UnavailableError as error:
        raise UserError(f"the kernels cannot be compiled: {error}") from None
