"""One call is one launch story: compiled whole, captured and replayed, on any stream and any device."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.head_groups import AnyPipeline
from blocksparse.opaque_call import _attend
from blocksparse.per_head import HeadValues
from blocksparse.testing import every_preset, make_qkv
from tests.machine import GPU, needs_gpu

each_preset = pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
PLAIN: AnyPipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())
PER_HEAD: AnyPipeline = bs.Pipeline(
    bs.SegmentKeySort(256), bs.MeanPoolScorer(64), bs.TopCdf([0.6, 0.7, 0.8, 0.9]), bs.TritonExecutor()
)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_an_attached_model_compiles_whole(recorded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from blocksparse.integrations.transformers import DensityRecorder, attach

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.3)
    recorder, eager = DensityRecorder() if recorded else None, DensityRecorder()
    prompts = [torch.randint(0, 61, (2, N)) for N in (96, 131)]
    with attach(model, PLAIN, min_tokens=16, recorder=eager):
        expected = [model(prompt).logits for prompt in prompts]
    with attach(model, PLAIN, min_tokens=16, recorder=recorder):
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        for prompt, logits in zip(prompts, expected, strict=True):
            torch.testing.assert_close(compiled(prompt).logits, logits, atol=1e-4, rtol=1e-4)
    if recorder is not None:  # which shows that the calls were sparse, too
        assert recorder.sparse_calls() == {0: 2, 1: 2}
        torch.testing.assert_close(recorder.density(), eager.density())


def test_what_a_pipeline_refuses_it_refuses_while_a_graph_is_traced() -> None:
    q, k, v = inputs("cpu", 100)
    compiled = torch.compile(lambda q, k, v: PLAIN(q, k, v), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="at least as many keys as queries"):
        compiled(q, k[:, :, :50], v[:, :, :50])


@pytest.mark.parametrize("tokens_first", [False, True])
def test_the_op_keeps_the_rules_of_ops(tokens_first: bool, device: str) -> None:
    q, k, v = inputs(device, 100, 70)
    if tokens_first:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # the schema's own test takes no opaque objects
    torch.library.opcheck(_attend, (q, k, v, PLAIN._call, True, 0.125), test_utils=checks)
    out = _attend(q, k, v, PLAIN._call, True, 0.125)
    assert out.transpose(1, 2).is_contiguous() == tokens_first
    assert torch.equal(out, PLAIN(q, k, v, scale=0.125))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), evolve])
def test_a_copy_of_a_pipeline_calls_itself(copied: Callable[[Any], Any]) -> None:
    pipelines: list[Any] = [PLAIN, PER_HEAD, bs.HeadGroups({(0,): PLAIN})]
    for pipeline in pipelines:
        twin = copied(pipeline)
        assert twin._call.run.__self__ is twin
        assert repr(twin) == repr(pipeline)
        assert "_call" not in repr(pipeline)


# ---- memory


@frozen(eq=False)
class _Watched(bs.Scorer[bs.GlobalPermutation, bs.BlockScores]):
    """Remembers whether its scores are still there."""

    inner: bs.Scorer[bs.GlobalPermutation, bs.BlockScores]
    given: list[weakref.ref[Tensor]] = field(factory=list)

    def __call__(
        self, q: Tensor, k: Tensor, permutation: bs.GlobalPermutation, *, causal: bool, scale: float
    ) -> bs.BlockScores:
        scores = self.inner(q, k, permutation, causal=causal, scale=scale)
        self.given.append(weakref.ref(scores.values))
        return scores


@frozen(eq=False)
class _Late(bs.Executor[bs.GlobalPermutation, bs.BlockMask]):
    """Runs the reference, and asserts that the scores are gone."""

    scorer: _Watched

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask) -> list[str]:
        return []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        permutation: bs.GlobalPermutation,
        mask: bs.BlockMask,
        *,
        scale: float,
    ) -> bs.AttentionOutput:
        assert [given() for given in self.scorer.given] == [None]
        return bs.ReferenceExecutor()(q, k, v, permutation, mask, scale=scale)


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


@needs_gpu
@each_preset
def test_every_preset_follows_the_stream(preset: Callable[..., AnyPipeline]) -> None:
    """Inputs arrive late on a stream: a launch on any other one would read what was there before."""
    pipeline, late = on_its_kernel(preset), inputs("cuda")
    expected = pipeline(*late)
    args = [torch.full_like(x, float("nan")) for x in late]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(args, late, strict=True):
            x.copy_(y)
        out = pipeline(args[0], args[1], args[2])
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


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


def test_auto_never_turns_dense_on_a_cpu() -> None:
    q, k, _ = inputs("cpu", 64)
    assert bs.AutoExecutor().dense_because(q, k) is None
    assert bs.TritonExecutor().dense_because(q.as_subclass(_OnGpu), k) is None


@pytest.mark.parametrize(("keys", "tried"), [(99, False), (100, True)])
def test_auto_tries_8_bits_for_long_prompts_alone(keys: int, tried: bool) -> None:
    q, k, v = inputs("cpu", keys)
    mask = bs.mean_pooling(executor=bs.ReferenceExecutor()).trace(q, k, v).mask
    moved = q.as_subclass(_OnGpu)
    choice = bs.AutoExecutor(dense_below=0, int8_from=100).choose(moved, k, v, mask)
    assert ("Int8Executor" in choice.refused) is tried
    assert "Int8Executor" not in bs.AutoExecutor(dense_below=0).choose(moved, k, v, mask).refused
    executor = bs.sparge().executor
    assert isinstance(executor, bs.AutoExecutor)
    assert executor.int8_from == 65536


@pytest.mark.parametrize(("keys", "dense"), [(64, True), (99, True), (100, False)])
def test_short_prompts_are_dense_on_a_gpu(keys: int, dense: bool) -> None:
    q, k, v = inputs("cpu", keys)
    mask = PLAIN.trace(q, k, v).mask
    executor, moved = bs.AutoExecutor(dense_below=100), q.as_subclass(_OnGpu)
    reason = f"on a GPU, selecting among {keys} keys saves no time (dense_below=100)"
    assert executor.dense_because(moved, k) == (reason if dense else None)
    if dense:
        assert str(executor.choose(moved, k, v, mask)) == f"dense attention runs: {reason}"


@pytest.mark.parametrize("M", [500, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_a_dense_call_is_exact_and_says_so(
    M: int, causal: bool, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bs.AutoExecutor, "dense_because", lambda self, q, k: "it is a test")
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
