"""A check of what every selector must guarantee."""

from __future__ import annotations

from types import UnionType
from typing import Any

import attrs
import torch
from torch import Tensor

from blocksparse.check.class_line import Declared, a_name, check_gave, declared
from blocksparse.grid import Grid
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.score.scorer import BlockMass, BlockScores, Scorer
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.positions import PositionSelector
from blocksparse.select.selector import Selector
from blocksparse.spec import AttentionSpec
from blocksparse.testing.requirements import (
    LENGTHS,
    SCALE,
    Case,
    about,
    cases,
    orders,
    require,
    unchanged,
    uniform,
)

_BLOCK = 16


def check_selector(
    selector: Selector[Any, Any],
    *,
    scorer: Scorer[Any, Any] | None = None,
    causal: bool | None = None,
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    by_row: bool = True,
    keeps_forced: bool | None = None,
    device: str = "cpu",
) -> None:
    """Call `selector` with scores of prompts and chunks in several orders, and check the masks.

    A mask must keep the diagonal, and only reachable blocks. The same scores must give the same mask; scores of
    blocks that no query reaches, and of later rows, must not matter. A chunk must get its rows of the mask of the
    whole prompt. Nothing may be written into the scores.

    Args:
        scorer: makes the scores. If None, they are random, for selectors of `BlockScores` and `BlockMass`.
        causal: whether calls are causal; None for both kinds.
        lengths: `(N, M)`, the keys and queries of each case.
        by_row: a row of the mask depends only on the same row of the scores. Give False for a selector that
            chooses for all rows of a call at once, such as `GlobalTopCdf` and `LastQueries`.
        keeps_forced: whether forced blocks must be kept; None means yes, except for a `PositionSelector`.

    Raises:
        AssertionError: says in one sentence what is wrong and in which case.
    """
    keeps_forced = not isinstance(selector, PositionSelector) if keeps_forced is None else keeps_forced
    for case in cases(lengths, causal):
        q, k, _ = case.inputs(device=device)
        for permutation in orders(q, k, (Permutation,) if scorer is None else _takes(scorer), causal=case.causal):
            with about(selector, (case, permutation)):
                scores = _scores(selector, scorer, q, k, permutation, causal=case.causal)
                forced = {} if scores.forced is None else {"forced": scores.forced}
                with unchanged(values=scores.values, **forced):
                    _check_one(selector, scores, keeps_forced=keeps_forced)
                if by_row:
                    _check_rows(selector, scores)
    if by_row and causal is not False:
        _check_chunks(selector, scorer, device)


def _check_one(selector: Selector[Any, Any], scores: BlockScores, *, keeps_forced: bool) -> None:
    """Check what must hold for each mask by itself."""
    mask = selector(scores)
    check_gave((Declared(type(selector), BlockMask), *declared(selector, Selector, 1)), mask)
    grid = mask.grid
    require(grid.permutation.orders_as(scores.grid.permutation), "the mask is of another permutation")
    require(~(mask.keep & ~grid.reachable).any(), "it keeps blocks in which no query may see a key")
    require((mask.keep | ~grid.diagonal).all(), "it drops diagonal blocks, which leaves queries without a key")
    if keeps_forced and scores.forced is not None and grid.same_blocks(scores.grid):
        forced = scores.forced & scores.grid.reachable
        require((mask.per_query_head() | ~forced).all(), "it drops forced blocks")
    require(torch.equal(selector(scores).keep, mask.keep), "the same scores gave another mask the second time")
    nonsense = scores.values.masked_fill(~scores.grid.reachable, 1e30)
    again = selector(attrs.evolve(scores, values=nonsense))
    require(torch.equal(again.keep, mask.keep), "scores of blocks that no query reaches changed the mask")


def _check_rows(selector: Selector[Any, Any], scores: BlockScores) -> None:
    """Require that other scores in the last row change no row before it."""
    values = scores.values.clone()
    values[:, :, -1] = values[:, :, -1].flip(-1) * 0.5 + 0.1
    mine, its = selector(scores), selector(attrs.evolve(scores, values=values))
    rows = mine.keep.shape[2] * (values.shape[2] - 1) // values.shape[2]
    rows -= rows % max(1, scores.grid.q_block // mine.grid.q_block)
    require(
        torch.equal(mine.keep[:, :, :rows], its.keep[:, :, :rows]), "scores of a later row changed an earlier one"
    )


def _check_chunks(selector: Selector[Any, Any], scorer: Scorer[Any, Any] | None, device: str) -> None:
    """Require that a chunk gets its rows of the mask of the whole prompt, wherever it starts."""
    case = Case(200, 200, True)
    (q, k, _), spec = case.inputs(device=device), case.spec()
    whole_scores = _scores(selector, scorer, q, k, GlobalPermutation(), causal=True)
    whole, sizes = selector(whole_scores), whole_scores.grid
    for start in (sizes.q_block, 3 * sizes.q_block, 3 * sizes.q_block + 5):
        if start >= q.shape[2]:
            continue
        first = start // sizes.q_block
        grid = Grid.of(q[:, :, start:], k, GlobalPermutation(), spec, q_block=sizes.q_block, k_block=sizes.k_block)
        forced = None if whole_scores.forced is None else whole_scores.forced[..., first:, :]
        chunk_scores = attrs.evolve(
            whole_scores, values=whole_scores.values[:, :, first:], grid=grid, forced=forced
        )
        with about(selector, f"a chunk that starts at {start}"):
            chunk = selector(chunk_scores)
            missing = chunk.grid.q_lead > 0  # whether its first row lacks queries that it has in the whole prompt
            skipped = -(-start // chunk.grid.q_block)
            require(
                torch.equal(chunk.keep[:, :, int(missing) :], whole.keep[:, :, skipped:]),
                "a chunk has another mask than its rows in the whole prompt; count rows from grid.first_row",
            )


def _takes(scorer: Scorer[Any, Any]) -> tuple[type | UnionType, ...]:
    return tuple(each.value for each in declared(scorer, Scorer, 0))


def _scores(
    selector: Selector[Any, Any],
    scorer: Scorer[Any, Any] | None,
    q: Tensor,
    k: Tensor,
    permutation: Permutation,
    *,
    causal: bool,
) -> Any:
    """The scores that `scorer` gives, or random masses with ties and some forced blocks."""
    spec = AttentionSpec(scale=SCALE, causal=causal)
    if scorer is not None:
        return scorer(q, k, permutation, spec)
    grid = Grid.of(q, k, permutation, spec, q_block=_BLOCK, k_block=_BLOCK)
    draw = uniform(1)
    shape = (*q.shape[:2], grid.rows, grid.cols)
    values = (draw(shape) * 8).floor() / 8 + 0.125  # multiples of 1/8, so that many blocks are equal
    forced = draw(shape) < 0.1
    scores = BlockMass(values.to(q.device), grid, forced.to(q.device) & grid.reachable)
    for each in declared(selector, Selector, 0):
        if not isinstance(scores, each.value):
            raise AssertionError(f"it needs {a_name(each.value)}: give a scorer that makes them as scorer=")
    return scores
