"""Rows move as they are: every result is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocksparse.kernels.layout.gather import gather_rows, scatter_rows
from blocksparse.kernels.layout.gather_triton import gather_rows_triton, gather_two_triton, scatter_rows_triton


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
    got = gather_two_triton(x, y, index)
    assert torch.equal(got[0], gather_rows.reference(x, index))
    assert torch.equal(got[1], gather_rows.reference(y, index))


@pytest.mark.parametrize("D", [1, 5, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_head_dims_and_dtypes(D: int, dtype: torch.dtype, device: str) -> None:
    x = rows(1, 2, 65, D, device=device).mul(50).abs().to(dtype)
    index = order(1, 2, 65, device=device)
    assert torch.equal(gather_rows_triton(x, index), gather_rows.reference(x, index))
    assert torch.equal(scatter_rows_triton(x, index), scatter_rows.reference(x, index))


def test_layouts_and_broadcast_maps(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; orders of tokens on a grid are one map for all heads."""
    x = rows(2, 70, 3, 32, device=device).transpose(1, 2)
    index = order(70, device=device).expand(2, 3, 70)
    assert torch.equal(gather_rows_triton(x, index), gather_rows.reference(x, index))
    assert torch.equal(scatter_rows_triton(x, index), scatter_rows.reference(x, index))
    last_axis_apart = rows(2, 3, 32, 70, device=device).mT
    assert torch.equal(gather_rows_triton(last_axis_apart, index), gather_rows.reference(last_axis_apart, index))
    part = order(2, 3, 70, device=device)[..., ::2]
    assert torch.equal(gather_rows_triton(x, part), gather_rows.reference(x, part))


@pytest.mark.parametrize("row", [-1, 70])
def test_a_map_that_names_no_row_of_its_head_is_refused(row: int) -> None:
    index = order(2, 3, 70, device="cpu")
    index[1, 2, 5] = row
    with pytest.raises(IndexError, match="out of range"):
        gather_rows.reference(rows(2, 3, 70, 4, device="cpu"), index)


def test_rows_of_a_far_longer_tensor_are_read_where_they_stand() -> None:
    """Such as a cache of pages, whose heads lie between one another."""
    cache = rows(64, 3, 16, 8, device="cpu")  # pages, heads, tokens of a page, D
    x = cache.as_strided((1, 3, 63 * 48, 8), (0, 128, 8, 1))
    index = order(1, 3, 63 * 48, device="cpu")[..., :5]
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if out.untyped_storage().data_ptr() not in (x.untyped_storage().data_ptr(), index.data_ptr()):
                made.append(out.numel())
            return out

    with Made():  # type: ignore[no-untyped-call]
        got = gather_rows.reference(x, index)
    assert made
    assert max(made) <= got.numel()
    for h in range(3):
        assert torch.equal(got[0, h], x[0, h][index[0, h].long()])


@pytest.mark.parametrize("trailing", [(), (16,), (3, 4)])
def test_scatter_undoes_gather(trailing: tuple[int, ...], device: str) -> None:
    x, index = rows(2, 3, 129, *trailing, device=device), order(2, 3, 129, device=device)
    flat: Any = x.reshape(2, 3, 129, -1)
    gathered = gather_rows_triton(flat, index).view(x.shape)
    assert torch.equal(scatter_rows_triton(gathered, index), x)


@pytest.mark.parametrize(("block", "D"), [(16, 64), (48, 64), (128, 128), (128, 8)])
@pytest.mark.parametrize("shared", [False, True])
def test_only_wanted_blocks_are_moved(block: int, D: int, shared: bool, device: str) -> None:
    """Rows of other blocks are not written, and memory that nobody writes is NaN here."""
    N, blocks = 300, -(-300 // block)
    x, y, index = (
        rows(2, 2, N, D, device=device),
        rows(2, 2, N, 2 * D, device=device),
        order(2, 4, N, device=device),
    )
    heads = (1, 2) if shared else (2, 4)
    wanted = torch.rand(*heads, blocks, generator=torch.Generator().manual_seed(2)).to(device) < 0.5
    written = wanted.repeat_interleave(4 // heads[1], 1).expand(2, -1, -1).repeat_interleave(block, -1)[..., :N]
    assert 0 < written.float().mean() < 1
    for of_part in (wanted, wanted.mT.contiguous().mT):
        for got, source in zip(gather_two_triton(x, y, index, of_part, block), (x, y), strict=True):
            want = gather_rows.reference(source, index)
            assert torch.equal(got.isnan(), ~written.unsqueeze(-1).expand_as(got))
            assert torch.equal(got.nan_to_num(), want.where(written.unsqueeze(-1), 0.0))
