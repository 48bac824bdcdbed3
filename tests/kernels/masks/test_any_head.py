"""What any of several heads keeps: the Triton kernel against plain torch."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.masks.visibility import any_head, visited_columns

pytest.importorskip("triton")
from blocksparse.kernels.masks.visibility_triton import any_head_triton, visited_columns_triton


def test_visited_columns_are_those_of_all_rows_and_the_first(device: str) -> None:
    keep = torch.zeros(2, 4, 3, 5, dtype=torch.bool)
    keep[0, 0, 1, 2] = keep[0, 1, 2, 4] = keep[1, 3, 0, 3] = True
    assert visited_columns(keep, 2).int().tolist() == [
        [[1, 0, 1, 0, 1], [1, 0, 0, 0, 0]],
        [[1, 0, 0, 0, 0], [1, 0, 0, 1, 0]],
    ]
    assert visited_columns(keep, 4).sum().item() == 8 + 3
    assert visited_columns(keep[:, :1].expand(-1, 4, -1, -1), 2)[0, 1].int().tolist() == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (3, 1), (3, 200), (40, 7)])
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_the_kernel_is_its_reference(heads: int, rows: int, cols: int, device: str) -> None:
    whole = torch.rand(2, 6, rows, cols + 1, generator=torch.Generator().manual_seed(0)) < 0.1
    for keep in (whole[..., 1:], whole[..., 1:].contiguous(), whole[:, :1, :, 1:].expand(-1, 6, -1, -1)):
        given = keep.to(device)
        assert torch.equal(any_head_triton(given, heads).cpu(), any_head(keep.cpu(), heads))
        assert torch.equal(visited_columns_triton(given, heads).cpu(), visited_columns(keep.cpu(), heads))
