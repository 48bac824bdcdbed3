"""TriangleMix: dense layers, then tri-shape (arXiv 2507.21526)."""

from __future__ import annotations

import pytest
from tests.papers.readings import Small, check, small, some_cases
from torch import Tensor

import blocksparse as bs


def test_layers() -> None:
    layers = bs.triangle_mix(2, 8, 9, 5, block=8).resolve(5)
    assert layers[:2] == (None, None)
    assert layers[2:] == 3 * (bs.tri_shape(8, 9, 5, block=8),)
    assert bs.triangle_mix(0).resolve(2) == 2 * (bs.tri_shape(),)
    with pytest.raises(ValueError, match="there is no layer 5"):
        bs.triangle_mix(6).resolve(5)
    with pytest.raises(ValueError, match="'starting_layer' must be a whole number, at least 0: -1"):
        bs.triangle_mix(-1)


@some_cases
def test_sparse_layers(cases: range) -> None:
    """Blocks that hold a pair of the triangle's three sides."""

    def reading(case: Small) -> Tensor:
        N = case.k.shape[2]

        def held(row: range, col: range) -> bool:
            return any(j <= i and (j < 3 or i - j < 9) for i in row for j in col) or row.stop > N - 5

        return case.among(held) & case.visible

    pipeline = bs.triangle_mix(1, 3, 9, 5, block=8, executor=bs.ReferenceExecutor()).resolve(2)[1]
    assert isinstance(pipeline, bs.Pipeline)
    check(pipeline, reading, (small(i, causal=True) for i in cases))
