"""`blocksparse.testing.check_*`: every stage here passes, and each way to break a promise is caught by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import (
    assert_within_budget,
    check_executor,
    check_permuter,
    check_scorer,
    check_selector,
    make_qkv,
    masked_attention,
)
from blocksparse.testing.inputs import error_of_logits
from tests import stages
from tests.machine import needs_flex, needs_hopper
from tests.stages import ByReference

IN_ORDER = bs.GlobalPermutation()
SHORT = ((40, 40), (200, 77))

PERMUTERS = [p for p in stages.PERMUTERS if not isinstance(p, stages.Shuffle)]  # it draws for a batch as a whole


@pytest.mark.parametrize("permuter", PERMUTERS, ids=stages.name)
def test_permuters(permuter: bs.Permuter[Any]) -> None:
    causal = True if isinstance(permuter, stages.CAUSAL_ONLY) else None
    lengths = ((70, 70), (200, 77)) if isinstance(permuter, bs.GridOrder) else ((1, 1), *SHORT)
    check_permuter(permuter, causal=causal, lengths=lengths)


@pytest.mark.parametrize("scorer", stages.SCORERS, ids=stages.name)
def test_scorers(scorer: bs.Scorer[Any, Any]) -> None:
    asks = isinstance(scorer, stages.PROBES) or getattr(scorer, "padded_tail", False)
    check_scorer(scorer, lengths=SHORT, asks_last_queries=asks)


@pytest.mark.parametrize("scorer", stages.VALUE_SCORERS, ids=repr)
def test_scorers_that_judge_by_values(scorer: bs.ValueScorer[Any, Any]) -> None:
    check_scorer(scorer, lengths=SHORT, asks_last_queries=scorer.lengths is None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("selector", [*stages.SELECTORS, *stages.REFINED], ids=stages.name)
def test_selectors(selector: bs.Selector[Any, Any]) -> None:
    lines = issubclass(stages.needs(selector, bs.Selector, 0), bs.VerticalSlashScores)
    whole_call = lines or any(selector is x for x in stages.WHOLE_CALL)
    released = "released=True" in repr(selector)
    scorer: bs.Scorer[Any, Any] | None = bs.VerticalSlashScorer(16) if lines else None
    if isinstance(selector, bs.MeanStd):
        scorer = bs.MeanLogitScorer(16)
    if isinstance(selector, bs.SelectorPair):
        pytest.skip(
            "scores that stand in a pair cannot be changed by themselves; tests/papers/test_prism.py has it"
        )
    lengths = ((70, 70), (200, 77)) if isinstance(selector, bs.GridSelector) else SHORT
    # Rules of position, also inside others, know nothing of forced blocks.
    of_position = isinstance(getattr(selector, "inner", selector), bs.PositionSelector | bs.OnTiles)
    forced = False if of_position or "&" in stages.name(selector) else None
    by_row = not whole_call and not released
    check_selector(selector, scorer=scorer, lengths=lengths, by_row=by_row, keeps_forced=forced)


# What approximates by design has a meaning of its own: tests/test_mean_correction.py, tests/papers/test_skip_softmax.py.
APPROXIMATE = bs.Int8Executor, bs.MeanCorrectionExecutor, bs.SkipSoftmaxExecutor
# The interpreter takes seconds for a length, and FlexExecutor compiles for each.
INTERPRETED = bs.TritonExecutor, bs.FlexExecutor
EXECUTORS = [
    pytest.param(
        e,
        id=stages.name(e),
        marks=[pytest.mark.slow] * isinstance(e, INTERPRETED) + [needs_flex] * isinstance(e, bs.FlexExecutor),
    )
    for e in stages.EXECUTORS
    if not isinstance(e, (bs.AutoExecutor, bs.CudnnExecutor, bs.FlashAttention4Executor, *APPROXIMATE))
]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_executors(executor: bs.Executor[Any, Any], device: str) -> None:
    if isinstance(executor, bs.CpuExecutor) and device != "cpu":
        pytest.skip("it takes CPU tensors")
    slow = (isinstance(executor, bs.TritonExecutor) and device == "cpu") or isinstance(executor, bs.FlexExecutor)
    lengths = ((40, 37),) if slow else ((40, 40), (50, 37))
    causal = True if isinstance(executor, bs.FlexExecutor) else None
    check_executor(executor, lengths=lengths, causal=causal, head_dim=16, block=16, device=device)


@needs_hopper
@pytest.mark.parametrize(
    ("executor", "relative_error"),
    [(bs.TritonExecutor(), None), (bs.TritonExecutor(bs.HopperTiles(2, 128, 2)), None), (bs.Int8Executor(), 0.1)],
    ids=stages.name,
)
def test_executors_on_hopper(executor: bs.Executor[Any, Any], relative_error: float | None) -> None:
    """In the kernels of their own, which take half precision; keys that are NaN among the rest."""
    on: Any = {"head_dim": 128, "block": 128, "dtype": torch.bfloat16, "device": "cuda"}
    check_executor(executor, lengths=((300, 300), (300, 170)), relative_error=relative_error, **on)


class Broken(bs.Permuter[bs.GlobalPermutation]):
    """Keys in order, with one thing wrong."""

    def __init__(self, spoil: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.spoil = spoil

    def __call__(self, q: Tensor, k: Tensor, spec: bs.AttentionSpec) -> bs.GlobalPermutation:
        index = torch.arange(k.shape[2], dtype=torch.int32).expand(*k.shape[:2], 1, -1)
        return bs.GlobalPermutation(self.spoil(index, k))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda index, k: index - 1, "must name key 0 to 0: -1"),
        (lambda index, k: index // 2, "must name each key once: key 0 twice"),
        (lambda index, k: index[:, :1], "Hkv=2 or Hq=4 heads"),
        (lambda index, k: index.long(), "must be int32"),
        (lambda index, k: torch.rand(index.shape).argsort(-1).int(), "other maps the second time"),
        (lambda index, k: (index + len(k)) % index.shape[-1], "another order when it is alone"),
        (lambda index, k: index + k.zero_().int().sum(), "wrote into 'k'"),
    ],
)
def test_broken_permuters(spoil: Callable[[Tensor, Tensor], Tensor], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_permuter(Broken(spoil))


class Scores(bs.Scorer[bs.GlobalPermutation, bs.BlockMass]):
    """Mean keys of blocks, with one thing wrong."""

    def __init__(self, spoil: Callable[[Tensor, bs.Grid, Tensor], Tensor]) -> None:
        self.spoil = spoil

    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockMass:
        right = bs.MeanPoolScorer(16)(q, k, permutation, spec)
        return bs.BlockMass(self.spoil(right.values, right.grid, k), right.grid)


class OtherGrid(Scores):
    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockMass:
        return bs.MeanPoolScorer(16)(q, k, IN_ORDER, spec)


class Deaf(Scores):
    """Hands over something else than what the call asks."""

    def __init__(self, deafen: Callable[..., tuple[Tensor, bs.GlobalPermutation, bs.AttentionSpec]]) -> None:
        self.deafen = deafen

    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockMass:
        grid = bs.MeanPoolScorer(16)(q, k, permutation, spec).grid
        return bs.BlockMass(bs.MeanPoolScorer(16)(q, *self.deafen(q, k, permutation, spec)).values, grid)


@pytest.mark.parametrize(
    ("deafen", "sentence"),
    [
        (
            lambda q, k, order, spec: (k, IN_ORDER, spec),
            "moved tokens have other scores.*by permutation.gather_queries",
        ),
        (lambda q, k, order, spec: (k, evolve(order, q_index=None), spec), "moved tokens have other scores"),
        (lambda q, k, order, spec: (k.roll(1, 1), order, spec), "if each has its KV head to itself"),
        (lambda q, k, order, spec: (k[:, :1].expand_as(k), order, spec), "moved tokens have other scores"),
        (lambda q, k, order, spec: (k, order, evolve(spec, scale=1.0)), "twice as long have other scores"),
    ],
)
def test_scorers_that_do_not_listen(
    deafen: Callable[..., tuple[Tensor, bs.GlobalPermutation, bs.AttentionSpec]], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_scorer(Deaf(deafen), lengths=SHORT)


@pytest.mark.parametrize(
    ("scorer", "sentence"),
    [
        (OtherGrid(lambda values, grid, k: values), "another permutation"),
        (Scores(lambda values, grid, k: values - 1), "must not be negative"),
        (Scores(lambda values, grid, k: values + torch.rand(())), "other scores the second time"),
        (Scores(lambda values, grid, k: values + k[:1].abs().mean()), "other scores when it is alone"),
        (Scores(lambda values, grid, k: values + k[:, :, -1:, :1].abs().mean(1, keepdim=True)), "tail of a shorter prompt|later tokens"),
        (Scores(lambda values, grid, k: values + torch.arange(grid.rows)[:, None]), "a chunk that starts at a block"),
        (Scores(lambda values, grid, k: values.half()), "must be float32"),
        (Scores(lambda values, grid, k: values.where(grid.visible, float("nan"))), r"^scores contain NaN in \d+ of \d+ blocks, first in batch entry 0, head 0, row 0, column 1, which no query sees \("),
        (Scores(lambda values, grid, k: values.log() * 0), "scores contain NaN"),
        (Scores(lambda values, grid, k: values.reshape(7, -1)), r"is invalid for input of size .*Case\(N=40"),
        (Scores(lambda values, grid, k: values[:, 9]), r"out of bounds .*Case\(N=40"),
    ],
)  # fmt: skip
def test_broken_scorers(scorer: bs.Scorer[Any, Any], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_scorer(scorer, lengths=SHORT)


class Keeps(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """Scores above a half, with one thing wrong."""

    def __init__(self, spoil: Callable[[Tensor, bs.BlockScores], Tensor]) -> None:
        self.spoil = spoil

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        grid = scores.grid
        kept = scores.values.where(grid.visible, 0.0) > 0.5
        forced = False if scores.forced is None else scores.forced
        return bs.BlockMask(self.spoil((kept | forced | grid.diagonal) & grid.visible, scores), grid)


def rows_of_the_chunk(keep: Tensor, scores: bs.BlockScores) -> Tensor:
    """Takes every other row to be dense, and forgets that a chunk does not begin with row 0."""
    dense = torch.arange(scores.grid.rows)[:, None] % 2 == 0
    return (keep | dense) & scores.grid.visible


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (rows_of_the_chunk, "a chunk has another mask than its rows in the whole prompt"),
        (lambda keep, scores: keep & ~scores.grid.diagonal, "drops diagonal blocks"),
        (lambda keep, scores: torch.ones_like(keep), "keeps blocks in which no query may see a key"),
        (lambda keep, scores: keep & ~(scores.forced & ~scores.grid.diagonal), "drops forced blocks"),
        (lambda keep, scores: (keep & (scores.values >= 0)) | scores.grid.diagonal, "drops forced blocks"),
        (lambda keep, scores: keep & (scores.grid.diagonal | scores.forced | (torch.rand(keep.shape) < 0.5)), "another mask the second time"),
        (lambda keep, scores: (scores.values > scores.values.mean(-1, keepdim=True)) & scores.grid.visible | keep, "no query reaches changed the mask"),
        (lambda keep, scores: (keep | (scores.values.where(scores.grid.visible, 0).sum((-1, -2), keepdim=True) % 1 > 0.2)) & scores.grid.visible, "a later row changed an earlier one"),
        (lambda keep, scores: keep.logical_and(scores.values.mul_(0.5) >= -1), "wrote into 'values'|second time"),
        (lambda keep, scores: keep[:, :1], "must have the shape"),
    ],
)  # fmt: skip
def test_broken_selectors(spoil: Callable[[Tensor, bs.BlockScores], Tensor], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence) as found:
        check_selector(Keeps(spoil), lengths=SHORT)
    assert len(str(found.value)) < 400
    assert "\n" not in str(found.value)


class Attends(ByReference):
    """The reference, with one thing wrong."""

    def __init__(self, spoil: Callable[[Any, Tensor, Tensor, bs.BlockMask], Any]) -> None:
        super().__init__()
        self.spoil = spoil

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, **more: Any) -> Any:
        return self.spoil(super().__call__(q, k, v, mask, *rest, **more), q, k, mask)


class NeverRuns(Attends):
    def unsupported(self, *_: Any) -> list[str]:
        return ["it is Monday"]


def changed(output: bs.AttentionOutput, **values: Any) -> bs.AttentionOutput:
    return dataclasses.replace(output, **values)


@pytest.mark.parametrize(
    ("executor", "sentence"),
    [
        (Attends(lambda right, q, k, mask: changed(right, out=right.out * 1.1)), "the relative error is 0.1"),
        (Attends(lambda right, q, k, mask: changed(right, out=right.out.where(right.out != 0, float("nan")))), "error is nan"),
        (Attends(lambda right, q, k, mask: changed(right, lse=right.lse.nan_to_num(neginf=0.0))), "must give lse -inf"),
        (Attends(lambda right, q, k, mask: changed(right, out=right.out.half())), "'out' must be"),
        (Attends(lambda right, q, k, mask: changed(right, out=right.out + 0 * k[:, :1, :1, :1])), "key 0, when NaN, reaches queries"),
        (Attends(lambda right, q, k, mask: changed(right, out=(right.out + 1e-4 * q[:, :, -1:, :1]).where(right.out != 0, 0.0))), "later tokens change"),
        (Attends(lambda right, q, k, mask: changed(right, out=right.out + (0 if q.stride(-1) == 1 else 1))), "laid out otherwise"),
        (Attends(lambda right, q, k, mask: q), "must give an AttentionOutput"),
        (NeverRuns(lambda right, q, k, mask: right), "gives reasons against these inputs, but the executor ran them"),
    ],
)  # fmt: skip
def test_broken_executors(executor: bs.Executor[Any, Any], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_executor(executor, lengths=SHORT, head_dim=16, block=16, relative_error=0.05)


def test_a_small_error_is_over_the_budget() -> None:
    worse = Attends(lambda right, q, k, mask: changed(right, out=right.out * 1.0001))
    with pytest.raises(AssertionError, match="over the budget"):
        check_executor(worse, lengths=SHORT, head_dim=16, block=16)


def test_the_budget_of_a_few_rows_is_not_a_matter_of_chance() -> None:
    """Plain torch may err far less than the same sums in another order; what a logit's rounding makes bounds both."""
    over = []
    for seed in range(100):
        q, k, v = make_qkv(Hq=2, Hkv=2, M=1, N=200, D=16, seed=seed)
        pairs = torch.ones(1, 2, 1, 200, dtype=torch.bool)
        want = masked_attention(q.double(), k.double(), v.double(), pairs, 0.25)
        products = q * k * 0.25  # [1, 2, 200, 16], and their sums one after another, and by halves
        one_by_one, by_halves = products[..., 0], products
        for d in range(1, 16):
            one_by_one = one_by_one + products[..., d]
        while by_halves.shape[-1] > 1:
            by_halves = by_halves[..., ::2] + by_halves[..., 1::2]
        got, plain = (x.view(1, 2, 1, 200).softmax(-1) @ v for x in (one_by_one, by_halves))
        assert_within_budget(got, want, plain, least=error_of_logits(q, k, v, pairs, 0.25))
        try:
            assert_within_budget(got, want, plain)
        except AssertionError:
            over.append(seed)
    assert over


def test_logits_that_are_rounded_are_over_the_budget() -> None:
    """To 16 bits of the 24, of a lone query too."""
    q, k, v = make_qkv(Hq=2, Hkv=2, M=1, N=200, D=16)
    pairs = torch.ones(1, 2, 1, 200, dtype=torch.bool)
    want, plain = (
        masked_attention(q.to(t), k.to(t), v.to(t), pairs, 0.25) for t in (torch.float64, torch.float32)
    )
    rounded = (q.view(torch.int32) & -256).view(torch.float32)
    least = error_of_logits(q, k, v, pairs, 0.25)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget(masked_attention(rounded, k, v, pairs, 0.25), want, plain, least=least)
