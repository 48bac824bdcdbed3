"""Rows, pages and channels move as they are: every result is exact. Only a band's temperature is rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocksparse.kernels.layout.gather import band_channels, gather_pages, gather_rows, gather_two, scatter_rows
from tests.kernels.compare import assert_near, assert_same, chosen, order, randn, transposed

pytest.importorskip("triton")
from blocksparse.kernels.layout.gather_triton import gather_two_triton


@pytest.mark.parametrize("N", [1, 63, 65, 127, 129, 200, 1000])
@pytest.mark.parametrize("group", [1, 3])
def test_lengths_and_groups(N: int, group: int, device: str) -> None:
    x, y = randn(2, 2, N, 64, device=device), randn(2, 2, N, 16, device=device)
    index = order(2, 2 * group, N, device=device)
    for got, source in zip(assert_same(gather_two, x, y, index), (x, y), strict=True):
        assert torch.equal(got, gather_rows.reference(source, index))


@pytest.mark.parametrize("D", [1, 5, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_head_dims_and_dtypes(D: int, dtype: torch.dtype, device: str) -> None:
    x, index = randn(1, 2, 65, D, device=device).mul(50).abs().to(dtype), order(1, 2, 65, device=device)
    assert_same(gather_rows, x, index)
    assert_same(scatter_rows, x, index)


def test_layouts_and_broadcast_maps(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; orders of tokens on a grid are one map for all heads."""
    x, index = randn(2, 70, 3, 32, device=device).transpose(1, 2), order(70, device=device).expand(2, 3, 70)
    assert_same(gather_rows, x, index)
    assert_same(scatter_rows, x, index)
    assert_same(gather_rows, transposed(x, 2, 3), index)
    assert_same(gather_rows, x, order(2, 3, 70, device=device)[..., ::2])


@pytest.mark.parametrize("row", [-1, 70])
def test_a_map_that_names_no_row_of_its_head_is_refused(row: int) -> None:
    index = order(2, 3, 70)
    index[1, 2, 5] = row
    with pytest.raises(IndexError, match="out of range"):
        gather_rows.reference(randn(2, 3, 70, 4), index)


def test_rows_of_a_far_longer_tensor_are_read_where_they_stand() -> None:
    """Such as a cache of pages, whose heads lie between one another."""
    cache = randn(64, 3, 16, 8)  # pages, heads, tokens of a page, D
    x = cache.as_strided((1, 3, 63 * 48, 8), (0, 128, 8, 1))
    index = order(1, 3, 63 * 48)[..., :5]
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


@pytest.mark.parametrize(("block", "D"), [(16, 64), (48, 64), (128, 128), (128, 8)])
@pytest.mark.parametrize("shared", [False, True])
def test_only_wanted_blocks_are_moved(block: int, D: int, shared: bool, device: str) -> None:
    """Rows of other blocks are not written, and memory that nobody writes is NaN here."""
    N, heads = 300, (1, 2) if shared else (2, 4)
    x, y = randn(2, 2, N, D, device=device), randn(2, 2, N, 2 * D, device=device)
    index = order(2, 4, N, device=device)
    wanted = chosen(*heads, -(-N // block), share=0.5, device=device, seed=2)
    written = wanted.repeat_interleave(4 // heads[1], 1).expand(2, -1, -1).repeat_interleave(block, -1)[..., :N]
    assert 0 < written.float().mean() < 1
    for of_part in (wanted, transposed(wanted, 1, 2)):
        for got, source in zip(gather_two_triton(x, y, index, of_part, block), (x, y), strict=True):
            want = gather_rows.reference(source, index)
            assert torch.equal(got.isnan(), ~written.unsqueeze(-1).expand_as(got))
            assert torch.equal(got.nan_to_num(), want.where(written.unsqueeze(-1), 0.0))


def cached(layout: str, pages: int, page: int, dims: tuple[int, int], device: str) -> list[Tensor]:
    """Keys and values `[pages, 2, page, D]` with other strides."""
    D, Dv = dims
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    if layout == "joined":
        return list(randn(pages, 2, page, D + Dv, **half).split([D, Dv], -1))
    if layout == "tokens first":
        return [randn(pages, page, 2, d, **half).transpose(1, 2) for d in dims]
    keys_by_number = randn(pages, 2, D, page, **half).mT
    return [keys_by_number, randn(pages, 2, page, Dv, **half)]


@pytest.mark.parametrize("layout", ["joined", "tokens first", "dims first"])
@pytest.mark.parametrize(("page", "N"), [(1, 37), (16, 64), (16, 65), (48, 200)])
@pytest.mark.parametrize("dims", [(16, 16), (20, 8)])
def test_pages_in_any_order(layout: str, page: int, N: int, dims: tuple[int, int], device: str) -> None:
    columns = -(-N // page)
    keys, values = cached(layout, columns + 2, page, dims, device)
    pages = torch.randperm(columns + 2)[: columns + 1].int().to(device)
    pages[columns:] = 10**6  # is not read
    for gather in (gather_pages.kernel(), gather_pages.reference):
        k, v = (x.new_full((1, 2, N + 3, x.shape[-1]), 7.0) for x in (keys, values))
        gather(keys, values, pages, k[:, :, :N], v[:, :, :N])
        for x, of in ((k, keys), (v, values)):
            assert (x[:, :, N:] == 7).all()
            whole = of[pages[:columns]].transpose(0, 1).flatten(1, 2)
            assert torch.equal(x[0, :, :N], whole[:, :N])


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize(("D", "first", "end"), [(16, 0, 4), (80, 13, 40), (64, 31, 32)])
def test_band_channels(D: int, first: int, end: int, temperature: float | None, device: str) -> None:
    queries, keys = randn(2, 6, 70, D, device=device), 30 * randn(2, 2, 301, D, device=device, seed=1)
    queries[:, 1] = 0.0  # a head whose root mean squares are the least
    assert_near(band_channels, queries, keys, first, end, temperature, rtol=1e-5, atol=0)


def test_a_head_with_nan_has_no_temperature(device: str) -> None:
    queries, keys = torch.ones(1, 4, 9, 16, device=device), torch.ones(1, 2, 9, 16, device=device)
    queries[0, 1, 3, 2] = keys[0, 1, 4, 15] = float("nan")
    for compute in (band_channels.kernel(), band_channels, band_channels.reference):
        mine, its = compute(queries, keys, 0, 4, None)
        assert mine.isnan().all((0, 2, 3)).tolist() == [False, True, True, True]
        assert mine[:, 0].isfinite().all()
        assert its.isfinite().all()  # the NaN is outside of the band
