"""LVSA: sparse attention for long videos, with frames in turn that all look at (arXiv 2605.31057)."""

from __future__ import annotations

from blocksparse.checks.validators import count, size
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.frames import Frames


@kept
def lva(
    grid: tuple[int, int, int] | None = None,
    *,
    period: int,
    radius: int,
    first: int = 1,  # the paper: frame 0 is a permanent anchor
    step: int = 0,
    block: int = 64,
    prefix: int = 0,
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Keep the first frames, one frame of every `period`, and a window of frames around a query's own.

    The periodic frames move by one with each denoising step, so that over `period` steps each frame is one of
    them. With `C` frames that a model was trained on (21 for Wan 2.1) the paper takes `period = ceil(T / (C - (2
    radius + 1)))`, so that each query looks at about `C` frames.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens; None where a host knows them.
        period: frames from one periodic frame to the next.
        radius: frames on either side of a query's own; 0 for no window, as in the released code.
        first: how many frames at the start are kept for all.
        step: the denoising step.
        block: tokens per block.
        prefix: how many tokens of text stand before the video. All text is kept.
        executor: `AutoExecutor()` if None.
    """
    size.check(period=period)
    count.check(radius=radius, step=step)
    return preset(
        Identity(),
        NoScorer(block),
        Frames(
            grid,
            period=period,
            phase=step % period,
            first=first,
            radius=radius or None,
            prefix=prefix,
        ),
        executor,
    )
