"""A custom selector, combined with stages of papers: `python examples/own_selector.py`.

The idea: late rows see more keys than early rows, so the share of kept blocks falls with the row. A selector is a
frozen class with one method. Its first line declares the scores it needs, and mypy checks the declaration.
"""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen, validators

import blocksparse as bs
from blocksparse.testing import make_qkv


@final
@frozen
class TopRoot(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """Keep the best `gain * sqrt(n)` of a row's `n` visible blocks, forced ones, and the diagonal."""

    gain: float = field(default=2.0, validator=validators.gt(0))

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        visible = scores.grid.visible
        values = scores.values.masked_fill(~visible, float("-inf"))
        order = values.argsort(dim=-1, descending=True, stable=True)  # ties go to the lower column
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(scores.grid.cols, device=order.device).expand(order.shape)
        )
        keep = rank < self.gain * visible.sum(-1, keepdim=True).sqrt()
        always = scores.grid.diagonal if scores.forced is None else scores.grid.diagonal | scores.forced
        return bs.BlockMask((keep | always) & visible, scores.grid)


def main() -> None:
    q, k, v = make_qkv(N=1024, Hq=8, Hkv=2, D=64)
    print(f"{'selector':60} {'density':>8} {'mass':>6} {'error':>7}")
    # Yours joins the algebra: `|` with a sink, `SharedByGroup`, `Ranked`, any scorer, any executor.
    for selector in (TopRoot(1.5), TopRoot(3.0), TopRoot(1.5) | bs.Sink(), bs.TopK(6), bs.TopK(12)):
        pipeline = bs.Pipeline(
            bs.Identity(), bs.SimilarityGatedScorer(bs.MeanPoolScorer(64), 0.2), selector, bs.ReferenceExecutor()
        )
        trace = pipeline.trace(q, k, v)
        density, mass, error = (x.mean().item() for x in (trace.density(), trace.covered_mass(), trace.error()))
        print(f"{selector!r:60} {density:8.3f} {mass:6.3f} {error:7.4f}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
