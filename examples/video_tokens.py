"""Density of attention for six orders of video tokens: `python examples/video_tokens.py`.

SpargeAttn (section 3.7) orders the tokens of a video along a Hilbert curve, so that a block of tokens is a
compact piece of the video. Tokens of a block are then alike, and few blocks hold most of the attention. The
attention is the same in all orders.

The video is a camera that pans and zooms over one photograph, Grace Hopper's portrait from matplotlib: a real
image with an artificial motion. The tokens are patches of pixels and smooth functions of their place, sent
through random projections. So the example compares orders; it does not show how sparse a real model is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import final

import matplotlib
import torch
from attrs import field, frozen
from matplotlib import image
from torch import Tensor
from torch.nn.functional import interpolate, normalize, pad, scaled_dot_product_attention

from blocksparse import (
    BlockMass,
    GlobalPermutation,
    Grid,
    MeanPoolScorer,
    Pipeline,
    ReferenceExecutor,
    Scorer,
    TopCdf,
)
from blocksparse.order.grid_orders import (
    ColumnOrder,
    GivenOrder,
    GridOrder,
    HilbertOrder,
    RasterOrder,
    TileOrder,
    TimeOrder,
)
from blocksparse.spec import AttentionSpec

Q_BLOCK, K_BLOCK = 128, 64  # SpargeAttn, appendix A.1
MASS = 0.95
PIXELS = 2  # a patch is described by 2 x 2 colours


@final
@frozen
class Row:
    """Result of one order, mean over heads."""

    order: str
    similarity_q: float  # mean cosine of two queries of a block
    similarity_k: float
    best: float  # smallest share of the blocks that holds 95 % of each row of blocks' attention
    density: float  # share of the blocks that mean pooling needs to hold 95 % of all attention
    error: float  # and the relative L1 distance from dense attention then


@final
@frozen
class TrueMassScorer(Scorer[GlobalPermutation, BlockMass]):
    """Exact attention mass of each block, the upper bound for every estimate."""

    q_block: int = field(default=Q_BLOCK)
    k_block: int = field(default=K_BLOCK)

    def __call__(self, q: Tensor, k: Tensor, permutation: GlobalPermutation, spec: AttentionSpec) -> BlockMass:
        grid = Grid.of(
            q,
            k,
            permutation,
            spec,
            q_block=self.q_block,
            k_block=self.k_block,
        )
        keys = permutation.gather_keys(k).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        rows = []
        for queries in permutation.gather_queries(q).split(self.q_block, dim=2):
            weight = (queries @ keys.transpose(-1, -2) * spec.scale).softmax(-1).sum(2)  # [B, Hq, N]
            weight = pad(weight, (0, grid.cols * self.k_block - grid.k_len))
            rows.append(weight.unflatten(-1, (grid.cols, self.k_block)).sum(-1))
        return BlockMass(torch.stack(rows, dim=2), grid)


def video(grid: tuple[int, int, int]) -> Tensor:
    """Frames of a camera that pans and zooms over a photograph, `[T, 3, H * 2, W * 2]`, values from 0 to 1."""
    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"  # 600 x 512, public domain
    photograph = torch.from_numpy(image.imread(path).copy()).permute(2, 0, 1).float() / 255
    T, H, W = grid
    height, width = photograph.shape[1:]
    frames = []
    for time in torch.linspace(0, 1, T).tolist():
        seen_width = (0.8 - 0.2 * time) * width
        seen_height = seen_width * H / W
        top, left = 0.25 * time * (height - seen_height), (0.1 + 0.6 * time) * (width - seen_width)
        seen = photograph[:, int(top) : int(top + seen_height), int(left) : int(left + seen_width)]
        frames.append(interpolate(seen[None], (H * PIXELS, W * PIXELS), mode="area")[0])
    return torch.stack(frames)


def tokens(frames: Tensor, *, heads: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """`q`, `k`, `v` `[1, heads, T * H * W, head_dim]` from the patches of `frames` and their places."""
    generator = torch.Generator().manual_seed(seed)

    def projection(size: int) -> Tensor:
        return torch.randn(heads, size, head_dim, generator=generator) / math.sqrt(size)

    patches = frames.unfold(2, PIXELS, PIXELS).unfold(3, PIXELS, PIXELS)  # [T, 3, H, W, 2, 2]
    T, _, H, W = patches.shape[:4]
    colours = patches.permute(0, 2, 3, 1, 4, 5).reshape(T * H * W, -1)
    colours = (colours - colours.mean(0)) / colours.std()
    # Slow waves along each axis: near places look alike to a model, far ones do not.
    axes = torch.meshgrid(*(torch.arange(size) for size in (T, H, W)), indexing="ij")
    angles = torch.cat([axis.reshape(-1, 1) / torch.tensor([5.0, 10.0, 20.0]) for axis in axes], dim=1)
    places = torch.cat((angles.sin(), angles.cos()), dim=1)
    features = torch.cat((colours, places - places.mean(0)), dim=1)

    shared, own = projection(features.shape[1]), projection(features.shape[1])
    k = features @ shared
    # Queries look for keys like themselves, and have a direction in common, as those of models do.
    q = features @ (shared + 0.5 * own) + torch.randn(heads, 1, head_dim, generator=generator)
    return 2 * q[None], k[None], (features @ projection(features.shape[1]))[None]


def self_similarity(x: Tensor, block: int) -> float:
    """Mean cosine of two tokens of a block, over the whole blocks of `x` `[B, H, N, D]`."""
    whole = normalize(x, dim=-1)[:, :, : x.shape[2] // block * block].unflatten(2, (-1, block))
    return float(whole.mean(3).square().sum(-1).mean())


def smallest_threshold(scores: BlockMass, truth: BlockMass) -> float:
    """The smallest `TopCdf` on estimated scores whose blocks hold `MASS` of the true attention."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        kept = truth.values.where(TopCdf(middle)(scores).keep, 0.0)
        if float(kept.sum() / truth.values.sum()) < MASS:
            low = middle
        else:
            high = middle
    return high


def orders(grid: tuple[int, int, int], seed: int) -> dict[str, GridOrder]:
    cells = grid[0] * grid[1] * grid[2]
    shuffled = torch.randperm(cells, generator=torch.Generator().manual_seed(seed))
    return {
        "random": GivenOrder(grid, shuffled),
        "raster": RasterOrder(grid),
        "column": ColumnOrder(grid),
        "time": TimeOrder(grid),
        "tile": TileOrder(grid, (4, 4, 4)),
        "Hilbert": HilbertOrder(grid),
    }


def measure(
    grid: tuple[int, int, int] = (7, 22, 26), *, heads: int = 2, head_dim: int = 64, seed: int = 0
) -> list[Row]:
    """The same attention in every order."""
    q, k, v = tokens(video(grid), heads=heads, head_dim=head_dim, seed=seed)
    scale = head_dim**-0.5
    dense = scaled_dot_product_attention(q, k, v)
    scorer = MeanPoolScorer(Q_BLOCK, k_block=K_BLOCK)
    rows = []
    for name, order in orders(grid, seed).items():
        permutation = order(q, k, AttentionSpec(scale=scale, causal=False))
        truth = TrueMassScorer()(q, k, permutation, AttentionSpec(scale=scale, causal=False))
        threshold = smallest_threshold(scorer(q, k, permutation, AttentionSpec(scale=scale, causal=False)), truth)
        trace = Pipeline(order, scorer, TopCdf(threshold), ReferenceExecutor()).trace(q, k, v, causal=False)
        rows.append(
            Row(
                order=name,
                similarity_q=self_similarity(permutation.gather_queries(q), Q_BLOCK),
                similarity_k=self_similarity(permutation.gather_keys(k), K_BLOCK),
                best=float(TopCdf(MASS)(truth).density().mean()),
                density=float(trace.density().mean()),
                error=float((trace.output.out - dense).abs().sum() / dense.abs().sum()),
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "           self-similarity    density for 95 % of the attention",
        "order          Q       K       best   mean pooling     error",
    ]
    for row in rows:
        lines.append(
            f"{row.order:<9}{row.similarity_q:7.3f} {row.similarity_k:7.3f}"
            f"{row.best:11.3f}{row.density:15.3f}{row.error:10.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    with torch.no_grad():
        print(table(measure()))
