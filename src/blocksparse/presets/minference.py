"""MInference 1.0: vertical-slash heads (arXiv 2407.02490)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blocksparse.checks.validators import flag
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Preset, kept, preset
from blocksparse.scorers.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.selectors.vertical_slash_top_k import VerticalSlashTopK


@kept
def minference(
    vertical: int | Sequence[int] | Tensor = 1000,  # released code, for heads that its table of budgets lacks
    slash: int | Sequence[int] | Tensor = 6096,  # the same
    *,
    sink: int = 30,  # released code
    recent: int = 100,  # released code; its search for budgets forces 30
    block: int = 64,  # section 3.2; released code
    probe: int = 64,  # section 3.2, algorithm 1
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[VerticalSlashScores]:
    """Keep a fixed number of columns and diagonals, the heaviest for the last queries.

    Args:
        vertical: how many keys (columns); a number, or one per query head.
        slash: how many distances (diagonals); a number, or one per query head.
        sink: how many of the first keys are always kept, as a part of `vertical`.
        recent: how many of the nearest distances are always kept, as a part of `slash`.
        block: tokens per block.
        probe: with how many of the last queries the lines are measured.
        as_released: choose as the authors' code does: keys near the end may use up the vertical budget, and tiles
            of keys at chosen distances end up to one block late.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    return preset(
        Identity(),
        VerticalSlashScorer(block, probe=probe, pooled=False),
        VerticalSlashTopK(vertical, slash, sink=sink, recent=recent, released=as_released),
        executor,
    )
