"""Bad input gets one clear sentence before any work."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv
from tests import stages
from tests.specs import asked

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


def quiet(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Made without what torch says of prototypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


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


@pytest.mark.parametrize(("make", "kind", "sentence"), KINDS.values(), ids=KINDS)
def test_kinds_of_tensors(
    make: Callable[[], torch.Tensor], kind: type[Exception], sentence: str, device: str
) -> None:
    """Each refused with the reason and at most one fix, whether all inputs are of the kind or q alone, on every way in."""
    pipeline = bs.mean_pooling(executor=bs.ReferenceExecutor())
    x = quiet(make)
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


def test_gradients() -> None:
    q, k, v = make_qkv(N=16)
    with (
        torch.enable_grad(),
        pytest.raises(ValueError, match=r"no gradients. Call it under torch.no_grad\(\), or detach"),
    ):
        bs.pbs_attn()(q.requires_grad_(), k, v)
    bs.pbs_attn(executor=bs.ReferenceExecutor())(q, k, v)  # under no_grad it is no matter


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


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: bs.Permutation(torch.zeros(1, 1, 4).int()), r"'k_index' must have the shape \[B, H, G, slots\]: \(1, 1, 4\)"),
        (lambda: bs.Permutation(torch.zeros(1, 1, 2, 4).int()), "'group' must be given for more than one key map: G=2"),
        (lambda: bs.GlobalPermutation(group=64), "'group' must be None: one map serves every query: 64"),
    ],
)  # fmt: skip
def test_permutations(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_refine_needs_a_divisor() -> None:
    selector = bs.Refined(bs.Everything(), 3)
    with pytest.raises(ValueError, match=r"'n' must divide both blocks \(16 x 16\): 3"):
        bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), selector, bs.ReferenceExecutor())(*make_qkv(N=40))


def test_masks_of_different_grids_do_not_mix() -> None:
    q, k, _ = make_qkv(N=64)
    masks = [
        bs.Everything()(bs.MeanPoolScorer(block)(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0)))
        for block in (16, 32)
    ]
    with pytest.raises(ValueError, match=r"masks must share a grid: .*refine\(\) of the coarser one"):
        masks[0] | masks[1]
