"""Skip-softmax (BLASST, arXiv 2512.12087): attention over all keys, without the tiles that turn out negligible."""

from __future__ import annotations

from blocksparse.checks.validators import shown
from blocksparse.executors.skip_softmax import SkipSoftmaxExecutor
from blocksparse.permuters.identity import Identity
from blocksparse.pipeline import Pipeline
from blocksparse.presets.preset import BlockExecutor, Preset, kept
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.everything import Everything


@kept
def skip_softmax(
    scale_factor: float | None = None,
    *,
    block: int = 128,
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Choose nothing before attention; leave out tiles of keys by a threshold that falls with the prompt's length.

    Args:
        scale_factor: a tile is left out if its weights are below `scale_factor / N` of the greatest one met
            before; 1000 if None, as in TensorRT-LLM's examples.
        block: tokens per block.
        executor: `SkipSoftmaxExecutor(scale_factor)` if None; `SkipSoftmaxExecutor.calibrated(config)` has the
            factor of a checkpoint that ModelOpt calibrated. An executor that leaves out nothing, such as
            `ReferenceExecutor`, attends densely.

    Raises:
        ValueError: both `scale_factor` and `executor` are given.
    """
    if executor is not None and scale_factor is not None:
        raise ValueError(
            "'scale_factor' belongs to the executor, and one is given: use "
            f"skip_softmax(executor=SkipSoftmaxExecutor({shown(scale_factor)}))"
        )
    return Pipeline(
        Identity(),
        NoScorer(block),
        Everything(),
        SkipSoftmaxExecutor(1000.0 if scale_factor is None else scale_factor) if executor is None else executor,
    )
