"""FlexPrefill: a context-aware sparse attention mechanism (arXiv 2502.20766)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blocksparse.executors.auto import AutoExecutor
from blocksparse.executors.executor import Executor
from blocksparse.per_head import share
from blocksparse.permuters.identity import Identity
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.pipeline import Pipeline
from blocksparse.scorers.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.global_top_cdf import GlobalTopCdf
from blocksparse.selectors.routed_by_divergence import RoutedByDivergence
from blocksparse.selectors.vertical_slash_cdf import VerticalSlashCdf
from blocksparse.validators import flag


def flex_prefill(
    mass: float | Sequence[float] | Tensor = 0.95,  # the authors' runs: Llama 3.1 and GLM-4; 0.9 for Yi and Qwen2
    tau: float | Sequence[float] | Tensor = 0.1,  # the authors' runs
    *,
    block: int = 128,  # the authors' runs
    min_budget: int = 1024,  # the authors' runs
    max_budget: int | None = None,
    as_released: bool = False,
    executor: Executor[GlobalPermutation, BlockMask] | None = None,
) -> Pipeline[GlobalPermutation, VerticalSlashScores, BlockMask]:
    """Columns and diagonals for heads with a fixed pattern, pooled blocks for heads that pooling describes well.

    The block of token 0 and the diagonal are always kept, outside the budgets.

    Args:
        mass: gamma of the paper, the share of the attention mass to keep; a number, or one per query head.
        tau: divergence below which a head is query-aware; a number, or one per query head. 0 for none.
        block: tokens per block, and queries in the probe.
        min_budget: tokens that the columns, and the diagonals, of every head come to at least.
        max_budget: tokens that they come to at most, in heads that are not query-aware; None for no limit.
        as_released: choose as the authors' code: a block for every 128 tokens counted, forced blocks inside the
            budget, one diagonal of blocks per band, no crossing block in query-aware heads.
        executor: `AutoExecutor()` unless given.
    """
    share.check(mass=mass)
    flag.check(as_released=as_released)
    floor = VerticalSlashCdf(0.0, min_budget=min_budget, released=as_released)
    return Pipeline(
        Identity(),
        VerticalSlashScorer(block),
        RoutedByDivergence(
            tau,
            similar=GlobalTopCdf(mass, crossing=not as_released) | floor,
            otherwise=VerticalSlashCdf(mass, min_budget=min_budget, max_budget=max_budget, released=as_released),
        ),
        AutoExecutor() if executor is None else executor,
    )
