"""The laws of compositions, each over every legal one of the stages there are.

A test takes one permuter with one scorer and walks through every selector that fits them. What holds of a stage by
itself is in `test_checks.py`, for an executor in every order and with chunks, windows and rows that keep nothing.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv, masked_attention, video_presets
from blocksparse.testing.inputs import shuffled
from tests import stages
from tests.cases import each, each_of_group, grouped
from tests.specs import kept_pairs, not_none

Front = tuple[bs.Permuter[Any], bs.Scorer[Any, Any]]


@attrs.frozen(slots=False, eq=False)
class Choice:
    """What the stages before an executor made of an input, and, if asked for, what the reference makes of that."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: bs.AttentionSpec
    permutation: Any
    scores: Any
    mask: Any

    @cached_property
    def output(self) -> bs.AttentionOutput:
        return bs.ReferenceExecutor()(self.q, self.k, self.v, self.mask, self.spec)


def is_core(front: Front) -> bool:
    """Every scorer in place, and each kind of order once: the fast loop, and every selector."""
    return front[0] is stages.PERMUTERS[0] or stages.is_first(*front)


# A test for each scorer behind the core permuters, and one behind the others.
FRONTS = grouped(
    (((front,), stages.name(*front)) for front in stages.fronts()),
    group=lambda front: stages.name(front[1]),
    is_slow=lambda front: not is_core(front),
)
# One token more than whole blocks of 16 and 32, and than segments of 32 and 48; and a part of a second one of 64.
SIZES: dict[str, Any] = {"B": 2, "Hq": 4, "Hkv": 2, "N": 97, "D": 16}
each_front = each_of_group("front", groups=FRONTS)
each_scorer = pytest.mark.parametrize("scorer", stages.SCORERS, ids=stages.name)
any_direction = pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])


def selectors_for(front: Front) -> list[bs.Selector[Any, Any]]:
    """What a law tries behind a front: every selector that fits it, or three in turn where it is no core front."""
    fitting = stages.selectors_for(front[1])
    if is_core(front):
        return fitting
    turn = 3 * [front[0] is p and front[1] is s for p, s in stages.fronts()].index(True)
    return [fitting[(turn + i) % len(fitting)] for i in range(min(3, len(fitting)))]


def selectors_in_turn(front: Front) -> list[bs.Selector[Any, Any]]:
    """Every selector behind a core front; a fourth of them behind each other, so that every order meets all."""
    fitting = stages.selectors_for(front[1])
    if is_core(front):
        return fitting
    given = stages.needs(front[1], bs.Scorer, 1)
    alike = [s for p, s in stages.fronts() if p is front[0] and stages.needs(s, bs.Scorer, 1) is given]
    step = min(4, len(alike))
    return fitting[alike.index(front[1]) % step :: step]


def traces(
    front: Front,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selectors: list[bs.Selector[Any, Any]] | None = None,
    *,
    causal: bool = True,
) -> Iterator[Choice]:
    """One pass of the front, then each selector. A failure names it."""
    permuter, scorer = front
    if not causal and isinstance(permuter, stages.CAUSAL_ONLY):
        pytest.skip("refuses what is not causal")
    spec = bs.AttentionSpec(scale=q.shape[-1] ** -0.5, causal=causal)
    permutation = permuter(q, k, spec)
    scores = scorer(q, k, permutation, spec)
    for selector in selectors_for(front) if selectors is None else selectors:
        print(f"selector: {selector!r}")
        yield Choice(q, k, v, spec, permutation, scores, selector(scores))


def test_every_stage_has_an_example() -> None:
    for role, examples in (
        (bs.Permuter, stages.PERMUTERS),
        (bs.Scorer, (*stages.SCORERS, *stages.VALUE_SCORERS)),
        (bs.Selector, (*stages.SELECTORS, *stages.REFINED)),
        (bs.Executor, stages.EXECUTORS),
    ):
        missing = {x.__name__ for x in stages.exported(role)} - {type(x).__name__ for x in examples}
        assert not missing, f"an argument has no default: add an example of {missing} to tests/stages.py"
    functions = {n: x for n, x in vars(bs).items() if inspect.isfunction(x)}
    presets = {n for n, x in functions.items() if x.__module__.startswith("blocksparse.presets.")}
    named = {*every_preset, *video_presets, "triangle_mix"}  # the last one gives a Schedule
    assert presets == named, "add the preset to blocksparse.testing.every_preset or video_presets"


@any_direction
@each_front
def test_every_composition_means_what_it_says(front: Front, causal: bool) -> None:
    """The reference is one masked softmax over the pairs that permutation and mask mean.

    Only visible blocks are members, and every causal query keeps its own key. Every selector with every order
    and with every scorer where that is causal, else what `selectors_for` names.
    """
    q, k, v = make_qkv(**SIZES | {"B": 1}, M=60, dtype=torch.float64)
    for trace in traces(front, q, k, v, selectors_in_turn(front) if causal else None, causal=causal):
        grid, pairs = trace.mask.grid, kept_pairs(trace.mask)
        want = masked_attention(q, k, v, pairs, trace.spec.scale)
        torch.testing.assert_close(trace.output.out, want, rtol=0, atol=1e-12)
        assert not bool((trace.mask.keep & ~grid.visible).any())
        if causal:
            own = torch.arange(grid.q_len) + grid.k_len - grid.q_len
            assert bool(pairs[:, :, torch.arange(grid.q_len), own].all())
            assert bool(not_none(trace.output.lse).isfinite().all())


@each_scorer
@pytest.mark.parametrize("asked", [{}, {"window": 40}, {"causal": False}], ids=repr)
def test_plain_torch_scores_shuffled_tokens_as_kernels_do(
    scorer: bs.Scorer[Any, Any], asked: dict[str, Any]
) -> None:
    """In float64 no kernel runs; every query head has an order, and every KV head another."""
    q, k, _ = make_qkv(B=2, N=130, M=75, Hq=4, Hkv=2, D=16)
    order, spec = shuffled(q, k), bs.AttentionSpec(scale=0.25, **asked)
    got, want = scorer(q, k, order, spec), scorer(q.double(), k.double(), order, spec)
    seen = got.grid.visible.expand_as(got.values)
    torch.testing.assert_close(got.values[seen].double(), want.values[seen].double(), rtol=1e-4, atol=1e-5)


@each_scorer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_scored_in_fp32(scorer: bs.Scorer[Any, Any], dtype: torch.dtype, device: str) -> None:
    """Nothing on the way is rounded to it: products here are some hundreds."""
    if "pattern='sum'" in repr(scorer) or isinstance(scorer, bs.QueryRowsScorer):
        pytest.skip("rounds means of cells: tests/papers/test_xattention.py")
    q, k, _ = (10 * x for x in make_qkv(**SIZES, dtype=dtype, device=device))
    spec = bs.AttentionSpec(scale=0.01)
    got, want = (scorer(*qk, bs.GlobalPermutation(), spec) for qk in ((q, k), (q.double(), k.double())))
    for name in ("values", "vertical", "slash", "divergence") if hasattr(want, "slash") else ("values",):
        torch.testing.assert_close(getattr(got, name).double(), getattr(want, name).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("held", [1, pytest.param(5000, marks=pytest.mark.slow)])
@each("stage", (*stages.PERMUTERS, *stages.SCORERS), stages.name)
def test_what_is_held_at_a_time_changes_nothing(stage: Any, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all does not fit at once, stages compute one row after the other, or a few, here in plain torch."""
    (q, k, _), random = make_qkv(**SIZES, M=75, dtype=torch.float64), bs.Random([0.1, 0.2, 0.3, 0.4])
    orders = (bs.Identity(), bs.SegmentKeySort(32)) if isinstance(stage, bs.Scorer) else (stage,)
    scorer = stage if isinstance(stage, bs.Scorer) else bs.NoScorer(16)
    for order, causal in itertools.product(orders, (True, isinstance(stage, stages.CAUSAL_ONLY))):
        spec = bs.AttentionSpec(scale=0.25, causal=causal)

        def chosen(order: Any = order, spec: bs.AttentionSpec = spec) -> tuple[Any, ...]:
            permutation = order(q, k, spec)
            scores = scorer(q, k, permutation, spec)
            return permutation.k_index, permutation.q_index, random(scores).keep, scores.values

        *whole, values = chosen()
        with monkeypatch.context() as little:
            for module in [x for name, x in sys.modules.items() if name.startswith("blocksparse.")]:
                for name in {"_WORKSPACE", "_CPU_WORKSPACE", "_CPU_ROWS", "_SCORES_AT_ONCE"} & vars(module).keys():
                    little.setattr(module, name, held)
            *parts, its_values = chosen()
        assert all(one is other or torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
        torch.testing.assert_close(its_values, values)


@each_scorer
def test_same_scores_same_mask_on_every_device(scorer: bs.Scorer[Any, Any], device: str) -> None:
    if device == "cpu":
        pytest.skip("no GPU here")
    some, spec = make_qkv(**SIZES), bs.AttentionSpec(scale=0.25)
    for q, k in (some[:2], map(torch.ones_like, some[:2])):  # and where all is equal
        here = scorer(q, k, bs.GlobalPermutation(), spec)
        there = scorer(q.to(device), k.to(device), bs.GlobalPermutation(), spec)
        given = {each.alias: getattr(here, each.name) for each in attrs.fields(type(here))}
        given = {name: value() if callable(value) else value for name, value in given.items()}  # what comes later
        tensors = {name: value.to(device) for name, value in given.items() if isinstance(value, Tensor)}
        moved = attrs.evolve(there, **tensors)
        for selector in stages.selectors_for(scorer):
            assert torch.equal(selector(here).keep, selector(moved).keep.cpu())


@pytest.mark.slow
@each_of_group("front", groups=[group for group in FRONTS if not group.marks])
@each("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_bad_and_huge_numbers_never_hang_or_crash(front: Front, value: float) -> None:
    q, k, v = make_qkv(**SIZES)
    q[:, :, 70, 3] = k[:, :, 50, 2] = v[:, :, 20, 1] = value
    for trace in traces(front, q, k, v):
        assert trace.output.out.shape == q.shape
        assert not bool((trace.mask.keep & ~trace.mask.grid.visible).any())


@pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
@each_of_group(
    "N",
    groups=grouped(
        (((x,), str(x)) for x in (1, 129, 63, 65, 127, 200, 500)), lambda x: "some", lambda x: x not in (1, 129)
    ),
)
def test_presets_at_awkward_lengths(preset: Any, N: int) -> None:
    for M in {1, N // 2 + 1, N}:
        q, k, v = make_qkv(N=N, M=M, Hq=7, Hkv=1, D=80)
        trace = preset(executor=bs.ReferenceExecutor()).trace(q, k, v)
        dense = masked_attention(q, k, v, torch.ones(M, N, dtype=torch.bool).tril(N - M), trace.spec.scale)
        assert bool(trace.output.out.isfinite().all())
        error = (trace.output.out - dense).abs().sum((-1, -2)) / dense.abs().sum((-1, -2))
        torch.testing.assert_close(trace.error(), error.double(), rtol=1e-3, atol=1e-5)
        mass = trace.covered_mass()
        assert bool(((mass > 0.5) & (mass < 1 + 1e-6)).all())
