"""An operation, which takes its kernel or not, and its kernel itself, against what the operation means: its reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=draws(seed)).to(dtype).to(device)


def chosen(*shape: int, share: float, device: str = "cpu", seed: int = 0) -> Tensor:
    """Bool; each entry is True with the chance `share`."""
    return (torch.rand(*shape, generator=draws(seed)) < share).to(device)


def order(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """Index maps `[..., N]`, int32."""
    return torch.rand(*shape, generator=draws(seed)).argsort(-1).int().to(device)


def transposed(x: Tensor, *axes: int) -> Tensor:
    """`x` with these two axes exchanged in memory: (1, 2) is `[B, N, H, D]`, as hosts have it."""
    return x.transpose(*axes).contiguous().transpose(*axes)


def assert_same(operation: Any, *given: Any, **named: Any) -> Any:
    """The numbers and dtypes are the reference's, NaN where it has NaN; they are returned."""
    want = operation.reference(*given, **named)
    for compute in (operation.kernel(), operation):
        for ours, its in _pairs(compute(*given, **named), want):
            torch.testing.assert_close(ours, its, rtol=0, atol=0, equal_nan=True)  # and shape and dtype
    return want


def assert_near(operation: Any, *given: Any, rtol: float, atol: float, **named: Any) -> Any:
    """Numbers in fp32, as near to those of the reference in float64, which are returned."""
    want = operation.reference(*map(_wide, given), **{name: _wide(x) for name, x in named.items()})
    for compute in (operation.kernel(), operation):
        for ours, its in _pairs(compute(*given, **named), want):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), its.double(), rtol=rtol, atol=atol, equal_nan=True)
    return want


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _pairs(got: Any, want: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of both, in order; where one has None, so has the other."""
    got, want = ([x] if isinstance(x, Tensor) else list(x) for x in (got, want))
    for ours, its in zip(got, want, strict=True):
        assert (ours is None) == (its is None)
        if its is not None:
            yield ours, its
