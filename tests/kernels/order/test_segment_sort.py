"""The order is exactly that of a stable descending torch.sort, or of one of the values' upper bits."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.order.segments import segment_sort
from blocksparse.kernels.order.segments_triton import segment_sort_triton


@pytest.mark.slow
@pytest.mark.parametrize(
    ("N", "S"),
    [
        *((N, S) for N in (1, 63, 65, 127, 129, 200, 1000) for S in (2, 16)),
        *((2 * S + 3, S) for S in (64, 256, 512)),
    ],
)
def test_lengths_and_segments(N: int, S: int, device: str) -> None:
    values = torch.randn(1, 2, N, generator=torch.Generator().manual_seed(N)).to(device)
    for coarse in (False, True):
        assert torch.equal(segment_sort_triton(values, S, coarse), segment_sort.reference(values, S, coarse))


def test_ties_zeros_nans_and_infinities(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    odd = torch.tensor([0.0, -0.0, nan, 1.0, -inf, inf, -nan, 1.0, -1.0, 1e-45, -1e-45, 0.0, -0.0, inf, nan, -1.0])
    values = torch.stack((odd, odd.flip(0), torch.zeros(16), torch.full((16,), nan))).repeat(1, 2)[None].to(device)
    values = values[..., :30]  # a tail, too
    for S in (16, 8):
        want = segment_sort.reference(
            values.cpu(), S
        )  # a GPU's torch takes the NaN of negative sign for the least
        assert torch.equal(segment_sort_triton(values, S).cpu(), want)
        # Coarse, the two least numbers above and below 0 are 0 and the number below it.
        merged = values.cpu().masked_fill(values.cpu() == 1e-45, 0.0)
        for coarse in (segment_sort.reference(values.cpu(), S, True), segment_sort_triton(values, S, True).cpu()):
            assert torch.equal(coarse, segment_sort.reference(merged, S))


def test_coarse(device: str) -> None:
    """Without the lowest 7 bits; what differs in those alone keeps its order, on both sides of 0."""
    steps = 64 * torch.randint(-3, 3, (1, 1, 128), generator=torch.Generator().manual_seed(0)).int()
    for base, flip in ((1.0, 0), (-1.0, 0x7FFFFFFF)):
        rank = (torch.tensor(base).view(torch.int32) ^ flip) + steps
        values, kept = ((x ^ flip).view(torch.float32).to(device) for x in (rank, rank >> 7 << 7))
        want = segment_sort.reference(kept, 128)
        assert torch.equal(segment_sort_triton(values, 128, True), want)
        assert torch.equal(segment_sort.reference(values, 128, True), want)
        assert not torch.equal(segment_sort.reference(values, 128), want)


@pytest.mark.parametrize("P", [1, 3, 4, 7])
def test_parts_are_added_up(P: int, device: str) -> None:
    parts = torch.rand(2, 2, P, 100, generator=torch.Generator().manual_seed(0)).to(device)
    by_fours = [parts[:, :, first::4].cumsum(2)[:, :, -1] for first in range(min(P, 4))]
    values = torch.stack(by_fours).cumsum(0)[-1]
    assert torch.equal(segment_sort_triton(parts, 16), segment_sort.reference(values, 16))
    whole = parts.mul(64).round()  # sums of integers do not depend on their order
    assert torch.equal(segment_sort_triton(whole, 16), segment_sort(whole, 16))
    assert torch.equal(segment_sort.reference(whole, 16), segment_sort.reference(whole.sum(2), 16))


def test_few_values_many_ties(device: str) -> None:
    values = torch.randint(0, 3, (1, 2, 300), generator=torch.Generator().manual_seed(0)).float().to(device)
    for coarse in (False, True):
        assert torch.equal(segment_sort_triton(values, 128, coarse), segment_sort.reference(values, 128))


@pytest.mark.parametrize("S", [1, 48, 1000])
def test_other_segments_take_torchs_sort(S: int, device: str) -> None:
    values = torch.rand(1, 2, 200, generator=torch.Generator().manual_seed(0)).to(device)
    for coarse in (False, True):
        assert torch.equal(segment_sort(values, S, coarse=coarse), segment_sort.reference(values, S, coarse))
