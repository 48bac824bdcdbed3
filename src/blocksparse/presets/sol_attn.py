"""Sol-Attn: the selection of NVIDIA's video attention (arXiv 2607.24027)."""

from __future__ import annotations

from blocksparse.checks.validators import a, count, flag, optional
from blocksparse.executors.auto import AutoExecutor
from blocksparse.executors.executor import Executor
from blocksparse.executors.remainder import RemainderExecutor
from blocksparse.permuters.identity import Identity
from blocksparse.pipeline import Pipeline
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept
from blocksparse.scorers.block_scores import BlockLogits
from blocksparse.scorers.mean_logit import MeanLogitScorer, Variance
from blocksparse.selectors.band import Band
from blocksparse.selectors.last_keys import LastKeys
from blocksparse.selectors.mean_std import MeanStd
from blocksparse.selectors.position_selector import PositionSelector


@kept
def sol_attn(
    tau: Numbers = 1.0,  # released code; TensorRT-LLM's example has 2.0
    *,
    block: int = 64,  # released code
    variance: Variance = "diagonal",  # the same
    text: int = 0,  # the same: sink_tokens
    remainder: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockLogits]:
    """Keep the blocks whose logit lies some standard deviations above their row's mean, and each row's neighbours.

    Blocks that are not kept are left out. The authors' code lets them take part through their mean keys and
    values, as `remainder` does; without it this is the selection alone, and errs more at the same `tau`.

    Args:
        tau: how many standard deviations; a number, or one per query head. A greater one keeps fewer blocks.
        block: tokens per block.
        variance: how the deviation of a row is computed, as in `MeanLogitScorer`.
        text: how many keys at the end are kept for all queries. `attach` of `integrations.diffusers` keeps text by
            itself.
        remainder: let dropped blocks contribute their means, as in `RemainderExecutor`.
        executor: `AutoExecutor()` if None.
    """
    count.check(text=text)
    flag.check(remainder=remainder)
    optional(a(Executor)).check(executor=executor)
    attend = AutoExecutor() if executor is None else executor
    neighbours: PositionSelector = Band(1)  # a key at a distance of 1 is in the next block
    return Pipeline(
        Identity(),
        MeanLogitScorer(block, variance=variance),
        MeanStd(tau) | (neighbours | LastKeys(text) if text else neighbours),
        RemainderExecutor(attend) if remainder else attend,
    )
