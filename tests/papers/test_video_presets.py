"""Presets on a grid of cells against readings of their definitions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from tests.papers.readings import Small, check, holding, small, some_cases, top
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.masks.visibility import counter_hash

Grid = tuple[int, int, int]
REFERENCE = bs.ReferenceExecutor()


def grids(seed: int) -> tuple[Grid, int, int]:
    """A grid, and tokens of text in front of it and behind it."""
    draw = small(seed, causal=False, N=1).draw
    return (
        (draw.randint(1, 9), draw.randint(1, 4), draw.randint(1, 5)),
        draw.choice([0, 0, 3]),
        draw.choice([0, 5]),
    )


def on_grid(seed: int) -> Small:
    (T, H, W), prefix, suffix = grids(seed)
    return small(seed, causal=False, N=prefix + T * H * W + suffix)


def blocks_of(pairs: Tensor) -> Tensor:
    """The blocks of 8 x 8 tokens that hold a pair, of `[N, N]`."""
    missing = -len(pairs) % 8
    padded = torch.nn.functional.pad(pairs, (0, missing, 0, missing))
    held: Tensor = padded.unflatten(0, (-1, 8)).unflatten(2, (-1, 8)).any(3).any(1)
    return held


def with_text(cells: Tensor, prefix: int, suffix: int) -> Tensor:
    """Pairs of all tokens, of those of cells: text sees all and is seen by all."""
    return torch.nn.functional.pad(cells, (prefix, suffix, prefix, suffix), value=True)


def radial_cells(grid: Grid, decay: float) -> Tensor:
    """Which pairs of cells are kept, one frame pair after the other."""
    T, H, W = grid
    size = H * W
    place = torch.arange(size)
    kept = torch.zeros(T, size, T, size, dtype=torch.bool)
    for i in range(T):
        for j in range(T):
            d = abs(i - j)
            if j == 0 or d <= 1:
                kept[i, :, j] = True
                continue
            length = 2 ** size.bit_length() / 2 ** d.bit_length()
            if length < 8 and d % int(8 / length):
                continue
            kept[i, :, j] = (place[:, None] - place).abs() <= max(length * decay, 8)
    return kept.flatten(2).flatten(0, 1)


@some_cases
def test_radial(cases: range) -> None:
    decays = [0.3, 0.7, 1.0, 2.0]

    def preset(case: Small) -> bs.Pipeline[bs.GlobalPermutation, bs.BlockScores, bs.BlockMask]:
        grid, prefix, _ = grids(case.seed)
        return bs.radial(grid, decay=decays[case.seed % 4], block=8, prefix=prefix, executor=REFERENCE)

    def reading(case: Small) -> Tensor:
        grid, prefix, suffix = grids(case.seed)
        return blocks_of(with_text(radial_cells(grid, decays[case.seed % 4]), prefix, suffix))

    check(preset, reading, map(on_grid, cases))


def frames_seen(T: int, first: int, period: int, step: int, W: int) -> list[set[int]]:
    anchors = {f for f in range(T) if f < first} | {
        (step % period + i * period) % T for i in range(math.ceil(T / period))
    }
    seen = []
    for f in range(T):
        if W == 0:
            seen.append(anchors)
            continue
        width = min(2 * W + 1, T)  # moved at the ends
        low = max(0, min(f - W, T - width))
        high = low + width - 1
        want, side = min(2 * W + 1, T - len(anchors)), 0
        while sum(x not in anchors for x in range(low, high + 1)) < want:
            low, high = (max(low - 1, 0), high) if side % 2 == 0 else (low, min(high + 1, T - 1))
            side += 1
        seen.append(anchors | set(range(low, high + 1)))
    return seen


@some_cases
def test_lva(cases: range) -> None:
    def options(seed: int) -> dict[str, int]:
        return {"period": 2 + seed % 3, "radius": seed % 3, "first": seed % 2, "step": seed % 7}

    def preset(case: Small) -> bs.Pipeline[bs.GlobalPermutation, bs.BlockScores, bs.BlockMask]:
        grid, prefix, _ = grids(case.seed)
        return bs.lva(grid, **options(case.seed), block=8, prefix=prefix, executor=REFERENCE)

    def reading(case: Small) -> Tensor:
        ((T, H, W), prefix, suffix), of = grids(case.seed), options(case.seed)
        frames = torch.zeros(T, T, dtype=torch.bool)
        for f, seen in enumerate(frames_seen(T, of["first"], of["period"], of["step"], of["radius"])):
            frames[f, sorted(seen)] = True
        cells = frames.repeat_interleave(H * W, 0).repeat_interleave(H * W, 1)
        return blocks_of(with_text(cells, prefix, suffix))

    check(preset, reading, map(on_grid, cases))


@some_cases
def test_nabla(cases: range) -> None:
    """Whole tiles of 1 x 2 x 4 cells; the smallest weights go, until less than 1 - mass of them is gone."""
    sizes = {i: (1 + i % 4, 2 * (1 + i % 3), 4 * (1 + i % 2)) for i in cases}

    def reading(case: Small) -> tuple[Tensor, Tensor, Tensor]:
        T, H, W = sizes[case.seed]
        tiles = [(t, h, w) for t in range(T) for h in range(H // 2) for w in range(W // 4)]
        order = [(t * H + 2 * h + y) * W + 4 * w + x for t, h, w in tiles for y in range(2) for x in range(4)]
        queries, keys = (x[:, :, order].unflatten(2, (-1, 8)).mean(3) for x in (case.q, case.keys))
        ascending, index = (case.scale * queries @ keys.mT).softmax(-1).sort(-1)
        kept = torch.zeros_like(ascending, dtype=torch.bool).scatter(-1, index, ascending.cumsum(-1) >= 0.4)
        near = torch.tensor(
            [[max(abs(a - b) for a, b in zip(x, y, strict=True)) <= 1 for y in tiles] for x in tiles]
        )
        slots = [torch.tensor(order).expand(*x.shape[:3]) for x in (case.q, case.keys)]
        return kept | near, slots[0], slots[1]

    def preset(case: Small) -> bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask]:
        return bs.nabla(0.6, sizes[case.seed], tile=(1, 2, 4), block=8, executor=REFERENCE)

    check(preset, reading, (small(i, causal=False, N=math.prod(sizes[i])) for i in cases))


def clustered(x: Tensor, clusters: int, iterations: int, kind: int) -> Tensor:
    """One head's tokens `[N, D]` by cluster, with one distance after the other."""
    n = len(x)
    draws = [int(counter_hash(0, torch.tensor(kind), torch.tensor(i))) for i in range(n)]
    centres = [x[i] for i in sorted(range(n), key=lambda i: draws[i])[:clusters]]

    def nearest() -> Tensor:
        return torch.stack([(x - c).square().sum(-1) for c in centres]).argmin(0)

    for _ in range(iterations):
        label = nearest()
        centres = [x[label == c].mean(0) if bool((label == c).any()) else old for c, old in enumerate(centres)]
    return nearest().argsort(stable=True)


@some_cases
def test_svg2(cases: range) -> None:
    """Clusters in order, cut into blocks of a fixed size."""

    def reading(case: Small) -> tuple[Tensor, Tensor, Tensor]:
        q_order = torch.stack([clustered(x, 3, 2, 1) for x in case.q[0]])
        k_order = torch.stack([clustered(x, 5, 2, 0) for x in case.k[0]])
        k_order = k_order.repeat_interleave(case.q.shape[1] // case.k.shape[1], 0)
        q, k = (
            x[0].gather(1, order.unsqueeze(2).expand(x.shape[1:]))
            for x, order in ((case.q, q_order), (case.keys, k_order))
        )
        queries, keys = (torch.stack([part.mean(1) for part in x.split(8, dim=1)], 1) for x in (q, k))
        mass = (case.scale * queries @ keys.mT).softmax(-1)[None]
        return holding(mass, 0.6) | top(mass, math.ceil(0.1 * mass.shape[3])), q_order[None], k_order[None]

    preset = bs.svg2(0.6, q_clusters=3, k_clusters=5, iterations=2, block=8, executor=REFERENCE)
    check(preset, reading, (small(i, causal=False, most=40) for i in cases))


def test_grids_are_asked_for() -> None:
    q, k, v = (x.float() for x in (lambda case: (case.q, case.k, case.v))(small(0, causal=False, N=60)))
    for preset, name in ((bs.radial, "Radial"), (partial(bs.lva, period=2, radius=1), "Frames")):
        with pytest.raises(ValueError, match=f"{name} has no grid. Give it as"):
            preset()(q, k, v, causal=False)
        message = rf"{name} needs at least 67 keys \(prefix 3 \+ grid 4 x 4 x 4 = 64\)"
        with pytest.raises(ValueError, match=message):
            preset((4, 4, 4), prefix=3)(q, k, v, causal=False)
