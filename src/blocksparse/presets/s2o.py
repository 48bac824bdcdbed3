"""S2O: Early Stopping for Sparse Attention via Online Permutation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blocksparse.executors.executor import Executor
from blocksparse.executors.gather import GatherExecutor
from blocksparse.permuters.global_index_map import GlobalIndexMap
from blocksparse.permuters.permutation import Permutation
from blocksparse.pipeline import Pipeline
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.block_mask import RankedBlockMask
from blocksparse.selectors.everything import Everything
from blocksparse.selectors.ranked import Ranked
from blocksparse.validators import block_size, multiple, shown


def s2o(
    tau: float | Sequence[float] | Tensor | None = None,
    *,
    S: int = 256,  # not printed; measured, see docs/papers/s2o.md
    block: int = 64,  # not printed (algorithm 2 names tiles B_M and B_N)
    prefix: int | None = 8192,  # algorithm 1 ranks all earlier keys; None does
    coarse: bool = True,  # equation 2 orders exactly; False does
    per_query_head: bool = True,  # algorithm 1 has H heads of q and of k
    order_queries: bool = True,  # section 3.1 (i)
    executor: Executor[Permutation, RankedBlockMask] | None = None,
) -> Pipeline[Permutation, BlockScores, RankedBlockMask]:
    """Read the own segment, then earlier keys by their product with its mean query, and stop early.

    Args:
        tau: a row stops after a block that adds less than this share to its softmax denominators; a number, or
            one per query head. 0.01 unless given; the paper prints no value.
        S: tokens per segment, a multiple of `block`. Larger segments take fewer index maps; the own segment,
            which is always computed, is the floor of the density.
        block: tokens per block, on both sides; a row of blocks stops as a whole.
        prefix: only so many of the earlier keys stand in a map, the best ones; a row that has not stopped by then
            ends there. At 16384 tokens the default costs a `tau` of 0.01 nothing to speak of, and smaller ones
            much (docs/papers/s2o.md). See `GlobalIndexMap` for what maps take.
        coarse: choose and order them by steps of their scores, which a GPU does without a sort, and which costs
            next to no error (docs/papers/s2o.md).
        per_query_head: one key order per query head instead of one per KV head.
        order_queries: sort the queries of a segment, so that alike ones stop together.
        executor: `GatherExecutor(tau)` unless given. One that does not stop early, as the reference, computes
            every block.

    Raises:
        ValueError: both `tau` and `executor` are given, or `S` is not a multiple of `block`.
    """
    if executor is not None and tau is not None:
        raise ValueError(
            f"'tau' belongs to the executor, and one is given: use s2o(executor=GatherExecutor({shown(tau)}))"
        )
    block_size.check(S=S, block=block)
    multiple("S", S, "block", block)
    return Pipeline(
        GlobalIndexMap(
            S, prefix=prefix, coarse=coarse, per_query_head=per_query_head, order_queries=order_queries
        ),
        NoScorer(block),
        Ranked(Everything()),
        GatherExecutor(0.01 if tau is None else tau) if executor is None else executor,
    )
