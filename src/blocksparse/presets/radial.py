"""Radial Attention: a static mask for video, ever sparser with the distance of frames (arXiv 2506.19852)."""

from __future__ import annotations

from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.radial import Radial


@kept
def radial(
    grid: tuple[int, int, int] | None = None,
    *,
    decay: float = 1.0,  # released code; 0.2 to 1 in its examples
    block: int = 128,  # released code
    prefix: int = 0,
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Keep the first frame, near frames, and of others a window that halves with their distance.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens; None where a host knows them.
        decay: the factor of all windows.
        block: tokens per block.
        prefix: how many tokens of text stand before the video. All text is kept.
        executor: `AutoExecutor()` if None.
    """
    return preset(
        Identity(),
        NoScorer(block),
        Radial(grid, decay=decay, prefix=prefix),
        executor,
    )
