"""The heaviest lines of a head: the searches against the sorts, line by line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.select.vertical_slash import fewest_of_one, heaviest, running_count

pytest.importorskip("triton")
from blocksparse.kernels.select.vertical_slash_triton import (
    fewest_triton,
    heaviest_of_both_triton,
    heaviest_triton,
)

# One line, a power of two, and what fills no block of the search.
SIZES = (1, 64, 300)


def lines_of(n: int, kind: str, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(2, 3, n, generator=generator)
    if kind == "ties":
        x = (4 * x).round()
    elif kind == "steep":
        x = torch.exp(-60 * x)
    elif kind == "none":
        x = torch.zeros_like(x)
    elif kind == "bad":
        x[:, 1, ::3], x[:, 2, :2] = float("nan"), float("inf")
    return x.to(device)


@pytest.mark.parametrize("kind", ["plain", "ties", "steep", "none", "bad"])
def test_fewest(kind: str, device: str) -> None:
    for n in SIZES:
        lines = lines_of(n, kind, device)
        for mass, least, most in (
            ([0.0], 3, None), ([0.9], 0, None), ([0.0, 0.5, 1.0], 0, 7), ([0.95, 0.1, 0.5], 6, 9), ([0.5], 2**40, None),
        ):  # fmt: skip
            share = torch.tensor(mass, device=device).view(1, -1, 1)
            others = lines_of(n // 2 + 3, kind, device)
            got = fewest_triton(lines, others, share.double(), least, most)
            for counted, x in zip(got, (lines, others), strict=True):
                want = running_count(fewest_of_one(x, share, least, most))
                assert torch.equal(counted, want), (n, mass, least, most)


@pytest.mark.parametrize("kind", ["plain", "ties", "none", "bad"])
def test_heaviest(kind: str, device: str) -> None:
    for n in SIZES:
        weight = lines_of(n, kind, device) - (0.5 if kind == "plain" else 0.0)
        for counts, first in (([1.0], 0), ([n // 2, 0, 2 * n], 3), ([40.0], 2**29), ([7.0, 9.0, 1e9], 0)):
            count = torch.tensor(counts, dtype=torch.float64, device=device).view(1, -1, 1)
            want = heaviest.reference(weight, count, first)
            assert torch.equal(heaviest_triton(weight, count, first), want), (n, counts, first)
            spared = torch.tensor([5.0], dtype=torch.float64, device=device).view(1, 1, 1), n // 3
            want = heaviest.reference(weight, count, first, spared)
            assert not want[..., max(first, n - min(5, n // 3)) :].any()
            assert torch.equal(heaviest_triton(weight, count, first, spared), want), (n, counts, first)
            others = lines_of(n // 2 + 3, kind, device)
            number = torch.full((1, 1, 1), 4.0, dtype=torch.float64, device=device)
            both = heaviest_of_both_triton(weight, others, (count, number), (first, 2), spared)
            wanted = want, heaviest.reference(others, number, 2)
            for counted, taken in zip(both, wanted, strict=True):
                assert torch.equal(counted, running_count(taken)), (n, counts, first)
