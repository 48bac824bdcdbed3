"""What a call computes depends on its inputs alone: not on autocast, nor on what may become of fp32 products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.kernels.gemm import products as module
from blocksparse.kernels.gemm.products import products
from blocksparse.launch.torch_modes import without_autocast
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace
from blocksparse.testing import (
    check_executor,
    check_permuter,
    check_scorer,
    check_selector,
    every_preset,
    make_qkv,
)
from tests import stages
from tests.machine import needs_gpu
from tests.specs import asked

each_preset = pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
each_autocast = pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
FRONT: AnyPipeline = bs.Pipeline(
    bs.SegmentKeySort(32), bs.MeanPoolScorer(16), bs.Ranked(bs.TopK(2)), bs.ReferenceExecutor()
)
# Executors that run here without compiling for seconds; FlexExecutor has a test of its own.
DIRECT = [e for e in stages.EXECUTORS if type(e) in (bs.ReferenceExecutor, bs.TritonExecutor, bs.GatherExecutor)]


@pytest.fixture
def _precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def on_the_reference(preset: Callable[..., AnyPipeline]) -> AnyPipeline:
    """A preset with an executor that runs on any device, its own where it stops early."""
    pipeline = preset()
    return pipeline if preset is bs.s2o else attrs.evolve(pipeline, executor=bs.ReferenceExecutor())


def assert_same(got: Any, want: Any) -> None:
    """Tensors bit by bit, and what holds them field by field."""
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    elif isinstance(want, bs.AttentionOutput):
        for name in ("out", "lse", "visited"):
            assert_same(getattr(got, name), getattr(want, name))
    elif attrs.has(type(want)):
        for field in attrs.fields(type(want)):
            # A field that holds what computes a value has a property that gives it.
            name = field.alias if hasattr(want, field.alias) else field.name
            assert_same(getattr(got, name), getattr(want, name))
    elif not isinstance(want, dict):  # what a grid remembers
        assert got == want


def assert_same_trace(got: AnyTrace, want: AnyTrace) -> None:
    for name in ("permutation", "scores", "mask", "output"):
        assert_same(getattr(got, name), getattr(want, name))
    for measure in (bs.Trace.density, bs.Trace.covered_mass, bs.Trace.error):
        assert torch.equal(measure(got), measure(want))


# ---- autocast


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.bfloat16),
    ],
    ids=str,
)
def test_stages_alone_are_the_same_under_autocast(dtype: torch.dtype, autocast: torch.dtype, device: str) -> None:
    q, k, _ = make_qkv(N=129, D=16, dtype=dtype, device=device)
    for permuter, scorer in stages.fronts():
        if permuter is not stages.PERMUTERS[0] and not stages.is_first(permuter, scorer):
            continue
        permutation = permuter(q, k, bs.AttentionSpec(scale=0.25))
        scores = scorer(q, k, permutation, bs.AttentionSpec(scale=0.25))
        with torch.autocast(device, autocast):
            assert_same(permuter(q, k, bs.AttentionSpec(scale=0.25)), permutation)
            assert_same(scorer(q, k, permutation, bs.AttentionSpec(scale=0.25)), scores)


@pytest.mark.parametrize("executor", DIRECT, ids=stages.name)
def test_executors_alone_are_the_same_under_autocast(executor: bs.Executor[Any, Any], device: str) -> None:
    q, k, v = make_qkv(Hq=2, Hkv=1, N=40, D=16, device=device)
    trace = FRONT.trace(q, k, v)
    want = executor(q, k, v, trace.mask, asked(trace.mask, 0.25))
    with torch.autocast(device, torch.bfloat16):
        assert_same(executor(q, k, v, trace.mask, asked(trace.mask, 0.25)), want)
        dense = dense_attention(q, k, v, bs.AttentionSpec(scale=0.25))
    assert torch.equal(dense, dense_attention(q, k, v, bs.AttentionSpec(scale=0.25)))


def test_head_groups_are_the_same_under_autocast(device: str) -> None:
    groups = bs.HeadGroups({(0, 2): stages.PLAIN, (1,): None})
    for dtype, autocast in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        q, k, v = make_qkv(Hq=6, Hkv=3, N=100, dtype=dtype, device=device)
        out, trace = groups(q, k, v), groups.trace(q, k, v)
        error = trace.error()
        with torch.autocast(device, autocast):
            assert torch.equal(groups(q, k, v), out)
            assert torch.equal(groups.trace(q, k, v).output.out, trace.output.out)
            assert torch.equal(trace.error(), error)


def test_autocast_is_put_back(device: str) -> None:
    x = torch.zeros(2, device=device)
    with without_autocast(x):
        assert not torch.is_autocast_enabled(device)
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        with without_autocast(x):
            assert not torch.is_autocast_enabled(device)
        assert torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()


# ---- dtypes that differ


@each_autocast
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_dtypes_that_differ_become_autocasts(
    dtypes: tuple[torch.dtype, ...], autocast: torch.dtype, device: str
) -> None:
    """As in SDPA; and with autocast off they are refused, as float64 always is."""
    given = make_qkv(N=100, device=device)
    q, k, v = (x.to(dtype) for x, dtype in zip(given, dtypes, strict=True))
    calls: list[Any] = [stages.PLAIN, bs.HeadGroups({(1,): stages.PLAIN, (0,): None})]
    for call in calls:
        want = call(q.to(autocast), k.to(autocast), v.to(autocast))
        with torch.autocast(device, autocast):
            out = call(q, k, v)
            assert torch.nn.functional.scaled_dot_product_attention(q[:, :2], k, v).dtype == out.dtype == autocast
            trace = call.trace(q, k, v)
            with pytest.raises(TypeError, match=r"one dtype: .*, torch\.float64"):
                call(q, k, v.double())
        assert torch.equal(out, want)
        assert torch.equal(trace.output.out, want)
        with pytest.raises(TypeError, match=r"q, k and v must have one dtype: .*. Convert them with"):
            call(q, k, v)


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_graph_converts_as_a_call_does(backend: str, inside: bool, device: str) -> None:
    """Autocast around a compiled function, and in it."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=inside):
            return stages.PLAIN(q, k, v)

    q, k, v = make_qkv(N=100, device=device)
    compiled = torch.compile(layer if inside else stages.PLAIN.__call__, fullgraph=True, backend=backend)
    for values, dtype in ((v.bfloat16(), torch.bfloat16), (v, torch.float32)):
        want = stages.PLAIN(q.to(dtype), k.to(dtype), values)
        with torch.autocast(device, torch.bfloat16, enabled=not inside):
            out = compiled(q, k, values)
        assert out.dtype == dtype
        assert torch.equal(out, want)


# ---- what the process makes new tensors like


@each_preset
@pytest.mark.parametrize("elsewhere", [torch.device("meta"), torch.float64, torch.bfloat16], ids=str)
def test_presets_are_the_same_whatever_new_tensors_are_like(
    preset: Callable[..., AnyPipeline], elsewhere: torch.device | torch.dtype, device: str
) -> None:
    """A model is often built on "meta", and loaded with another dtype as the default; so may be its pipelines."""

    def made_and_called() -> AnyTrace:
        pipeline = on_the_reference(preset)
        q, k, v = make_qkv(N=200, D=32, device=device)
        return pipeline.trace(q, k, v, causal=preset is not bs.a_shape)

    want = made_and_called()
    if isinstance(elsewhere, torch.device):
        with elsewhere:
            got = made_and_called()
            density = got.density()
    else:
        torch.set_default_dtype(elsewhere)
        try:
            got = made_and_called()
            density = got.density()
        finally:
            torch.set_default_dtype(torch.float32)
    assert_same_trace(got, want)
    assert torch.equal(density, want.density())


def test_checks_are_the_same_wherever_new_tensors_are() -> None:
    with torch.device("meta"):
        check_permuter(bs.Identity(), lengths=((40, 40),))
        check_scorer(bs.MeanPoolScorer(16), lengths=((40, 40),))
        check_selector(bs.TopCdf([0.9, 0.8, 0.7, 0.6]), lengths=((40, 40),))
        check_executor(bs.ReferenceExecutor(), lengths=((40, 40),), head_dim=16, block=16)


# ---- fp32 products


@pytest.mark.usefixtures("_precision")
@each_preset
def test_presets_are_the_same_at_any_matmul_precision(preset: Callable[..., AnyPipeline], device: str) -> None:
    if device == "cpu" and module._roundings():
        pytest.skip("products on this CPU are then of float64, and equal up to rounding")
    pipeline = on_the_reference(preset)
    q, k, v = make_qkv(N=200, D=32, device=device)
    want = pipeline.trace(q, k, v)
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        assert_same_trace(pipeline.trace(q, k, v), want)


@pytest.mark.usefixtures("_precision")
def test_products_keep_fp32_where_a_cpu_would_round_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken in float64 there, and only while the process asks for less than fp32."""
    if module._roundings():
        pytest.skip("this CPU does round, so that there is nothing plain to compare with")
    q, k, _ = make_qkv(N=50, D=16)
    plain, exact = products(q, k), products(q.double(), k.double()).float()
    assert not torch.equal(plain, exact)
    for can, precision, want in (
        ({"bf16"}, "medium", exact),
        ({"bf16"}, "high", plain),
        ({"bf16", "tf32"}, "high", exact),
        ({"bf16", "tf32"}, "highest", plain),
        (set(), "medium", plain),
    ):
        monkeypatch.setattr(module, "_roundings", lambda can=can: frozenset(can))
        torch.set_float32_matmul_precision(precision)
        assert torch.equal(products(q, k), want)


def test_a_trace_of_float64_is_measured_in_float64(device: str) -> None:
    """Everything is kept: what is left is the rounding of the measure itself."""
    q, k, v = make_qkv(N=100, dtype=torch.float64, device=device)
    trace = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.ReferenceExecutor()).trace(q, k, v)
    assert float(trace.error().max()) < 1e-14
    assert float((trace.covered_mass() - 1).abs().max()) < 1e-14


@needs_gpu
@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("executor", [*DIRECT, bs.FlexExecutor()], ids=stages.name)
def test_executors_multiply_fp32_exactly_where_tf32_is_allowed(executor: bs.Executor[Any, Any]) -> None:
    q, k, v = make_qkv(N=300, D=64, device="cuda")
    trace = FRONT.trace(q, k, v)
    want = executor(q, k, v, trace.mask, asked(trace.mask, 0.125)).out
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(executor(q, k, v, trace.mask, asked(trace.mask, 0.125)).out, want)
    torch.testing.assert_close(want, trace.output.out, rtol=1e-5, atol=1e-5)
