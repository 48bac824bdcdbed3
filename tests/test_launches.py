"""One call is one launch story: compiled whole, captured and replayed, on any stream and any device."""

from __future__ import annotations

import inspect
import pickle
import sys
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.check.per_head import HeadValues
from blocksparse.kernels.common import hardware
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.testing import every_preset, make_qkv
from tests import stages
from tests.layouts import LAYOUTS
from tests.machine import GPU, needs_gpu
from tests.meaning import assert_same_bits
from tests.stages import PLAIN, ByReference

each_preset = pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
pytestmark = pytest.mark.usefixtures("compiled_anew")
PER_HEAD: AnyPipeline = bs.Pipeline(
    bs.SegmentKeySort(256), bs.MeanPoolScorer(64), bs.TopCdf([0.6, 0.7, 0.8, 0.9]), bs.TritonExecutor()
)


def on_its_kernel(preset: Callable[..., AnyPipeline]) -> AnyPipeline:
    """A preset with the kernel that it has on a GPU at any length, or the reference on a CPU."""
    sizes = {"block": 64} if "block" in inspect.signature(preset).parameters else {}
    pipeline = preset(**sizes)
    if not GPU:
        return evolve(pipeline, executor=bs.ReferenceExecutor())
    return (
        evolve(pipeline, executor=bs.TritonExecutor()) if type(pipeline.executor) is bs.AutoExecutor else pipeline
    )


def inputs(device: str, N: int = 700, M: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return make_qkv(Hq=4, Hkv=2, M=M, N=N, D=64, dtype=dtype, device=device)


# ---- torch.compile


@pytest.mark.slow
@each_preset
def test_every_preset_compiles_whole(preset: Callable[..., AnyPipeline], device: str) -> None:
    """Prompts of two lengths and a chunk of one: the graph gives what the pipeline gives by itself."""
    pipeline = on_its_kernel(preset)
    compiled = torch.compile(lambda q, k, v: pipeline(q, k, v).abs(), fullgraph=True, backend="aot_eager")
    for M, N in ((300, 300), (513, 513), (130, 400)):
        q, k, v = inputs(device, N, M)
        assert torch.equal(compiled(q, k, v), pipeline(q, k, v).abs())


@pytest.mark.parametrize(
    "asked", [{"window": 50, "softcap": 3.0}, {"sinks": torch.tensor([0.0, 1.0, 2.0, -1.0])}], ids=str
)
def test_a_graph_has_what_a_layer_asks_for(asked: dict[str, Any], device: str) -> None:
    q, k, v = inputs(device, 200)
    for pipeline in (PLAIN, bs.HeadGroups({(0,): PLAIN, (1,): None})):
        whole: Any = {"fullgraph": True, "backend": "aot_eager"}
        compiled = torch.compile(lambda q, k, v, pipeline=pipeline: pipeline(q, k, v, **asked).abs(), **whole)
        assert torch.equal(compiled(q, k, v), pipeline(q, k, v, **asked).abs())
        torch.compiler.reset()


@pytest.mark.parametrize(
    ("permuter", "executor", "more"),
    [
        pytest.param(bs.SegmentKeySort(64), bs.TritonExecutor(), {}, marks=pytest.mark.slow),
        (bs.SegmentKeySort(64), bs.TritonExecutor(), {"softcap": 3.0, "sinks": [0.0, 1.0, 2.0, 3.0]}),
        (bs.SegmentKeySort(64), bs.TritonExecutor(), {"sinks": 1.5, "window": 40}),
        (bs.Identity(), bs.Int8Executor(False), {}),
        (bs.GlobalIndexMap(64), bs.GatherExecutor(0.3), {}),
    ],
    ids=stages.name,
)
def test_an_executor_alone_is_one_node(
    permuter: bs.Permuter[Any], executor: bs.Executor[Any, Any], more: dict[str, Any], device: str
) -> None:
    """Queries are computed beside it in the graph, in a chunk, and tokens may stand before heads."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(N=150, M=100, D=16, device=device))
    spec = bs.AttentionSpec(scale=0.3, **more)
    mask = bs.Ranked(bs.Everything())(bs.NoScorer(32)(q, k, permuter(q, k, spec), spec))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> bs.AttentionOutput:
        output = executor(2 * q, k, v, mask, spec)
        return bs.AttentionOutput(output.out + 1, output.lse, output.visit)

    got, want = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v)
    assert_same_bits(got, want)
    assert (got.visited is None) == (want.visited is None)
    if got.visited is not None and want.visited is not None:
        assert torch.equal(got.visited.keep, want.visited.keep)


@pytest.mark.slow
def test_inductor_may_fuse_around_a_call(device: str) -> None:
    def layer(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = (x * 2 + 1).unflatten(-1, (4, 64)).transpose(1, 2)  # tokens before heads, as models have it
        out: Tensor = PLAIN(q, k, v).transpose(1, 2).flatten(-2).tanh()
        return out

    compiled = torch.compile(layer, fullgraph=True)
    for N in (200, 333):
        q, k, v = inputs(device, N)
        x = q.transpose(1, 2).flatten(-2)
        torch.testing.assert_close(compiled(x, k, v), layer(x, k, v), atol=2e-2 if GPU else 1e-5, rtol=0)


def test_pipelines_and_head_groups_are_inputs_of_a_graph() -> None:
    """Another pipeline is not mistaken for the one that was traced."""
    other = evolve(PLAIN, selector=bs.TopK(1))
    groups = bs.HeadGroups({(1,): PLAIN, (0,): None})
    calls: list[Any] = [PLAIN, other, groups, bs.HeadGroups({(0,): other, (1,): PLAIN})]
    compiled = torch.compile(
        lambda call, q, k, v: call(q, k, v, causal=True, scale=0.3), fullgraph=True, backend="aot_eager"
    )
    q, k, v = inputs("cpu", 100)
    outputs = [compiled(call, q, k, v) for call in calls]
    for call, out in zip(calls, outputs, strict=True):
        torch.testing.assert_close(out, call(q, k, v, scale=0.3))
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-2)


slow = pytest.mark.slow


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", None), pytest.param("aot_eager", True, marks=slow)])
@pytest.mark.parametrize("scales", [(0.1, 0.25, None, 2), pytest.param((1, 2, 0.5, -0.3, 0, -0.1), marks=slow)])
def test_a_graph_takes_any_scale(scales: tuple[float | None, ...], backend: str, dynamic: bool | None) -> None:
    """The first is a constant of the graph; torch makes a symbol of what differs from call to call."""
    compiled = torch.compile(
        lambda q, k, v, scale: PLAIN(q, k, v, scale=scale), fullgraph=True, backend=backend, dynamic=dynamic
    )
    q, k, v = inputs("cpu", 40)
    for scale in scales:
        assert torch.equal(compiled(q, k, v, scale), PLAIN(q, k, v, scale=scale))


class _Layer(torch.nn.Module):
    """Attention with a scale of its own; or so many times the usual one, if that is given with a call."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, times: float | None = None) -> Tensor:
        return PLAIN(q, k, v, scale=self.scale if times is None else times * q.shape[-1] ** -0.5)


def test_modules_with_scales_of_their_own_compile_whole() -> None:
    q, k, v = inputs("cpu", 40)
    for scale in (0.1, 0.25, None):
        layer = _Layer(scale)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(q, k, v), layer(q, k, v))


@pytest.mark.parametrize(("backend", "marked"), [("eager", False), pytest.param("aot_eager", True, marks=slow)])
def test_a_scale_may_be_computed_from_a_symbolic_head_dim(backend: str, marked: bool) -> None:
    layer = _Layer(None)
    compiled: Any = torch.compile(layer, fullgraph=True, backend=backend, dynamic=None if marked else True)
    for N, D, times in ((40, 64, None), (60, 32, None), (40, 64, 1.5), (60, 32, 0.5)):
        q, k, v = make_qkv(N=N, D=D)
        for x in (q, k, v) if marked else ():
            torch._dynamo.mark_dynamic(x, 2)
            torch._dynamo.mark_dynamic(x, 3)
        assert torch.equal(compiled(q, k, v, times), layer(q, k, v, times))


def test_a_graph_refuses_what_a_pipeline_refuses() -> None:
    compiled = torch.compile(lambda q, k, v, s: PLAIN(q, k, v, scale=s), fullgraph=True, backend="eager")
    q, k, v = inputs("cpu", 40)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="at least as many keys as queries"):
        compiled(q, k[:, :, :20], v[:, :, :20], 0.1)
    compiled(q, k, v, 0.1)
    with pytest.raises((torch._dynamo.exc.Unsupported, ValueError), match="'scale' must be 0 or of a magnitude"):
        compiled(q, k, v, 1e300)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_graph_and_a_call_lay_out_alike(layout: Callable[[Tensor], Tensor], device: str) -> None:
    q, k, v = (layout(x) for x in make_qkv(B=2, N=40, D=64, Dv=48, device=device))
    compiled: Any = torch.compile(PLAIN.__call__, fullgraph=True, backend="aot_eager")
    got, want = compiled(q, k, v), PLAIN(q, k, v)
    assert got.stride() == want.stride()
    assert torch.equal(got, want)
    torch.testing.assert_close(want, PLAIN(q.contiguous(), k.contiguous(), v.contiguous()))


# ---- memory


@frozen(eq=False)
class _Watched(bs.Scorer[bs.GlobalPermutation, bs.BlockScores]):
    """Remembers whether its scores are still there."""

    inner: bs.Scorer[bs.GlobalPermutation, bs.BlockScores]
    given: list[weakref.ref[Tensor]] = field(factory=list)

    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockScores:
        scores = self.inner(q, k, permutation, spec)
        self.given.append(weakref.ref(scores.values))
        return scores


class _Late(ByReference):
    """Asserts that the scores are gone."""

    def __init__(self, scorer: _Watched) -> None:
        super().__init__()
        self.scorer = scorer

    def __call__(self, *given: Any, **more: Any) -> bs.AttentionOutput:
        assert [given() for given in self.scorer.given] == [None]
        return super().__call__(*given, **more)


def test_nobody_holds_the_scores_while_an_executor_runs() -> None:
    scorer = _Watched(bs.MeanPoolScorer(16))
    bs.Pipeline(bs.Identity(), scorer, bs.TopK(2), _Late(scorer))(*inputs("cpu", 100))
    assert scorer.given


def test_numbers_per_head_are_copied_to_a_device_once() -> None:
    given = torch.tensor([0.5, 0.6])
    values = bs.TopCdf(given).mass
    assert isinstance(values, HeadValues)
    given[0] = 0.9
    assert repr(values) == "[0.5, 0.6000000238418579]"
    assert values.on(torch.device("cpu")) is values.values
    assert values.on(torch.device("meta")) is values.on(torch.device("meta"))
    assert repr(pickle.loads(pickle.dumps(values))) == repr(values)


# ---- CUDA


def captured(pipeline: Any, *args: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A call as a CUDA graph, after two warm-ups on a stream of their own, and where replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            pipeline(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pipeline(*args)
    return graph, out


@needs_gpu
@each_preset
@pytest.mark.parametrize("M", [700, 300])
def test_every_preset_is_captured_and_replayed(preset: Callable[..., AnyPipeline], M: int) -> None:
    pipeline, args = on_its_kernel(preset), inputs("cuda", M=M)
    graph, out = captured(pipeline, *args)
    for _ in range(2):
        for x in args:
            x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, pipeline(*args))


@needs_gpu
def test_numbers_per_head_and_head_groups_are_captured() -> None:
    groups = bs.HeadGroups({(1,): evolve(PER_HEAD, selector=bs.TopK(3)), (0,): None})
    for pipeline in (PER_HEAD, groups):
        args = inputs("cuda")
        graph, out = captured(pipeline, *args)
        args[0].normal_()
        graph.replay()
        assert torch.equal(out, pipeline(*args))


@needs_gpu
@pytest.mark.slow
def test_a_compiled_call_is_captured() -> None:
    args = inputs("cuda")
    compiled = torch.compile(lambda q, k, v: PER_HEAD(q * 1, k, v), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warm-up, capture, and replays
        args[0].normal_()
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*args), PER_HEAD(*args))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@needs_gpu
@each_preset
def test_no_preset_waits_for_the_gpu(preset: Callable[..., AnyPipeline]) -> None:
    pipeline, args = on_its_kernel(preset), inputs("cuda")
    pipeline(*args)
    try:
        torch.cuda.set_sync_debug_mode("error")
        pipeline(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_preset
def test_every_preset_runs_on_a_second_device(preset: Callable[..., AnyPipeline]) -> None:
    pipeline, args = on_its_kernel(preset), inputs("cuda:0")
    q, k, v = (x.to("cuda:1") for x in args)
    out = pipeline(q, k, v)
    assert out.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), pipeline(*args))


# ---- AutoExecutor and dense attention


class _OnGpu(Tensor):
    """Says that it is on a GPU, for rules that look at shapes alone."""

    is_cuda = True


def asking(causal: bool) -> bs.AttentionSpec:
    return bs.AttentionSpec(scale=0.1, causal=causal)


def shaped(Hq: int, M: int, N: int, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> tuple[Tensor, ...]:
    """q, k and v as large as a GPU's, of memory that nobody touches."""
    B, D, Dv = sizes.get("B", 1), 128, sizes.get("Dv", 128)
    one = torch.zeros((), dtype=dtype)
    return one.expand(B, Hq, M, D).as_subclass(_OnGpu), one.expand(B, 1, N, D), one.expand(B, 1, N, Dv)


def with_multiprocessors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=count)
    )
    monkeypatch.setattr(hardware, "_asked", lambda index: hardware.TARGETS["sm_90"])


def test_auto_turns_dense_on_a_cpu_only_where_it_is_told_to() -> None:
    q, k, v = inputs("cpu", 64)
    assert bs.AutoExecutor().dense_because(q, k, v, asking(True)) is None
    assert bs.AutoExecutor(dense_below=1e12).dense_because(q, k, v, asking(True)) is not None
    dense = evolve(PLAIN, executor=bs.AutoExecutor(dense_below=1e12))
    trace = dense.trace(q, k, v)
    assert float(trace.density().min()) == 1
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.ReferenceExecutor())
    torch.testing.assert_close(dense(q, k, v), everything(q, k, v))
    assert bs.TritonExecutor().dense_because(q.as_subclass(_OnGpu), k, v, asking(True)) is None


@pytest.mark.parametrize(
    ("sizes", "causal", "there", "operations"),
    [
        ({"M": 100, "N": 100}, True, 4, 2 * 4 * 5050 * 256),
        ({"M": 1, "N": 100}, True, 4, 2 * 4 * 100 * 256),
        ({"M": 10, "N": 100}, True, 4, 2 * 4 * (10 * 90 + 55) * 256),
        ({"M": 10, "N": 100}, False, 4, 2 * 4 * 1000 * 256),
        ({"M": 10, "N": 100, "B": 3, "Dv": 64}, False, 4, 2 * 3 * 4 * 1000 * 192),
        *(({"M": M, "N": 1000}, False, there, 2 * 4 * M * 1000 * 256 * counted)
          for M, there, counted in ((100, 8, 2.0), (300, 15, 1.25), (300, 99, 2.0), (300, 3, 1.0))),
    ],
)  # fmt: skip
def test_work_is_that_of_both_products(
    sizes: dict[str, int], causal: bool, there: int, operations: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts more where multiprocessors are idle; four heads have four."""
    with_multiprocessors(monkeypatch, there)
    q, k, v = shaped(4, **sizes)  # type: ignore[arg-type]
    assert bs.AutoExecutor(dense_below=operations).dense_because(q, k, v, asking(causal)) is None
    assert bs.AutoExecutor(dense_below=operations + 1).dense_because(q, k, v, asking(causal)) is not None
    assert bs.AutoExecutor(dense_below=0).dense_because(q, k, v, asking(causal)) is None


@pytest.mark.parametrize(("there", "counted"), [(4, ""), (6, ", counted 1.5 times for idle multiprocessors")])
def test_a_dense_call_says_how_much_work_it_is(there: int, counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_multiprocessors(monkeypatch, there)
    q, k, v = inputs("cpu", 100)
    mask, moved = PLAIN.trace(q, k, v).mask, q.as_subclass(_OnGpu)
    reason = bs.AutoExecutor(dense_below=3e11).dense_because(moved, k, v, asking(True))
    work = f"{2 * q.shape[1] * 5050 * (q.shape[3] + v.shape[3]):.1e}".replace("e+", "e")
    assert reason == "little work: fewer than 3.0e11 floating-point operations (dense_below)"
    choice = bs.AutoExecutor(dense_below=3e11).choose(moved, k, v, mask, asking(True))
    assert str(choice) == f"dense attention runs: {reason}; it has {work}{counted}"
    assert bs.AutoExecutor(dense_below=0).choose(moved, k, v, mask, asking(True)).dense_because is None


@each_preset
def test_nobody_rounds_unasked(preset: Callable[..., AnyPipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    with_multiprocessors(monkeypatch, 132)
    executor = preset().executor
    assert not isinstance(executor, bs.Int8Executor)
    if isinstance(executor, bs.AutoExecutor):
        q, k, v = inputs("cpu", 300)
        mask = bs.mean_pooling(executor=bs.ReferenceExecutor()).trace(q, k, v).mask
        choice = executor.choose(q.half().as_subclass(_OnGpu), k.half(), v.half(), mask, asking(True))
        assert "Int8Executor" not in {*choice.refused, type(choice.executor).__name__}


@pytest.mark.parametrize("M", [500, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_a_dense_call_is_exact_and_says_so(
    M: int, causal: bool, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bs.AutoExecutor, "dense_because", lambda *inputs: "it is a test")
    q, k, v = inputs(device, 500, M)
    pipeline = bs.mean_pooling(0.1)
    with caplog.at_level("DEBUG", logger="blocksparse"):
        out = pipeline(q, k, v, causal=causal)
    assert "dense attention runs: it is a test" in caplog.text
    trace = pipeline.trace(q, k, v, causal=causal)
    assert torch.equal(out, trace.output.out)
    assert bool((trace.density() == 1).all())
    assert bool((trace.covered_mass() > 0.999).all())
    assert bool((trace.error() < 0.01).all())
    assert bool(trace.mask.density().max() < 1)


# ---- The host


@pytest.mark.parametrize("executor", [bs.ReferenceExecutor(), bs.AutoExecutor(dense_below=0)], ids=stages.name)
def test_a_call_reaches_its_first_kernel_soon(executor: Any) -> None:
    """In at most 60 calls of Python functions, of a pipeline made anew; a GPU waits for them."""
    q, k, v = inputs("cpu", 300)
    for _ in range(3):
        bs.pbs_attn(executor=executor)(q, k, v)
    pipeline, calls = bs.pbs_attn(executor=executor), list[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not any("/kernels/" in name for name in calls):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(count)
    try:
        pipeline(q, k, v)
    finally:
        sys.setprofile(None)
    assert "/kernels/" in calls[-1]
    assert len(calls) <= 60
