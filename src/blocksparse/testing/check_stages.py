"""Checks of what every permuter, scorer and selector must guarantee."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs import evolve
from torch import Tensor

from blocksparse.check.stage import Declared, a_name, check_gave, declared
from blocksparse.grid import Grid
from blocksparse.order.permutation import GlobalPermutation, Permutation, Permuter
from blocksparse.score.key_history import KeyHistory
from blocksparse.score.scorer import BlockMass, BlockScores, Scorer, ValueScorer, scored
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.selector import PositionSelector, Selector
from blocksparse.spec import AttentionSpec
from blocksparse.testing.inputs import (
    LENGTHS,
    SCALE,
    Case,
    about,
    cases,
    orders,
    require,
    shuffled,
    unchanged,
    uniform,
)


def check_permuter(
    permuter: Permuter[Any],
    *,
    causal: bool | None = None,
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    device: str = "cpu",
) -> None:
    """Call `permuter` with prompts and chunks of prompts, and check the permutations that it gives.

    They must be of the type that the permuter's class declares, fit q and k, name no token twice, and leave keys
    in place if `moves_keys` is False. The same inputs must give the same maps, a batch entry must have the maps
    that it has alone, and nothing may be written into the inputs.

    Args:
        causal: whether calls are causal. None for both kinds.
        lengths: `(N, M)`, the keys and queries of each case. Give those that the permuter takes if not all do.

    Raises:
        AssertionError: says in one sentence what is wrong and in which case.
    """
    for case in cases(lengths, causal):
        (q, k, _), spec = case.inputs(device=device), case.spec()
        with about(permuter, case), unchanged(q=q, k=k):
            given = permuter(q, k, spec)
            check_gave((Declared(type(permuter), Permutation), *declared(permuter, Permuter, 0)), given)
            given.check_fits(q, k, causal=case.causal)
            given.check_contents(q, k)
            in_place = given.k_index is None
            require(permuter.moves_keys or in_place, "'moves_keys' is False, and there is a 'k_index'")
            again = permuter(q, k, spec)
            require(_same(given, again), "the same inputs gave other maps the second time")
            alone = permuter(q[1:], k[1:], spec)
            require(_same(given, alone, skipped=1), "a batch entry has another order when it is alone")


def _same(mine: Permutation, its: Permutation, *, skipped: int = 0) -> bool:
    """Whether two permutations hold equal maps, after the first `skipped` batch entries of `mine` are left out."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return (x is None) == (y is None) and (x is None or y is None or torch.equal(x[skipped:], y))

    return mine.group == its.group and equal(mine.k_index, its.k_index) and equal(mine.q_index, its.q_index)


_N = 200  # tokens of the prompt that `_check_causality` cuts and changes


def check_scorer(
    scorer: Scorer[Any, Any],
    *,
    causal: bool | None = None,
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    asks_last_queries: bool = False,
    device: str = "cpu",
) -> None:
    """Call `scorer` with prompts and chunks, in every order that it takes, and check the scores.

    The grid of the scores must belong to the permutation that was given. No score may be NaN, and no `BlockMass`
    negative. The same inputs must give the same scores, a batch entry must have the scores that it has alone, and
    nothing may be written into the inputs. Where every query sees every key, moved tokens must have the scores of
    tokens that stand there. Query heads must have the scores that they have if each has its KV head to itself, and
    a `BlockMass` must follow from the products of `q` and `scale`. In a causal call, a block must keep its score
    when the prompt is cut after it, when later tokens change, and in calls of a chunk of the queries. If it keeps
    a history, chunks must have with it the very scores that they have without. A `ValueScorer` gets values in
    addition to the keys, moved, cut and changed with them, and must reject a call without values.

    Args:
        causal: whether calls are causal. None for both kinds.
        lengths: `(N, M)`, the keys and queries of each case.
        asks_last_queries: scores come from the last queries of a call. They depend on where a prompt ends and how
            it is chunked. Then nothing is checked with cut, changed or chunked prompts.

    Raises:
        AssertionError: says in one sentence what is wrong and in which case.
    """
    for case in cases(lengths, causal):
        (q, k, v), spec = case.inputs(device=device), case.spec()
        needed = tuple(each.value for each in declared(scorer, Scorer, 0))
        for permutation in orders(q, k, needed, causal=case.causal):
            with about(scorer, (case, permutation)), unchanged(q=q, k=k, v=v):
                scores = scored(scorer, q, k, v, permutation, spec)
                check_gave((Declared(type(scorer), BlockScores), *declared(scorer, Scorer, 1)), scores)
                scores.grid.check_fits(q, k, permutation, spec)
                _check_numbers(scores)
                if isinstance(scores, BlockMass):
                    negative = (scores.values < 0) & scores.grid.visible
                    require(~negative.any(), "a BlockMass must not be negative")
                again = scored(scorer, q, k, v, permutation, spec)
                require(
                    torch.equal(scores.values, again.values), "the same inputs gave other scores the second time"
                )
        with about(scorer, case):
            in_place = GlobalPermutation()
            both, alone = (scored(scorer, q[n:], k[n:], v[n:], in_place, spec).values[1 - n :] for n in (0, 1))
            require(_close(both, alone), "a batch entry has other scores when it is alone")
    if causal is not False and not asks_last_queries:
        _check_causality(scorer, device)
    for case in (Case(_N, 1, True), Case(_N, _N // 2, False)):
        if causal in (None, case.causal):
            _check_what_counts(scorer, case, device)
    if causal is not False and scorer.traits.history:
        _check_history(scorer, device)
    if isinstance(scorer, ValueScorer):
        _check_needs_values(scorer, device)


def _check_numbers(scores: BlockScores) -> None:
    """Require that no score is NaN; the message says where the first one is, and what of the block is visible."""
    places = scores.values.isnan().nonzero().tolist()
    if places:
        B, head, row, col = places[0]
        seen = bool(scores.grid.visible.expand_as(scores.values)[B, head, row, col])
        raise AssertionError(
            f"scores contain NaN in {len(places)} of {scores.values.numel()} blocks, first in batch entry {B}, "
            f"head {head}, row {row}, column {col}, {'a visible block' if seen else 'which no query sees'}"
        )


_MOVED = (
    "moved tokens have other scores than tokens that stand there; read tokens in slot order, by "
    "permutation.gather_queries(q) and permutation.gather_keys(k)"
)


def _check_what_counts(scorer: Scorer[Any, Any], case: Case, device: str) -> None:
    """Require that the order of tokens, KV heads and the scale count, where every query sees every key."""
    (q, k, v), spec, in_place = case.inputs(device=device), case.spec(), GlobalPermutation()
    with about(scorer, case):
        scores = scored(scorer, q, k, v, in_place, spec)
        its_k, its_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        own = scored(scorer, q, its_k, its_v, in_place, spec).values
        mine = scores.values.repeat_interleave(own.shape[1] // scores.values.shape[1], 1)
        require(_close(mine, own), "query heads have other scores if each has its KV head to itself")
        moved = shuffled(q, k)
        here = scored(scorer, q, k, v, moved, spec).values
        its_q, its_k, its_v = moved.gather_queries(q), moved.gather_keys(k), moved.gather_keys(v)
        there = scored(scorer, its_q, its_k, its_v, in_place, spec).values
        require(_close(here, there), _MOVED)
        if isinstance(scores, BlockMass):
            halved = scored(scorer, q * 2, k, v, in_place, evolve(spec, scale=spec.scale / 2))
            require(
                _close(scores.values, halved.values), "queries twice as long have other scores with half the scale"
            )


def _check_causality(scorer: Scorer[Any, Any], device: str) -> None:
    """Require that scores stay if a prompt is cut short, if its end changes, and if only a chunk is scored."""
    case = Case(_N, _N, True)
    (q, k, v), spec = case.inputs(device=device), case.spec()
    whole = scored(scorer, q, k, v, GlobalPermutation(), spec)
    q_block, k_block, visible = whole.grid.q_block, whole.grid.k_block, whole.grid.visible
    for N in (_N - 1, _N - 7, 130):
        with about(scorer, f"a prompt cut at {N}"):
            some_q, some_k, some_v = (x[:, :, :N] for x in (q, k, v))
            short = scored(scorer, some_q, some_k, some_v, GlobalPermutation(), spec)
            rows, cols = N // q_block, N // k_block
            seen = visible[..., :rows, :cols]
            require(
                _close(short.values[..., :rows, :cols], whole.values[..., :rows, :cols], seen),
                "the tail of a shorter prompt changed the scores of whole blocks before it",
            )
    t = _N // 2 // q_block * q_block
    with about(scorer, f"other tokens from {t} on"):
        its_q, its_k, its_v = (torch.cat((x[:, :, :t], x[:, :, t:].flip(2)), dim=2) for x in (q, k, v))
        other = scored(scorer, its_q, its_k, its_v, GlobalPermutation(), spec)
        rows = t // q_block
        require(
            _close(other.values[:, :, :rows], whole.values[:, :, :rows], visible[:, :, :rows]),
            "later tokens changed the scores of earlier rows",
        )
    with about(scorer, f"a chunk from {t} on"):
        chunk = scored(scorer, q[:, :, t:], k, v, GlobalPermutation(), spec)
        require(
            _close(chunk.values, whole.values[:, :, rows:], visible[:, :, rows:]),
            "a chunk that starts at a block has other scores than its rows in the whole prompt",
        )


def _check_history(scorer: Scorer[Any, Any], device: str) -> None:
    """Require that chunks have the same scores with a history, also after some of the last keys were rewritten."""
    case = Case(_N, _N, True)
    (q, k, _), spec = case.inputs(device=device), case.spec()
    history, in_place = KeyHistory(), GlobalPermutation()
    for start, end in ((0, 70), (70, _N - 9), (_N - 9, _N), (_N - 40, _N)):
        with about(scorer, f"a chunk from {start} to {end} with a history"):
            if history.tokens > start:
                history.rewind(start)
                k = torch.cat((k[:, :, :start], k[:, :, start:].flip(2)), dim=2)
            chunk, keys = q[:, :, start:end], k[:, :, :end]
            mine = scored(scorer, chunk, keys, None, in_place, spec, history)
            its = scorer(chunk, keys, in_place, spec)
            same = torch.equal(mine.values.where(mine.grid.visible, 0), its.values.where(its.grid.visible, 0))
            require(same, "a chunk has other scores with the history than without")


def _check_needs_values(scorer: ValueScorer[Any, Any], device: str) -> None:
    """Require that values matter, and that a call without them is refused."""
    case, in_place = Case(_N, _N, True), GlobalPermutation()
    (q, k, v), spec = case.inputs(device=device), case.spec()
    louder = v * torch.linspace(0.5, 2, _N, device=v.device, dtype=v.dtype).view(1, 1, -1, 1)
    mine, its = (scorer.with_values(q, k, x, in_place, spec) for x in (v, louder))
    with about(scorer, "other values"):
        require(not _close(mine.values, its.values, mine.grid.visible), "values change no score")
    try:
        scorer(q, k, in_place, spec)
    except ValueError:
        return
    raise AssertionError(f"{scorer!r}: a call without values must be refused. Raise an error then.")


def _close(mine: Tensor, its: Tensor, where: Tensor | bool = True) -> bool:
    """Whether scores are equal up to rounding in the blocks `where`."""
    mine, its = (x.masked_fill(~torch.as_tensor(where, device=x.device), 0.0) for x in (mine, its))
    return torch.allclose(mine, its, rtol=1e-4, atol=1e-5, equal_nan=True)


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

    A mask must keep the diagonal, and only visible blocks. The same scores must give the same mask; scores of
    blocks that no query reaches, and of later rows, must not matter. A chunk must get its rows of the mask of the
    whole prompt. Nothing may be written into the scores.

    Args:
        scorer: makes the scores. If None, they are random: of either sign for a selector of `BlockScores`, and
            positive for one of `BlockMass`.
        causal: whether calls are causal. None for both kinds.
        lengths: `(N, M)`, the keys and queries of each case.
        by_row: a row of the mask depends only on the same row of the scores. Give False for a selector that
            chooses for all rows of a call at once, such as `GlobalTopCdf` and `LastQueries`.
        keeps_forced: whether forced blocks must be kept. None means yes, except for a `PositionSelector`.

    Raises:
        AssertionError: says in one sentence what is wrong and in which case.
    """
    keeps_forced = not isinstance(selector, PositionSelector) if keeps_forced is None else keeps_forced
    needed = (Permutation,) if scorer is None else tuple(each.value for each in declared(scorer, Scorer, 0))
    for case in cases(lengths, causal):
        q, k, _ = case.inputs(device=device)
        for permutation in orders(q, k, needed, causal=case.causal):
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
    require(
        ~(mask.keep & ~grid.visible).any(),
        "it keeps blocks in which no query may see a key; keep only grid.visible",
    )
    sees_a_key = (mask.keep | ~grid.diagonal).all()
    require(sees_a_key, "it drops diagonal blocks, which leaves queries without a key; keep grid.diagonal")
    if keeps_forced and scores.forced is not None and grid.same_blocks(scores.grid):
        forced = scores.forced & scores.grid.visible
        require(
            (mask.per_query_head() | ~forced).all(),
            "it drops forced blocks; keep scores.forced too where it is not None",
        )
    require(torch.equal(selector(scores).keep, mask.keep), "the same scores gave another mask the second time")
    nonsense = scores.values.masked_fill(~scores.grid.visible, 1e30)
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


def _scores(
    selector: Selector[Any, Any],
    scorer: Scorer[Any, Any] | None,
    q: Tensor,
    k: Tensor,
    permutation: Permutation,
    *,
    causal: bool,
) -> Any:
    """The scores that `scorer` gives, or random ones with ties and forced blocks: masses, or of either sign."""
    spec = AttentionSpec(scale=SCALE, causal=causal)
    if scorer is not None:
        return scorer(q, k, permutation, spec)
    grid = Grid.of(q, k, permutation, spec, q_block=_BLOCK, k_block=_BLOCK)
    draw = uniform(1)
    shape = (*q.shape[:2], grid.rows, grid.cols)
    values = (draw(shape) * 8).floor() / 8 + 0.125  # multiples of 1/8, so that many blocks are equal
    forced = draw(shape) < 0.1
    needs = declared(selector, Selector, 0)
    either_sign = all(issubclass(BlockScores, each.value) for each in needs)
    kind, values = (BlockScores, 2 * values - 1) if either_sign else (BlockMass, values)
    scores = kind(values.to(q.device), grid, forced.to(q.device) & grid.visible)
    for each in needs:
        if not isinstance(scores, each.value):
            raise AssertionError(f"it needs {a_name(each.value)}. Give a scorer that makes them as scorer=.")
    return scores
