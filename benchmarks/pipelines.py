"""Pipelines of our own that servers are timed with: `{"preset": "benchmarks.pipelines:budget"}`."""

from __future__ import annotations

import blocksparse as bs
from blocksparse.presets.preset import Preset
from blocksparse.score.scorer import BlockMass

_K_BLOCK = 64  # tokens of a block of keys, as `sparge` has them


def budget(tokens: int = 4096) -> Preset[BlockMass]:
    """Each row of blocks keeps so many tokens, however long the prompt is, and the first block."""
    return bs.Pipeline(
        bs.Identity(),
        bs.MeanPoolScorer(128, k_block=_K_BLOCK),
        bs.TopK(tokens // _K_BLOCK) | bs.Sink(),
        bs.AutoExecutor(),
    )
