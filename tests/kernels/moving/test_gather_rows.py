"""Rows move as they are: every result is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.moving.gather_rows import gather_rows_reference, scatter_rows_reference
from blocksparse.kernels.moving.gather_rows_triton import gather_rows_triton, scatter_rows_triton


def order(*shape: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator).argsort(-1).int().to(device)


def rows(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


@pytest.mark.parametrize("N", [1, 63, 65, 127, 129, 200, 1000])
@pytest.mark.parametrize("group", [1, 3])
def test_lengths_and_groups(N: int, group: int, device: str) -> None:
    x, y = rows(2, 2, N, 64, device=device), rows(2, 2, N, 16, device=device)
    index = order(2, 2 * group, N, device=device)
    got = gather_rows_triton((x, y), index)
    assert torch.equal(got[0], gather_rows_reference(x, index))
    assert torch.equal(got[1], gather_rows_reference(y, index))


@pytest.mark.parametrize("D", [1, 5, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_head_dims_and_dtypes(D: int, dtype: torch.dtype, device: str) -> None:
    x = rows(1, 2, 65, D, device=device).mul(50).abs().to(dtype)
    index = order(1, 2, 65, device=device)
    assert torch.equal(gather_rows_triton((x,), index)[0], gather_rows_reference(x, index))
    assert torch.equal(scatter_rows_triton(x, index), scatter_rows_reference(x, index))


def test_layouts_and_broadcast_maps(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; orders of tokens on a grid are one map for all heads."""
    x = rows(2, 70, 3, 32, device=device).transpose(1, 2)
    index = order(70, device=device).expand(2, 3, 70)
    assert torch.equal(gather_rows_triton((x,), index)[0], gather_rows_reference(x, index))
    assert torch.equal(scatter_rows_triton(x, index), scatter_rows_reference(x, index))
    last_axis_apart = rows(2, 3, 32, 70, device=device).mT
    assert torch.equal(
        gather_rows_triton((last_axis_apart,), index)[0], gather_rows_reference(last_axis_apart, index)
    )
    part = order(2, 3, 70, device=device)[..., ::2]
    assert torch.equal(gather_rows_triton((x,), part)[0], gather_rows_reference(x, part))


@pytest.mark.parametrize("trailing", [(), (16,), (3, 4)])
def test_scatter_undoes_gather(trailing: tuple[int, ...], device: str) -> None:
    x, index = rows(2, 3, 129, *trailing, device=device), order(2, 3, 129, device=device)
    flat: Any = x.reshape(2, 3, 129, -1)
    gathered = gather_rows_triton((flat,), index)[0].view(x.shape)
    assert torch.equal(scatter_rows_triton(gathered, index), x)
