"""Prism: Spectral-Aware Block-Sparse Attention (arXiv 2602.08426)."""

from __future__ import annotations

from blocksparse.checks.per_head import share
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.rotary_band import RotaryBandScorer, part_of_all
from blocksparse.scorers.scorer_pair import ScorerPair, ScoresPair
from blocksparse.selectors.selector_pair import SelectorPair
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.top_cdf import TopCdf


@kept
def prism(
    mass: Numbers = 0.95,  # released code, for both bands
    *,
    block: int = 128,  # released code
    fast: tuple[float, float] = (0.0, 0.5),  # the same: the 64 fastest of 128 channels
    slow: tuple[float, float] = (0.25, 1.0),  # the same: the 96 slowest
    temperature: float | None = None,  # the same: calibrated
    executor: BlockExecutor | None = None,
) -> Preset[ScoresPair[BlockMass, BlockMass]]:
    """Keep the heaviest pooled blocks of the fast channels and those of the slow ones, the first and the diagonal.

    Args:
        mass: share of the row's pooled mass to keep in each band; a number, or one per query head.
        block: tokens per block.
        fast: where the band of fast channels begins and ends, as shares of all pairs of channels.
        slow: the same of the slow ones.
        temperature: what the logits of both bands are divided by; None measures it per head and call, as of
            `RotaryBandScorer`, and the choice then depends a little on how a prompt is chunked.
        executor: `AutoExecutor()` if None.
    """
    share.check(mass=mass)
    part_of_all.check(fast=fast, slow=slow)
    of_fast, of_slow = (RotaryBandScorer(band, block, temperature=temperature) for band in (fast, slow))
    return preset(
        Identity(),
        ScorerPair(of_fast, of_slow),
        SelectorPair(TopCdf(mass), TopCdf(mass)) | Sink(),
        executor,
    )
