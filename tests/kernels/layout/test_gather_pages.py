"""Keys and values leave their pages as they are, in every layout of a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.layout.gather import gather_pages
from blocksparse.kernels.layout.gather_triton import gather_pages_triton


def cached(layout: str, pages: int, page: int, dims: tuple[int, int], device: str) -> tuple[Tensor, Tensor]:
    """Keys and values `[pages, 2, page, D]` with other strides."""
    D, Dv = dims
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float16).to(device)

    if layout == "joined":
        keys, values = drawn(pages, 2, page, D + Dv).split([D, Dv], -1)
        return keys, values
    if layout == "tokens first":
        return drawn(pages, page, 2, D).transpose(1, 2), drawn(pages, page, 2, Dv).transpose(1, 2)
    return drawn(pages, 2, D, page).mT, drawn(pages, 2, page, Dv)  # keys by number of the head dim


@pytest.mark.parametrize("layout", ["joined", "tokens first", "dims first"])
@pytest.mark.parametrize(("page", "N"), [(1, 37), (16, 64), (16, 65), (48, 200)])
@pytest.mark.parametrize("dims", [(16, 16), (20, 8)])
def test_pages_in_any_order(layout: str, page: int, N: int, dims: tuple[int, int], device: str) -> None:
    columns = -(-N // page)
    keys, values = cached(layout, columns + 2, page, dims, device)
    pages = torch.randperm(columns + 2, generator=torch.Generator().manual_seed(1))[: columns + 1].int().to(device)
    pages[columns:] = 10**6  # is not read
    got, expected = (
        [x.new_full((1, 2, N + 3, d), 7.0) for x, d in zip((keys, values), dims, strict=True)] for _ in "12"
    )
    for gather, out in ((gather_pages_triton, got), (gather_pages.reference, expected)):
        gather(keys, values, pages, *(x[:, :, :N] for x in out))
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)
        assert (x[:, :, N:] == 7).all()
    for t in (0, N // 2, N - 1):
        assert torch.equal(got[0][0, :, t], keys[pages[t // page], :, t % page])
        assert torch.equal(got[1][0, :, t], values[pages[t // page], :, t % page])
