"""Where outputs lie, and which tensors the copy engine is given."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.common.sizes import copies_in_bulk, empty_as, empty_together, for_bulk_copies
from tests.layouts import LAYOUTS

LIKE_Q = {"tokens before heads": (0, 2, 1, 3), "tokens before batch": (2, 0, 1, 3)}


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_lie_as_queries_do(layout: str, width: int) -> None:
    """In the order of the axes of q, densely; contiguous where rows of q are not, or where heads share memory."""
    q = LAYOUTS[layout](torch.zeros(2, 3, 5, 8))
    out = empty_as(q, width, torch.float16)
    assert out.shape == (2, 3, 5, width)
    assert out.dtype == torch.float16
    assert out.permute(LIKE_Q.get(layout, (0, 1, 2, 3))).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64])
def test_tensors_of_one_allocation(dtype: torch.dtype) -> None:
    """Each is contiguous and aligned, and none lies in another's memory."""
    shapes = (2, 3), (1, 1, 5), (), (4, 0), (7,)
    made = empty_together(dtype, torch.device("cpu"), *shapes)
    assert [tuple(x.shape) for x in made] == [*shapes]
    for x in made:
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0
    for i, x in enumerate(made):
        x.fill_(i % 2)
    for i, x in enumerate(made):
        assert bool((x == i % 2).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_descriptors_read(layout: str) -> None:
    """Copied only where rows are not aligned or not dense, or where entries share memory."""
    x = LAYOUTS[layout](torch.randn(2, 3, 5, 8, dtype=torch.float16))
    unfit = "expanded" in layout or layout in (
        "head dim not innermost", "channels last", "odd rows", "offset by one element",
    )  # fmt: skip
    assert copies_in_bulk(x) is not unfit
    copy = for_bulk_copies(x)
    assert copies_in_bulk(copy)
    assert torch.equal(copy, x)
    assert (copy is x) is not unfit


def test_axes_of_one_entry() -> None:
    """Their strides mean nothing to torch, and much to a descriptor."""
    x = torch.zeros(64, dtype=torch.float16).as_strided((1, 1, 4, 16), (1, 3, 16, 1))
    assert x.is_contiguous()
    assert not copies_in_bulk(x)
    assert for_bulk_copies(x).stride() == (64, 64, 16, 1)
