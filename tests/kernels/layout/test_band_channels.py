"""Channels of a band and its temperature: the Triton kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.layout.gather import band_channels

pytest.importorskip("triton")
from blocksparse.kernels.layout.gather_triton import band_channels_triton


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize(("D", "first", "end"), [(16, 0, 4), (80, 13, 40), (64, 31, 32)])
def test_kernel_and_reference(D: int, first: int, end: int, temperature: float | None, device: str) -> None:
    generator = torch.Generator().manual_seed(D)
    queries, keys = (torch.randn(2, heads, n, D, generator=generator) for heads, n in ((6, 70), (2, 301)))
    queries[:, 1] = 0.0  # a head whose root mean squares are the least
    queries, keys = queries.to(device), 30 * keys.to(device)
    want = band_channels.reference(queries.double(), keys.double(), first, end, temperature)
    for compute in (band_channels_triton, band_channels):
        got = compute(queries, keys, first, end, temperature)
        for ours, exact in zip(got, want, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)


def test_a_head_with_nan_has_no_temperature(device: str) -> None:
    queries, keys = torch.ones(1, 4, 9, 16, device=device), torch.ones(1, 2, 9, 16, device=device)
    queries[0, 1, 3, 2] = keys[0, 1, 4, 15] = float("nan")
    for compute in (band_channels_triton, band_channels, band_channels.reference):
        mine, its = compute(queries, keys, 0, 4, None)
        assert mine.isnan().all((0, 2, 3)).tolist() == [False, True, True, True]
        assert mine[:, 0].isfinite().all()
        assert its.isfinite().all()  # the NaN is outside of the band
