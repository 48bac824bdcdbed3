"""Stem: Rethinking Causal Information Flow in Sparse Attention (arXiv 2603.06274)."""

from __future__ import annotations

from blocksparse.checks.validators import block_size, size
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockLogits
from blocksparse.scorers.output_aware import OutputAwareScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.decaying_top_k import DecayingTopK
from blocksparse.selectors.sink import Sink


@kept
def stem(
    decay: float = 0.7,  # released configuration, for Qwen3-8B
    *,
    k: int | None = None,  # released code: by the number of blocks
    weight: float = 0.2,  # the same
    lengths: tuple[float, float] | None = None,  # the same: measured
    stride: int = 8,  # the same
    block: int = 128,  # the same
    sink: int = 512,  # the same: 4 blocks
    window: int = 512,  # the same: 4 blocks
    executor: BlockExecutor | None = None,
) -> Preset[BlockLogits]:
    """Keep fewer of the best blocks the later a row is, where long values count, the first keys and a window.

    The released code keeps the first two layers dense: `Schedule(stem(), dense=(0, 1))`.

    Args:
        decay: the share of `k` that the last row of a prompt keeps.
        k: how many blocks a row keeps before the number falls; None for the rule of `DecayingTopK`.
        weight: what a deviation of the logs of the lengths of values adds to a block's logit.
        lengths: the mean and the deviation of these logs; None measures them per head and call, and the choice
            then depends a little on how a prompt is chunked.
        stride: side of the cells on whose antidiagonals logits are taken.
        block: tokens per block.
        sink: tokens at the start of the prompt whose blocks are kept.
        window: tokens in the window that ends with a row of blocks, in whole blocks, the row's own included.
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(sink=sink, window=window)
    return preset(
        Identity(),
        OutputAwareScorer(stride, block=block, weight=weight, lengths=lengths),
        DecayingTopK(k, decay) | (Sink(sink) | Band(max(window - block, 0))),
        executor,
    )
