"""S2O: Early Stopping for Sparse Attention via Online Permutation."""

from __future__ import annotations

from blocksparse.checks.validators import block_size, count, multiple, shown
from blocksparse.executors.executor import Executor
from blocksparse.executors.gather import GatherExecutor
from blocksparse.permuters.global_index_map import GlobalIndexMap
from blocksparse.permuters.permutation import Permutation
from blocksparse.pipeline import Pipeline
from blocksparse.presets.preset import Numbers, kept
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.block_mask import RankedBlockMask
from blocksparse.selectors.everything import Everything
from blocksparse.selectors.ranked import Ranked


@kept
def s2o(
    tau: Numbers | None = None,
    *,
    S: int = 256,  # measured, see docs/reference/papers/s2o.md; the paper prints no value
    block: int = 64,  # the paper prints no value (algorithm 2 names tiles B_M and B_N)
    prefix: int | None = 8192,  # algorithm 1 ranks all earlier keys, as None does
    coarse: bool = True,  # equation 2 orders exactly, as False does
    per_query_head: bool = True,  # algorithm 1 has H heads of q and of k
    order_queries: bool = True,  # section 3.1 (i)
    band: int = 0,  # the paper has none
    executor: Executor[Permutation, RankedBlockMask] | None = None,
) -> Pipeline[Permutation, BlockScores, RankedBlockMask]:
    """Attend to the keys of a row's own segment, then to earlier keys, best first, and stop early.

    Earlier keys are sorted by their product with the mean query of the segment.

    Args:
        tau: a row stops after a block that adds less than this share to its softmax denominators; a number, or
            one per query head. 0.01 if None; the paper prints no value.
        S: tokens per segment, a multiple of `block`. Larger segments need fewer index maps, but a row's own
            segment is always computed, so the density cannot be lower than its share.
        block: tokens per block, on both sides; a row of blocks stops as a whole.
        prefix: how many of the earlier keys a map holds, the best ones; a row attends to no others, even if it has
            not stopped by then. At 16384 tokens the default adds almost no error to that of a `tau` of 0.01, but
            much to that of smaller ones (page s2o of the papers). `GlobalIndexMap` says how much memory maps take.
        coarse: choose and order the earlier keys by rounded scores, which takes no full sort on a GPU and adds
            almost no error (docs/reference/papers/s2o.md).
        per_query_head: make one key order per query head instead of one per KV head.
        order_queries: sort the queries of a segment, so that similar ones stop together.
        band: visit the keys up to so many before each query in any case. Without a band (0) a query at the start
            of its segment may miss them. Give it a multiple of `block`, since whole blocks are visited; what it
            is worth is in docs/reference/papers/s2o.md.
        executor: `GatherExecutor(tau)` if None. An executor that does not stop early, such as
            `ReferenceExecutor`, computes every block.

    Raises:
        ValueError: both `tau` and `executor` are given, or `S` is not a multiple of `block`.
    """
    if executor is not None and tau is not None:
        raise ValueError(
            f"'tau' belongs to the executor, and one is given: use s2o(executor=GatherExecutor({shown(tau)}))"
        )
    block_size.check(S=S, block=block)
    count.check(band=band)
    multiple("S", S, "block", block)
    return Pipeline(
        GlobalIndexMap(
            S, prefix=prefix, coarse=coarse, per_query_head=per_query_head, order_queries=order_queries, near=band
        ),
        NoScorer(block),
        Ranked(Everything(), first=Band(band) if band else None),
        GatherExecutor(0.01 if tau is None else tau) if executor is None else executor,
    )
