"""FlexPrefill: a context-aware sparse attention mechanism (arXiv 2502.20766)."""

from __future__ import annotations

from blocksparse.checks.validators import flag
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.selectors.global_top_cdf import GlobalTopCdf
from blocksparse.selectors.routed_by_divergence import RoutedByDivergence
from blocksparse.selectors.vertical_slash_cdf import VerticalSlashCdf


@kept
def flex_prefill(
    mass: Numbers = 0.95,  # the authors' runs: Llama 3.1 and GLM-4; 0.9 for Yi and Qwen2
    tau: Numbers = 0.1,  # the authors' runs
    *,
    block: int = 128,  # the authors' runs
    min_budget: int = 1024,  # the authors' runs
    max_budget: int | None = None,
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[VerticalSlashScores]:
    """Keep pooled blocks in heads that pooling describes well, and columns and diagonals in the others.

    The paper calls the first kind of head query-aware. The block of token 0 and the diagonal are always kept,
    outside the budgets.

    Args:
        mass: gamma of the paper, the share of the attention mass to keep; a number, or one per query head.
        tau: divergence below which a head is query-aware; a number, or one per query head. With 0 no head is.
        block: tokens per block, and queries in the probe.
        min_budget: the least number of tokens in the columns, and in the diagonals, of every head.
        max_budget: the greatest number of tokens in each, in heads that are not query-aware; None for no limit.
        as_released: choose as the authors' code does: it keeps one block for every 128 tokens that it counts,
            takes forced blocks out of the budget, keeps one diagonal of blocks per band, and in query-aware heads
            drops the block with which the sum reaches `mass`.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    floor = VerticalSlashCdf(0.0, min_budget=min_budget, released=as_released)
    return preset(
        Identity(),
        VerticalSlashScorer(block, tau=tau),
        RoutedByDivergence(
            tau,
            similar=GlobalTopCdf(mass, crossing=not as_released) | floor,
            otherwise=VerticalSlashCdf(mass, min_budget=min_budget, max_budget=max_budget, released=as_released),
        ),
        executor,
    )
