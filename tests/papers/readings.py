"""Presets against readings of their definitions: plain torch in float64, on many small inputs.

A reading gives the blocks that a method keeps, from q and k alone and without a stage of the library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import assert_within_budget, masked_attention

CASES = 200
some_cases = pytest.mark.parametrize(
    "cases", [range(40), pytest.param(range(40, CASES), marks=pytest.mark.slow)], ids=("40", "160 more")
)


@frozen(eq=False)
class Small:
    """A small call: the queries are the last ones of the keys where it is causal."""

    q: Tensor  # [B, Hq, M, D] float64
    k: Tensor  # [B, Hkv, N, D]
    v: Tensor
    causal: bool
    block: int
    seed: int
    draw: random.Random  # of more numbers

    @property
    def scale(self) -> float:
        return float(self.q.shape[3] ** -0.5)

    @property
    def offset(self) -> int:
        return self.k.shape[2] - self.q.shape[2] if self.causal else 0

    @property
    def rows(self) -> list[range]:
        """The positions of the queries in each row of blocks, cut where those of the whole prompt are."""
        begin, end = self.offset, self.offset + self.q.shape[2]
        return [
            range(max(i * self.block, begin), min((i + 1) * self.block, end))
            for i in range(begin // self.block, (end - 1) // self.block + 1)
        ]

    @property
    def cols(self) -> list[range]:
        N = self.k.shape[2]
        return [range(j, min(j + self.block, N)) for j in range(0, N, self.block)]

    @property
    def keys(self) -> Tensor:
        """The keys of each query head, `[B, Hq, N, D]`."""
        return self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)

    def of_row(self, row: range) -> Tensor:
        """The queries of a row, `[B, Hq, m, D]`."""
        return self.q[:, :, row.start - self.offset : row.stop - self.offset]

    def means(self) -> tuple[Tensor, Tensor]:
        """The mean query of each row `[B, Hq, rows, D]` and the mean key of each column `[B, Hq, cols, D]`."""
        queries = [self.of_row(row).mean(2) for row in self.rows]
        return torch.stack(queries, 2), torch.stack(
            [self.keys[:, :, c.start : c.stop].mean(2) for c in self.cols], 2
        )

    def among(self, rule: Callable[[range, range], bool]) -> Tensor:
        """The blocks of which a rule of positions is true, `[rows, cols]`."""
        return torch.tensor([[rule(row, col) for col in self.cols] for row in self.rows])

    @property
    def visible(self) -> Tensor:
        return self.among(lambda row, col: not self.causal or col.start < row.stop)


def small(seed: int, *, causal: bool, most: int = 70, N: int | None = None, D: int = 8) -> Small:
    draw = random.Random(seed)
    N = draw.randint(1, most) if N is None else N
    M = draw.randint(1, N) if causal and draw.random() < 0.5 else N
    heads = draw.choice([1, 2])
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, heads * draw.choice([1, 2]), M, D), (1, heads, N, D), (1, heads, N, D))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k = draw.choice([1.0, 2.0]) * q, k + 0.5 * torch.randn(1, heads, 1, D, generator=generator)
    return Small(q, k, v, causal, 8, seed, draw)


Kept = Tensor | tuple[Tensor, Tensor, Tensor]
"""Blocks `[B|1, Hq|1, rows, cols]`; perhaps with the query `[B, Hq, M]` and the key `[B, Hq, N]` in each slot."""


def check(
    preset: bs.Pipeline[Any, Any, Any] | Callable[[Small], bs.Pipeline[Any, Any, Any]],
    reading: Callable[[Small], Kept],
    inputs: Iterator[Small],
    *,
    chunked: bool = False,
) -> None:
    """The masks must be equal, and outputs attention over them; chunks must choose as the whole does.

    The preset may follow from the case.
    """
    kept = total = 0
    for turn, case in enumerate(inputs):
        pipeline, found = preset if isinstance(preset, bs.Pipeline) else preset(case), reading(case)
        trace = pipeline.trace(case.q, case.k, case.v, causal=case.causal)
        want, *orders = found if isinstance(found, tuple) else (found,)
        keep = trace.mask.per_query_head()
        assert torch.equal(keep, want.expand_as(keep)), (turn, case.q.shape, case.k.shape)
        kept, total = kept + int(keep.sum()), total + int(trace.mask.grid.visible.expand_as(keep).sum())
        pairs = _pairs(case, want.expand_as(keep), *orders)
        out = masked_attention(case.q, case.k, case.v, pairs, case.scale)
        torch.testing.assert_close(trace.output.out, out, rtol=0, atol=1e-10)
        if turn % 10 == 0 and case.q.shape[2] > 15:  # and in fp32, where the greatest error is of many
            q, k, v = (x.float() for x in (case.q, case.k, case.v))
            got = bs.CpuExecutor()(q, k, v, trace.mask, trace.spec)
            assert_within_budget(got.out, out, masked_attention(q, k, v, pairs, case.scale))
        if chunked and turn % 10 == 0 and case.offset == 0 and case.k.shape[2] > case.block:
            start = case.draw.randrange(case.block, case.k.shape[2], case.block)
            chunk = pipeline.trace(case.q[:, :, start:], case.k, case.v, causal=True).mask
            assert torch.equal(chunk.per_query_head(), keep[:, :, start // case.block :])
    assert 0.02 * total < kept < 0.98 * total, "a selection that keeps all, or nothing, tells nothing"


def _pairs(case: Small, keep: Tensor, q_order: Tensor | None = None, k_order: Tensor | None = None) -> Tensor:
    """What each query attends to, `[B, Hq, M, N]`."""
    (B, Hq, M, _), N = case.q.shape, case.k.shape[2]
    first = case.offset % case.block
    wide = keep.repeat_interleave(case.block, 2).repeat_interleave(case.block, 3)[:, :, first : first + M, :N]
    pairs = wide.clone()
    if q_order is not None and k_order is not None:
        by_key = torch.zeros_like(wide).scatter(3, k_order.unsqueeze(2).expand(B, Hq, M, N), wide)
        pairs = torch.zeros_like(wide).scatter(2, q_order.unsqueeze(3).expand(B, Hq, M, N), by_key)
    return pairs.tril(case.offset) if case.causal else pairs


def top(scores: Tensor, count: Tensor | int) -> Tensor:
    """The `count` greatest of each row."""
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return rank < torch.as_tensor(count)


def holding(mass: Tensor, share: float) -> Tensor:
    """The greatest of each row until they hold `share` of its sum, with the one that crosses it."""
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = before < share * mass.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)
