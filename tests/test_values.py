"""Inputs, values and stages that do not fit one another are refused when they are made or meet, in one sentence."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv
from tests import stages
from tests.specs import asked, grid_of, wrong

# Inputs of a call


nan = float("nan")
SCALES = [(nan, "nan"), (1e300, "1e"), (-1e300, "-1e"), (10**400, "inf"), (Fraction(10**400), "inf"), (10**5000, "inf"),
          (np.float32("inf"), "inf"), (1e-40, "1e-40"), (5e-324, "5e-324"), (2.1**64, "4")]  # fmt: skip


@pytest.mark.parametrize("call", [bs.mean_pooling(), bs.mean_pooling().trace, bs.mean_pooling().with_lse])
def test_tokens_before_heads_are_warned_of(call: Any) -> None:
    """Sizes allow it, and the result is of something else. Said at the caller's line, once for each."""
    heads_first = make_qkv(N=200, Hq=4, Hkv=4, D=16)
    # A process's first call starts the compiler, and Python then forgets which warnings it showed.
    call(*heads_first)
    q, k, v = (x.transpose(1, 2) for x in heads_first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            call(q, k, v)
    (warning,) = caught
    assert "'k' has more heads than tokens: (1, 200, 4, 16). The layout is [B, H, N, D]" in str(warning.message)
    assert warning.filename == __file__


def test_short_prompts_of_many_heads_are_not_warned_of() -> None:
    q, k, v = make_qkv(N=3, Hq=128, Hkv=128, D=16)
    bs.mean_pooling()(q, k, v)
    q, k, v = make_qkv(N=300, M=1, Hq=256, Hkv=256, D=16)
    bs.mean_pooling()(q, k, v)


class Wrapped(torch.Tensor):
    """Has no data of its own, as a DTensor has none."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"work was done: {func}")


class Renamed(torch.Tensor):
    """A subclass that is a tensor all the same."""


def fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


X = torch.ones(1, 2, 8, 16)
KINDS: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "meta": (lambda: X.to("meta"), ValueError, "q, k and v must hold numbers: they are on the meta device"),
    "coo": (lambda: X.to_sparse(), TypeError, r"'q' must be a dense tensor: torch.sparse_coo. Convert it with .to_dense\(\)"),
    "csr": (lambda: X.to_sparse_csr(dense_dim=0), TypeError, "'q' must be a dense tensor: torch.sparse_csr"),
    "bsr": (lambda: X.to_sparse_bsr((2, 2)), TypeError, "'q' must be a dense tensor: torch.sparse_bsr"),
    "nested": (lambda: torch.nested.nested_tensor([X[0], X[0]]), TypeError, "'q' must not be a nested tensor. Call once for the prompts"),
    "jagged": (lambda: torch.nested.nested_tensor([X[0, 0], X[0, 1]], layout=torch.jagged), TypeError, "'q' must not be a nested tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), TypeError, "'q' must be a floating-point tensor: torch.qint8"),
    "fake": (lambda: fake(X), TypeError, "'q' must be a plain tensor: FakeTensor. Pass the tensor that it wraps, as .to_local"),
    "wrapped": (lambda: Wrapped((1, 2, 8, 16)), TypeError, "'q' must be a plain tensor: Wrapped"),
    **{
        str(dtype): (functools.partial(X.to, dtype), TypeError, f"'q' must be a floating-point tensor: {dtype}. Convert it to float16, bfloat16")
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex32, torch.bool, torch.uint8, torch.int64)
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of prototypes
@pytest.mark.parametrize(("make", "kind", "sentence"), KINDS.values(), ids=KINDS)
def test_kinds_of_tensors(
    make: Callable[[], torch.Tensor], kind: type[Exception], sentence: str, device: str
) -> None:
    """Each refused with the reason and at most one fix, whether all inputs are of the kind or q alone, on every way in."""
    pipeline = bs.mean_pooling(executor=bs.ReferenceExecutor())
    x = make()
    for call in (pipeline, pipeline.trace, bs.HeadGroups({(0,): pipeline, (1,): None})):
        with pytest.raises(kind, match=sentence) as error:
            call(x, x, x)
        assert str(error.value).count(". ") <= 1
        with pytest.raises((TypeError, ValueError)):
            call(X, x, X)


def test_tensors_that_are_tensors_all_the_same() -> None:
    q, k, v = make_qkv(N=40)
    pipeline = bs.mean_pooling(block=16, executor=bs.ReferenceExecutor())
    want = pipeline(q, k, v)
    assert torch.equal(pipeline(torch.nn.Parameter(q), k, torch.nn.Parameter(v)), want)
    assert torch.equal(pipeline(q.as_subclass(Renamed), k, v).as_subclass(torch.Tensor), want)


def test_a_sign_that_is_not_in_memory(device: str) -> None:
    """The imaginary part of a conjugate is a view that torch reads with the other sign, and a kernel would not."""
    q, k, v = make_qkv(Hq=1, Hkv=1, N=32, D=16, device=device)
    behind = [torch.complex(torch.zeros_like(x), -x).conj().imag for x in (q, k, v)]
    assert all(x.is_neg() for x in behind)
    pipeline = bs.mean_pooling(0.5, block=16, executor=bs.ReferenceExecutor())
    trace = pipeline.trace(behind[0], behind[1], behind[2])
    assert not any(x.is_neg() for x in (trace.q, trace.k, trace.v))
    assert torch.equal(trace.output.out, pipeline(q, k, v))


@pytest.mark.parametrize(
    "scale", [0.3, 2, np.float32(0.3), np.float64(0.3), np.int64(2), Fraction(1, 3), 2.0**-64, 2.0**64]
)
def test_scales_are_any_real_number(scale: Any) -> None:
    q, k, v = make_qkv(N=40)
    pipeline = bs.mean_pooling(block=16, executor=bs.ReferenceExecutor())
    out = pipeline(q, k, v, scale=scale)
    assert bool(out.isfinite().all())
    assert torch.equal(out, pipeline(q, k, v, scale=float(scale)))


@pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
def test_negative_scales_and_zero(preset: Any) -> None:
    """A negative scale is that of negated queries; under a scale of 0 nothing is preferred."""
    q, k, v = make_qkv(N=200)
    pipeline = preset(executor=bs.ReferenceExecutor())
    for scale, same_q, same_scale in ((-0.3, -q, 0.3), (0, torch.zeros_like(q), 1.0)):
        trace, same = pipeline.trace(q, k, v, scale=scale), pipeline.trace(same_q, k, v, scale=same_scale)
        assert torch.equal(trace.output.out, same.output.out)
        assert torch.equal(trace.mask.keep, same.mask.keep)
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(32), bs.Everything(), bs.ReferenceExecutor())
    mean = v.cumsum(2) / torch.arange(1, 201)[:, None]
    torch.testing.assert_close(everything(q, k, v, scale=0), mean.repeat_interleave(2, 1))


@pytest.mark.parametrize("executor", [bs.TritonExecutor(), bs.ReferenceExecutor()], ids=stages.name)
def test_forward_mode_gradients(executor: bs.Executor[Any, Any], device: str) -> None:
    q, k, v = make_qkv(N=32, D=16, device=device)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(1), executor)
    trace, want = pipeline.trace(q, k, v), pipeline(q, k, v)
    groups = bs.HeadGroups({(0, 1): pipeline})

    def alone(x: torch.Tensor) -> torch.Tensor:
        return executor(x, k, v, trace.mask, asked(trace.mask, 0.25)).out

    calls: list[tuple[Any, torch.Tensor]] = [
        (alone, q),
        (lambda x: pipeline(q, x, v), k),
        (lambda x: groups(q, k, x), v),
    ]
    for call, x in calls:
        with pytest.raises(ValueError, match=r"no forward-mode gradients\. Detach q, k and v"):
            torch.func.jvp(call, (x,), (x,))
    numbers = torch.zeros(4, device=device)
    for attend in (pipeline, groups):
        with pytest.raises(TypeError, match=r"'sinks' must be .* that has a tangent \(detach it\)"):
            torch.func.jvp(lambda sinks, attend=attend: attend(q, k, v, sinks=sinks), (numbers,), (numbers,))
    with forward_ad.dual_level(), pytest.raises(TypeError, match="has a tangent"):
        pipeline(q, k, v, sinks=forward_ad.make_dual(numbers, numbers))
    detached: Any = torch.func.jvp(lambda x: pipeline(q, x.detach(), v), (k,), (k,))
    assert torch.equal(detached[0], want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_executors_alone_take_floats(dtype: torch.dtype) -> None:
    q, k, v = make_qkv(N=32, D=16)
    ranked = bs.Ranked(bs.TopK(1))
    trace = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), ranked, bs.ReferenceExecutor()).trace(q, k, v)
    executors: list[Any] = [bs.ReferenceExecutor(), bs.GatherExecutor(), bs.TritonExecutor()]
    for executor in executors:
        with pytest.raises(TypeError, match=rf"must be floating-point tensors: {dtype}. Convert them to"):
            executor(q.to(dtype), k.to(dtype), v.to(dtype), trace.mask, asked(trace.mask, 0.25))


@pytest.mark.parametrize(
    ("given", "kind", "sentence"),
    [
        *(({"scale": s}, ValueError, r"'scale' must be 0 or of a magnitude from 2\*\*-64 to 2\*\*64: " + shown) for s, shown in SCALES),
        *(({"scale": s}, TypeError, "'scale' must be a number: ") for s in ("1", True, np.True_, 1j, [0.1], torch.tensor(0.1), Decimal("0.1"))),
    ],
)  # fmt: skip
def test_scales_that_are_no_number_or_too_far_from_1(
    given: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        bs.pbs_attn()(*make_qkv(N=16), **given)


# Values that stages hand over


Q, K, V = make_qkv(Hq=4, Hkv=2, N=64, D=16)


def order(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Tokens in order along the last axis."""
    return torch.arange(shape[-1], dtype=dtype).expand(shape)


def grid(
    permutation: bs.Permutation | None = None, q: Tensor = Q, k: Tensor = K, *, block: int = 16, **asked: Any
) -> bs.Grid:
    return grid_of(q, k, block, permutation=permutation, **asked)


def everything(cut: bs.Grid, heads: int = 4) -> bs.RankedBlockMask:
    keep = cut.visible.expand(cut.batch, heads, -1, -1)
    return bs.RankedBlockMask(keep, cut, torch.full(keep.shape, -1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: bs.GlobalPermutation(order(1, 2, 1, 64, dtype=torch.int64)), TypeError, r"'k_index' must be int32: torch.int64. Convert it with .int\(\)"),
        (lambda: bs.GlobalPermutation(q_index=order(1, 4, 64).float()), TypeError, "'q_index' must be int32: torch.float32"),
        (lambda: bs.GlobalPermutation(wrong([1, 2])), TypeError, r"'k_index' must be an int32 tensor \[B, H, G, slots\] or None: list"),
        (lambda: bs.Permutation(order(1, 2, 2, 64), group=0), ValueError, "'group' must be a number of positions, at least 1: 0"),
        (lambda: bs.Permutation(order(1, 1, 4)), ValueError, r"'k_index' must have the shape \[B, H, G, slots\]: \(1, 1, 4\)"),
        (lambda: bs.Permutation(order(1, 1, 2, 4)), ValueError, "'group' must be given for more than one key map: G=2"),
        (lambda: bs.GlobalPermutation(group=64), ValueError, "'group' must be None: one map serves every query: 64"),
        (lambda: grid(bs.GlobalPermutation(order(1, 2, 1, 60))), ValueError, "'k_index' must name each of the 64 keys once: it has 60 slots"),
        (lambda: grid(bs.GlobalPermutation(order(1, 1, 1, 64))), ValueError, r"must have B=1 batch entries and Hkv=2 or Hq=4 heads: \(1, 1, 1, 64\). Use expand\(\)"),
        (lambda: grid(bs.GlobalPermutation(order(3, 2, 1, 64))), ValueError, "must have B=1 batch entries"),
        (lambda: grid(bs.GlobalPermutation(q_index=order(1, 4, 63))), ValueError, r"'q_index' must have the shape \[B, Hq, M\] = \(1, 4, 64\): \(1, 4, 63\)"),
        (lambda: grid(bs.GlobalPermutation(order(1, 2, 1, 64).to("meta"))), ValueError, r"'k_index' must be on the device of q and k \(cpu\): meta"),
        (lambda: grid(bs.Permutation(order(1, 2, 3, 64), group=32)), ValueError, "for each group of 32 positions that queries 0 to 63 lie in, 2 in all: 3"),
        (lambda: bs.BlockMask(torch.ones(1, 4, 4, 5, dtype=torch.bool), grid()), ValueError, r"'keep' must have the shape \[B, H, rows, cols\] = \(1, 4, 4, 4\), or Hkv=2 heads.*: \(1, 4, 4, 5\)"),
        (lambda: bs.BlockMask(torch.ones(1, 3, 4, 4, dtype=torch.bool), grid()), ValueError, r"\(1, 3, 4, 4\)"),
        (lambda: bs.BlockMask(torch.ones(1, 4, 4, 4), grid()), TypeError, "'keep' must be bool: torch.float32"),
        (lambda: bs.RankedBlockMask(everything(grid()).keep, grid(), torch.zeros(1, 4, 4, 4)), TypeError, "'rank' must be int32: torch.float32"),
        (lambda: bs.RankedBlockMask(everything(grid()).keep, grid(), torch.zeros(1, 2, 4, 4).int()), ValueError, "'rank' must have the shape of 'keep'"),
        (lambda: bs.BlockScores(torch.zeros(1, 2, 4, 4), grid()), ValueError, r"'values' must have the shape \[B, Hq, rows, cols\] = \(1, 4, 4, 4\): \(1, 2, 4, 4\)"),
        (lambda: bs.BlockScores(torch.zeros(1, 4, 4, 4).half(), grid()), TypeError, "'values' must be float32: torch.float16"),
        (lambda: bs.BlockScores(torch.zeros(1, 4, 4, 4), grid(), torch.zeros(1, 4, 4, 3).bool()), ValueError, "'forced' must have the shape"),
        (lambda: bs.BlockScores(torch.zeros(1, 4, 4, 4), grid(), torch.zeros(1, 4, 4, 4)), TypeError, "'forced' must be bool"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(make: Callable[[], object], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        make()


@pytest.mark.parametrize(
    ("permutation", "sentence"),
    [
        (bs.GlobalPermutation(order(1, 2, 1, 64) - 1), "'k_index' must name key 0 to 63: -1"),
        (bs.GlobalPermutation(order(1, 2, 1, 64) + 1), "'k_index' must name key 0 to 63: 64"),
        (bs.GlobalPermutation(order(1, 2, 1, 64) // 2), "'k_index' must name each key once: key 0 twice"),
        (bs.GlobalPermutation(q_index=order(1, 4, 64) * 0), "'q_index' must name each query once: query 0 twice"),
        (bs.Permutation(order(1, 2, 2, 64) - 2, group=32), "'k_index' must name key 0 to 63, or be -1 .*: -2"),
        (
            bs.Permutation((order(1, 2, 2, 64) - 1) // 2, group=32),
            "'k_index' must name each key once: key 0 twice",
        ),
    ],
)
def test_contents_on_request(permutation: bs.Permutation, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        permutation.check_contents(Q, K)
    bs.Permutation((order(1, 2, 2, 64) - 1), group=32).check_contents(Q, K)  # an empty slot is no error there


@pytest.mark.parametrize("executor", stages.EXECUTORS, ids=stages.name)
def test_a_mask_of_another_call(executor: bs.Executor[Any, Any]) -> None:
    with pytest.raises(ValueError, match="were made with causal=True, and the call has causal=False"):
        executor(Q, K, V, everything(grid()), bs.AttentionSpec(scale=0.25, causal=False))
    with pytest.raises(ValueError, match=r"were made with window=None, and the call has window=9\. Pass the spec"):
        executor(Q, K, V, everything(grid()), bs.AttentionSpec(scale=0.25, window=9))
    shorter = everything(grid(q=Q[:, :, :40], k=K[:, :, :40]))
    message = r"\(B, Hq, Hkv, M, N\) = \(1, 4, 2, 40, 40\), and q and k have \(1, 4, 2, 64, 64\)"
    with pytest.raises(ValueError, match=message):
        executor(Q, K, V, shorter, asked(shorter, 0.25))
    with pytest.raises((ValueError, TypeError), match="'v' must have the heads, tokens and device of 'k'"):
        executor(Q, K, V[:, :, 1:], everything(grid()), asked(everything(grid()), 0.25))
    with pytest.raises(TypeError, match="one dtype"):
        executor(Q, K, V.half(), everything(grid()), asked(everything(grid()), 0.25))


def test_masks_of_different_grids_and_orders_do_not_mix() -> None:
    """`FlexExecutor` and others would read the union in the order of the first."""
    for other in (grid(block=32), grid(window=40)):
        with pytest.raises(ValueError, match=r"masks must share a grid: .*refine\(\) of the coarser one"):
            bs.Band(8).on(grid()) | bs.Band(8).on(other)
    here, there = everything(grid()), everything(grid(bs.GlobalPermutation(order(1, 2, 1, 64).flip(-1))))
    with pytest.raises(ValueError, match="cut from different permutations"):
        here | there
    with pytest.raises(ValueError, match="cut from different permutations"):
        here & there
    assert torch.equal((here | everything(grid())).keep, here.keep)  # two grids of tokens in place are one order


class Zeros(bs.Permuter[bs.GlobalPermutation]):
    """Breaks its type parameters."""

    def __call__(self, q: Tensor, k: Tensor, spec: bs.AttentionSpec) -> Any:
        return torch.zeros(1)


class OfItsOwn(bs.Scorer[bs.Permutation, bs.BlockScores]):
    """Cuts a grid from an order that nobody gave it."""

    def __init__(self, *, causal: bool = True, permutation: bs.Permutation | None = None) -> None:
        self.causal, self.permutation = causal, permutation

    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockScores:
        cut = grid(self.permutation or permutation, q, k, causal=self.causal)
        return bs.BlockScores(torch.zeros(cut.batch, cut.q_heads, cut.rows, cut.cols), cut)


class GivesScores(bs.Selector[bs.BlockScores, bs.BlockMask]):
    def __call__(self, scores: bs.BlockScores) -> Any:
        return scores


class GivesATensor(stages.ByReference):
    """An executor without an output."""

    def __call__(self, q: Tensor, *given: Any, **more: Any) -> Any:
        return q


@pytest.mark.parametrize(
    ("stages_", "kind", "sentence"),
    [
        ((Zeros(), bs.NoScorer(16), bs.TopK(1), bs.ReferenceExecutor()), TypeError, "Zeros must give a Permutation, and gave a Tensor"),
        ((bs.Identity(), OfItsOwn(causal=False), bs.TopK(1), bs.ReferenceExecutor()), ValueError, "made with causal=False, and the call has causal=True"),
        ((bs.Identity(), OfItsOwn(permutation=bs.GlobalPermutation(order(1, 2, 1, 64))), bs.TopK(1), bs.ReferenceExecutor()), ValueError, "another permutation"),
        ((bs.Identity(), bs.NoScorer(16), GivesScores(), bs.ReferenceExecutor()), TypeError, "GivesScores must give a BlockMask, and gave a BlockScores"),
        ((bs.Identity(), bs.NoScorer(16), bs.TopK(1), GivesATensor()), TypeError, "GivesATensor must give an AttentionOutput, and gave a Tensor"),
    ],
)  # fmt: skip
def test_a_stage_that_breaks_its_promise(stages_: tuple[Any, ...], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        bs.Pipeline(*stages_)(Q, K, V)


# Stages: what mypy rejects, a pipeline refuses when it is made


Masses = "a BlockMass is non-negative scores whose sums along a row have a meaning"
REFERENCE, TRITON, EARLY = bs.ReferenceExecutor(), bs.TritonExecutor(), bs.GatherExecutor(0.1)


def composed(*four: Any) -> Callable[[], object]:
    return lambda: bs.Pipeline(*four)


NONSENSE: list[tuple[Callable[[], object], str]] = [
    (composed(bs.GlobalIndexMap(256), bs.NoScorer(), bs.Everything(), TRITON), "TritonExecutor needs a GlobalPermutation, and GlobalIndexMap gives a Permutation: a GlobalPermutation is one order of the keys that all queries share"),
    (composed(bs.GlobalIndexMap(256), bs.SimilarityGatedScorer(bs.MeanPoolScorer(), 0.5), bs.TopCdf(0.9), REFERENCE), "SimilarityGatedScorer needs a GlobalPermutation, and GlobalIndexMap gives"),
    (composed(bs.Identity(), bs.NoScorer(), bs.TopCdf(0.9), REFERENCE), f"TopCdf needs a BlockMass, and NoScorer gives a BlockScores: {Masses}"),
    (composed(bs.Identity(), stages.AnyOrder(16), bs.TopCdf(0.9) | bs.Sink(), REFERENCE), "TopCdf needs a BlockMass, and AnyOrder gives a BlockScores"),
    (composed(bs.Identity(), stages.AnyOrder(16), bs.SharedByGroup(bs.Refined(bs.TopCdf(0.9), 2)), REFERENCE), "TopCdf needs a BlockMass, and AnyOrder gives a BlockScores"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.VerticalSlashTopK() | bs.Sink(), REFERENCE), "VerticalSlashTopK needs a VerticalSlashScores, and MeanPoolScorer gives a BlockMass"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.TopCdf(0.9), EARLY), "GatherExecutor needs a RankedBlockMask, and TopCdf gives a BlockMask: .*`Ranked"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.Ranked(bs.TopCdf(0.9)) | bs.Sink(), EARLY), "GatherExecutor needs a RankedBlockMask, and Union gives a BlockMask"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.SharedByGroup(bs.Ranked(bs.TopCdf(0.9))), EARLY), "GatherExecutor needs a RankedBlockMask, and SharedByGroup gives a BlockMask"),
    (lambda: bs.SimilarityGatedScorer(wrong(bs.NoScorer()), 0.5), f"SimilarityGatedScorer needs a BlockMass, and NoScorer gives a BlockScores: {Masses}"),
    (lambda: bs.OnTiles(wrong(bs.TopK(3)), 2), "'rule' must be .*PositionSelector"),
    (lambda: bs.SegmentQuerySort(keys=wrong(bs.GlobalIndexMap(64))), "SegmentQuerySort needs a GlobalPermutation, and GlobalIndexMap gives a Permutation"),
    (lambda: bs.Sink() | wrong(bs.Identity()), "unsupported operand|must be .*Selector"),
    (lambda: bs.s2o(executor=wrong(bs.TritonExecutor())), "TritonExecutor needs a GlobalPermutation, and GlobalIndexMap gives"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused_when_it_is_composed(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        make()


def test_every_legal_composition_is_accepted() -> None:
    """Type parameters decide for every example of a stage, and refuse nothing that mypy accepts.

    What type parameters decide is whether two stages fit. Every two that meet are composed: a scorer with each of its
    selectors behind the first order that it takes, and with one in turn behind the others.
    """
    made, seen = 0, set()
    for turn, (permuter, scorer) in enumerate(stages.fronts()):
        fitting = stages.selectors_for(scorer)
        for selector in [fitting[turn % len(fitting)]] if scorer in seen else fitting:
            for executor in stages.EXECUTORS:
                if stages.runs_with(executor, permuter, selector):
                    bs.Pipeline(permuter, scorer, selector, executor)
                    made += 1
                else:
                    with pytest.raises(TypeError, match="needs a"):
                        bs.Pipeline(permuter, scorer, selector, executor)
        seen.add(scorer)
    assert made > 1000


def test_an_executor_by_itself_says_what_it_needs() -> None:
    q, k, v = make_qkv(N=64, D=16)
    spec = bs.AttentionSpec(scale=0.25)
    mask = bs.TopCdf(0.5)(bs.MeanPoolScorer(16)(q, k, bs.GlobalPermutation(), spec))
    with pytest.raises(TypeError, match="GatherExecutor needs a RankedBlockMask, and got a BlockMask"):
        bs.GatherExecutor()(q, k, v, wrong(mask), spec)
    groups = bs.Everything()(bs.NoScorer(16)(q, k, bs.GlobalIndexMap(32)(q, k, spec), spec))
    with pytest.raises(TypeError, match="TritonExecutor needs a GlobalPermutation, and got a Permutation"):
        bs.TritonExecutor()(q, k, v, groups, spec)
    with pytest.raises(TypeError, match="ReferenceExecutor needs a BlockMask, and got a Tensor"):
        bs.ReferenceExecutor()(q, k, v, wrong(mask.keep), spec)


class Untyped(bs.Selector):  # type: ignore[type-arg]
    """Gives no type parameters, as a notebook may."""

    def __call__(self, scores: Any) -> Any:
        return bs.TopK(2)(scores)


class Mean(bs.Scorer):  # type: ignore[type-arg]
    """Says nothing either."""

    def __call__(self, q: Any, k: Any, permutation: Any, spec: bs.AttentionSpec) -> Any:
        return bs.MeanPoolScorer(16)(q, k, permutation, spec)


class OfAny(Mean, bs.Scorer[Any, Any]):
    pass


class OfEither(Mean, bs.Scorer[bs.GlobalPermutation | bs.Permutation, bs.BlockMass]):
    pass


class WithANote(Mean, bs.Scorer[bs.GlobalPermutation, Annotated[bs.BlockMass, "of means"]]):
    pass


class TakesEither(bs.Selector[bs.BlockMass | bs.VerticalSlashScores, bs.BlockMask]):
    def __call__(self, scores: Any) -> bs.BlockMask:
        return bs.TopK(2)(scores)


ScoresT = TypeVar("ScoresT", bound=bs.BlockScores)


class Family(bs.Selector[ScoresT, bs.BlockMask], Generic[ScoresT]):
    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        return bs.TopK(2)(scores)


class OfMasses(Family[bs.BlockMass]):
    pass


@pytest.mark.parametrize(
    ("scorer", "selector"),
    [*((scorer, bs.TopK(2)) for scorer in (Mean(), OfAny(), OfEither(), WithANote())), (Mean(), Untyped())],
    ids=lambda stage: type(stage).__name__,
)
def test_type_parameters_may_say_little(scorer: bs.Scorer[Any, Any], selector: bs.Selector[Any, Any]) -> None:
    q, k, v = make_qkv(N=64, D=16)
    out = bs.Pipeline(bs.Identity(), scorer, selector, REFERENCE)(q, k, v)
    assert torch.equal(out, bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2), REFERENCE)(q, k, v))


def test_a_type_parameter_may_name_several_types_or_be_that_of_a_family() -> None:
    message = "TakesEither needs a BlockMass or a VerticalSlashScores, and NoScorer gives"
    with pytest.raises(TypeError, match=message):
        composed(bs.Identity(), bs.NoScorer(), TakesEither(), REFERENCE)()
    for scorer in (bs.MeanPoolScorer(16), bs.VerticalSlashScorer(16)):
        bs.Pipeline(bs.Identity(), scorer, TakesEither(), REFERENCE)
    with pytest.raises(TypeError, match=f"OfMasses needs a BlockMass, and NoScorer gives a BlockScores: {Masses}"):
        composed(bs.Identity(), bs.NoScorer(), OfMasses(), REFERENCE)()
    bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), OfMasses(), REFERENCE)


def test_a_stage_without_types_is_held_to_what_takes_its_values() -> None:
    q, k, v = make_qkv(N=64, D=16)
    with pytest.raises(TypeError, match="Untyped must give a RankedBlockMask, and gave a BlockMask"):
        bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), Untyped(), EARLY)(q, k, v)


def test_a_pipeline_that_also_keeps_what_a_selector_keeps() -> None:
    pipeline = bs.mean_pooling(0.9)
    banded = pipeline | bs.Band(128)
    assert banded == evolve(pipeline, selector=pipeline.selector | bs.Band(128))
    assert repr(banded.selector).endswith("| Band(tokens=128))")
    with pytest.raises(TypeError, match="GatherExecutor needs a RankedBlockMask"):
        wrong(bs.s2o()) | bs.Band(128)
