"""Pipelines from stages of several papers: `python examples/mix_two_papers.py`.

PBS-Attn's key order, XAttention's scores, one threshold, BFLA's rescues, S2O's executor. Each line changes one
stage, so the table shows the effect of each idea on the same q, k, v.
"""

from __future__ import annotations

from typing import Any

import torch

import blocksparse as bs
from blocksparse.testing import make_qkv

PIPELINES: dict[str, bs.Pipeline[Any, Any, Any]] = {
    "mean pooling": bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(64), bs.TopCdf(0.9), bs.ReferenceExecutor()),
    "+ sorted keys (PBS-Attn)": bs.Pipeline(
        bs.SegmentKeySort(S=128), bs.MeanPoolScorer(64), bs.TopCdf(0.9), bs.ReferenceExecutor()
    ),
    "+ antidiagonal scores (XAttention)": bs.Pipeline(
        bs.SegmentKeySort(S=128), bs.AntidiagonalScorer(8, block=64), bs.TopCdf(0.9), bs.ReferenceExecutor()
    ),
    "+ rescue (BFLA)": bs.Pipeline(
        bs.SegmentKeySort(S=128),
        bs.AntidiagonalScorer(8, block=64),
        bs.TopCdf(0.9) | bs.Band(128) | bs.Random(0.05),
        bs.ReferenceExecutor(),
    ),
    "+ early stop (S2O)": bs.Pipeline(
        bs.SegmentKeySort(S=128),
        bs.AntidiagonalScorer(8, block=64),
        bs.Ranked(bs.TopCdf(0.9) | bs.Band(128) | bs.Random(0.05)),
        bs.GatherExecutor(tau=0.1),
    ),
}


def main() -> None:
    q, k, v = make_qkv(N=1024, Hq=8, Hkv=2, D=64)
    print(f"{'pipeline':36} {'density':>8} {'mass':>6} {'error':>7}")
    for name, pipeline in PIPELINES.items():
        trace = pipeline.trace(q, k, v)
        density, mass, error = (x.mean().item() for x in (trace.density(), trace.covered_mass(), trace.error()))
        print(f"{name:36} {density:8.3f} {mass:6.3f} {error:7.4f}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
