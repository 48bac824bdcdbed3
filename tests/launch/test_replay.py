"""Launch replay: a call gives the same bits as one that runs its stages, on other inputs of the same sizes."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, final

import pytest
import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode

import blocksparse as bs
from blocksparse import pipeline_core
from blocksparse.kernels.hopper.launch import copy_back, whole_rows
from blocksparse.launch import launch_graph
from blocksparse.launch import replay as module
from blocksparse.launch.launch_graph import side_by_side
from blocksparse.launch.replay import GraphCache, replayed
from blocksparse.testing import every_preset, make_qkv
from tests.launch.plus import into, plus
from tests.machine import GPU, needs_gpu, needs_hopper
from tests.on_kernels import pretend_gpu, small_preset

AnyPipeline = bs.Pipeline[Any, Any, Any]
QKV = tuple[Tensor, Tensor, Tensor]

# Interpreted kernels are slow, and those for GPUs want some blocks. The last cell of a scorer's is a short one.
SIZES: dict[str, Any] = {"Hq": 2, "Hkv": 1, "N": 700, "D": 64} if GPU else {"Hq": 2, "Hkv": 1, "N": 42, "D": 16}
FACTOR = 4 if GPU else 1
QUICK = "mean_pooling"
# The others launch no kernel and call nothing of PyTorch that these do not; on a GPU all are quick.
NAMES = [QUICK, "auto", "pbs_attn", "xattention"]


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(module, "GRAPHS", GraphCache(most_graphs=1024, most_seen=4096))


def inputs(seed: int, device: str, **sizes: Any) -> QKV:
    return make_qkv(**{**SIZES, **sizes}, seed=seed, dtype=torch.float16, device=device)


def quick(**changes: Any) -> AnyPipeline:
    return evolve(small_preset(QUICK, FACTOR), **changes)


def captured(pipeline: AnyPipeline, call: QKV, **options: Any) -> AnyPipeline:
    """The pipeline, which has captured a call of these sizes."""
    for _ in range(2):
        pipeline(*call, **options)
    return pipeline


def forbid_stages(monkeypatch: pytest.MonkeyPatch, pipeline: AnyPipeline) -> None:
    def never(*_: object, **__: object) -> Any:
        raise AssertionError("a stage ran, though the call could have been replayed")

    for stage in (pipeline.permuter, pipeline.scorer, pipeline.selector, pipeline.executor):
        monkeypatch.setattr(type(stage), "__call__", never)


def assert_replayed(
    pipeline: AnyPipeline,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> Tensor:
    """A third call runs no stage and gives, as this does, the bits of one that runs them."""
    captured(pipeline, inputs(1, device, **sizes or {}), **options)
    new = inputs(2, device, **sizes or {})
    expected = evolve(pipeline, replay=False)(*new, **options)
    forbid_stages(monkeypatch, pipeline)
    assert torch.equal(pipeline(*new, **options), expected)
    return expected


def by_cuda_graph(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of a CUDA graph that captured the call."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = pipeline(q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    return out


# What users see.


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == QUICK else pytest.mark.slow) for x in NAMES])
def test_every_preset(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    assert_replayed(small_preset(name, FACTOR), monkeypatch, device)


@needs_hopper
@pytest.mark.parametrize("name", ["pbs_attn", "mean_pooling"])
def test_lists_that_are_cut(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A chunk that sees many keys and starts inside a block, replayed and as a CUDA graph."""
    sizes = {"N": 70000, "M": 150}
    with monkeypatch.context() as patch:
        expected = assert_replayed(preset := small_preset(name, FACTOR), patch, device, sizes)
    assert torch.equal(by_cuda_graph(preset, *inputs(2, device, **sizes)), expected)


@needs_gpu
@pytest.mark.parametrize(
    ("executor", "more"),
    [
        (bs.TritonExecutor(pv_skip=-3.0), {}),
        (bs.AutoExecutor(dense_below=0), {}),
        *((bs.TritonExecutor(), more) for more in ({"softcap": 20.0}, {"sinks": [0.5, -1.0]}, {"window": 100})),
    ],
    ids=str,
)
def test_executors_and_what_a_layer_asks_for(
    executor: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    assert_replayed(quick(executor=executor), monkeypatch, device, **more)


@needs_gpu
def test_8_bits_run_in_each_call(device: str) -> None:
    """PyTorch computes what keys have in common."""
    pipeline = quick(executor=bs.Int8Executor())
    for seed in range(3):
        assert torch.equal(
            pipeline(*inputs(seed, device)), quick(executor=bs.Int8Executor())(*inputs(seed, device))
        )
    assert not module.GRAPHS._graphs


@needs_gpu
@pytest.mark.parametrize("name", every_preset)
def test_which_presets_are_replayed(name: str, device: str) -> None:
    """All but those that still call operations of PyTorch between kernels."""
    captured(small_preset(name, FACTOR), inputs(1, device))
    assert bool(module.GRAPHS._graphs) is (name not in ("s2o", "stem", "skip_softmax"))


@needs_gpu
@pytest.mark.parametrize(
    ("name", "most"), [("flex_prefill", 25), ("minference", 16), ("prism", 19), ("flash_prefill", 10)]
)
def test_how_many_launches_a_call_takes(name: str, most: int, device: str) -> None:
    captured(small_preset(name, FACTOR), inputs(1, device))
    ((graph, _),) = module.GRAPHS._graphs.values()
    assert len(graph.steps) <= most


@needs_gpu
def test_another_thread_may_capture_while_launches_are_joined(device: str) -> None:
    """The first replay makes graphs of the driver, with memory; PyTorch's capture elsewhere goes on."""
    pipeline, call = quick(), inputs(1, device)
    expected = evolve(pipeline, replay=False)(*call)
    for _ in range(2):
        pipeline(*call)
    begun, joined, caught = threading.Event(), threading.Event(), list[BaseException]()
    x = torch.ones(4, device=device)
    torch.empty(1 << 26, device=device)  # PyTorch keeps this memory, and takes none for the calls

    def capture() -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x + 1
                begun.set()
                joined.wait(30)
            graph.replay()
            torch.cuda.synchronize()
            assert y.tolist() == [2.0] * 4
        except BaseException as error:
            caught.append(error)
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(30)
    outs = [pipeline(*call) for _ in range(3)]
    joined.set()
    thread.join()
    assert not caught
    assert all(torch.equal(out, expected) for out in outs)


@needs_gpu
@pytest.mark.parametrize("name", every_preset)
def test_other_calls_in_between(name: str, device: str) -> None:
    """Other sizes, directions, scales, layouts and chunks are calls of their own; so are parts of one tensor."""
    pipeline = captured(small_preset(name, FACTOR), inputs(1, device))
    q, k, v = inputs(2, device)
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    together = torch.cat((v, q, k), 1).split((1, 2, 1), 1)
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], {}),
        ([*inputs(3, device, N=SIZES["N"] - 3)], {}),
        ([q, k, v], {"scale": 0.5}),
        (tokens_first, {}),
        ([together[1], together[2], together[0]], {}),
        ([together[1], together[0], together[2]], {}),
        ([q[:, :, 200:], k, v], {}),
        ([q, k, v], {}),
    ]
    for call, options in calls * 3:
        q, k, v = call
        assert torch.equal(pipeline(q, k, v, **options), small_preset(name, FACTOR)(q, k, v, **options))


@pytest.mark.slow
def test_packed_prompts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    sequences = bs.Sequences.packed([SIZES["N"] - 18, 18])
    assert_replayed(quick(), monkeypatch, device, sequences=sequences)


def test_each_output_has_memory_of_its_own(device: str) -> None:
    pipeline = captured(quick(), inputs(1, device))
    first = pipeline(*inputs(2, device))
    before = first.clone()
    pipeline(*inputs(3, device))
    assert torch.equal(first, before)


@frozen
class Strongest(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A stage of a user, written with PyTorch's functions: some return several results, some write in place."""

    replayable = True
    share: float
    ran: ClassVar[list[int]] = []

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        self.ran.append(1)
        values = torch.nan_to_num(scores.values, neginf=-1e9).exp()
        best, at = values.topk(2, dim=-1) if values.shape[-1] > 1 else (values, values.long())
        keep = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, at, True)
        keep |= values >= self.share * best[..., :1]
        columns = torch.arange(values.shape[-1], device=values.device)
        keep = torch.cat([keep[..., :1] | (columns[:1] == 0), keep[..., 1:]], dim=-1)
        return bs.BlockMask((keep | scores.grid.diagonal) & scores.grid.visible, scores.grid)


@final
@frozen
class Unpromised(Strongest):
    """The same, which promises nothing."""

    replayable = False


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside another"])
def test_stages_from_elsewhere_always_run(inside: bool, device: str) -> None:
    selector: bs.Selector[Any, Any] = Unpromised(0.5)
    pipeline = quick(selector=bs.Band(16) | selector if inside else selector)
    Strongest.ran.clear()
    for seed in range(4):
        pipeline(*inputs(seed, device))
    assert len(Strongest.ran) == 4


@pytest.mark.parametrize(
    "selector", [Strongest(0.5), bs.Band(16) | Strongest(0.9)], ids=["alone", "inside another"]
)
def test_replayable_stages_of_users_are_replayed(selector: bs.Selector[Any, Any], device: str) -> None:
    pipeline = captured(quick(selector=selector), inputs(1, device))
    Strongest.ran.clear()
    for seed in (2, 3):
        replayed = pipeline(*inputs(seed, device))
        assert not Strongest.ran
        assert torch.equal(replayed, quick(selector=selector, replay=False)(*inputs(seed, device)))
        Strongest.ran.clear()


@final
@frozen
class Function:
    """A value of a user, with a function of PyTorch's functions."""

    replayable: ClassVar[bool] = True
    of: Callable[..., Tensor]

    def run(self, x: Tensor) -> Tensor:
        return self.of(x)


def _caught(x: Tensor) -> Tensor:
    try:
        return x * float(x.sum())
    except BaseException:
        return x * 0


def _in_a_thread(x: Tensor) -> Tensor:
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(x * 2))
    thread.start()
    thread.join()
    return made[0] * 2


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _with_other_memory(x: Tensor) -> Tensor:
    y = x * 1
    y.data = x * 5
    return y + 1


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x * 2 if bool(x.sum() > 0) else x


@torch.library.custom_op("blocksparse_tests::by_contents", mutates_args=())
def _by_contents(x: Tensor, shapes: bool) -> Tensor:
    if shapes:
        return x.sum().expand(6 if x[0, 0] > 0 else 1) * 1
    return x.double() / 3 if x[0, 0] > 0 else x / 3


def _turned(x: Tensor) -> Tensor:
    turned: Tensor = torch.fft.rfft(x).conj()
    return turned


# Of an `x` with entries above 1, which the captured call, the second one, does not have.
_OF_USERS: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugated": lambda x: torch.view_as_real(_turned(x).mT @ torch.fft.rfft(x)),
    "negated": lambda x: _turned(x).imag.clone(),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "nested": lambda x: torch.nested.as_nested_tensor([x[:2], x]).to_padded_tensor(0.0),
    "how many, none as yet": lambda x: x * len((x > 1).nonzero()),
    "which, none as yet": lambda x: x * x[x > 1].numel(),
    "a part whose place contents decide": lambda x: x.narrow(0, x[:, 0].argmax().clamp(max=2), 2) * 2,
    "some rows": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long(), dim=0).sum(0),
    "a tensor of a tensor's number": lambda x: x + torch.tensor([x.sum(), 1.0], device=x.device).sum(),
    "numbers of a seed": lambda x: x + torch.rand(6, generator=_seeded(x.device), device=x.device),
    "other memory": _with_other_memory,
    "a refusal that is caught": _caught,
    "a refusal in TorchScript": _scripted,
    "another thread": _in_a_thread,
    "an op whose shape contents decide": lambda x: x + _by_contents(x, True),
    "an op whose dtype contents decide": lambda x: _by_contents(x, False) * 2,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("what", _OF_USERS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_functions_of_users_do(what: str, mode: Callable[[], Any], device: str) -> None:
    function = _OF_USERS[what]
    with mode():
        for seed in (0, 1, *range(2, 10)):
            x = x_of(seed, device)
            x = x.clamp(max=1) if seed < 2 else x
            given, expected = replayed(Function(function).run, x), function(x)
            assert (given.shape, given.dtype) == (expected.shape, expected.dtype)
            assert torch.equal(given, expected)


def test_the_default_dtype_is_part_of_a_call(device: str) -> None:
    def run(x: Tensor) -> Tensor:
        return torch.empty(2, device=x.device).fill_(1 / 3) + torch.arange(2, device=x.device) / 3

    x = x_of(1, device)
    for dtype in (torch.float32, torch.float64) * 3:
        torch.set_default_dtype(dtype)
        try:
            given, expected = replayed(Function(run).run, x), run(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert given.dtype == dtype
        assert torch.equal(given, expected)


@final
@frozen
class Power(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A stage of a user whose equality sees neither types nor all fields."""

    replayable = True
    by: float
    most: int = field(default=1, eq=False)
    of: float = field(default=1.0, eq=abs)
    twice: int = field(init=False, eq=False, default=Factory(lambda self: 2 * self.most, takes_self=True))

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        whole = torch.full((1,), 3, device=scores.values.device) * self.by
        most = self.twice - self.most if self.of > 0 else 3
        return bs.TopK(most + (not whole.is_floating_point()))(scores)


def test_stages_of_users_that_differ_share_nothing(device: str) -> None:
    """Also where their own equality takes them for one."""
    stages = [(Power(2), 2), (Power(2.0), 1), (Power(2.0, 2), 2), (Power(2.0, 1, -1.0), 3)]
    assert len({stage for stage, _ in stages}) == 1
    for seed in range(3):
        call = inputs(seed, device)
        for stage, k in stages:
            expected = quick(selector=bs.TopK(k), replay=False)(*call)
            assert torch.equal(quick(selector=stage)(*call), expected)
    assert len(module.GRAPHS._graphs) == 4


@final
@frozen
class Ending(bs.Scorer[bs.Permutation, bs.BlockMass]):
    """A scorer of a user that looks at how far a prompt goes on."""

    replayable = True
    inner: bs.Scorer[Any, bs.BlockMass]

    def __call__(self, q: Tensor, k: Tensor, permutation: bs.Permutation, spec: bs.AttentionSpec) -> bs.BlockMass:
        mass = self.inner(q, k, permutation, spec)
        return bs.BlockMass(mass.values if spec.remaining > 20 else 1 / (1 + mass.values), mass.grid)


def test_a_stage_of_a_user_may_look_at_what_remains(device: str) -> None:
    pipeline, call = quick(selector=bs.TopK(2), scorer=Ending(quick().scorer)), inputs(1, device)
    few, many = (evolve(pipeline, replay=False)(*call, remaining=x) for x in (5, 30))
    assert not torch.equal(few, many)
    for remaining, expected in ((5, few), (30, many)) * 3:
        assert torch.equal(pipeline(*call, remaining=remaining), expected)


def test_a_class_that_only_inherits_its_equality_always_runs(device: str) -> None:
    class Wider(Strongest):  # no class of attrs by itself: equal whatever `k` is
        def __init__(self, k: int) -> None:
            super().__init__(0.5)
            object.__setattr__(self, "k", k)

        def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
            return bs.TopK(vars(self)["k"])(scores)

    assert Wider(1) == Wider(2)
    for k in (1, 2, 1, 2, 1, 2):
        call = inputs(k, device)
        expected = quick(selector=bs.TopK(k), replay=False)(*call)
        assert torch.equal(quick(selector=Wider(k))(*call), expected)
    assert not module.GRAPHS._graphs


def _pickled(pipeline: AnyPipeline) -> AnyPipeline:
    return pickle.loads(pickle.dumps(pipeline))  # type: ignore[no-any-return]


@pytest.mark.parametrize("made", [lambda pipeline: quick(), copy.deepcopy, _pickled, evolve])
def test_equal_pipelines_share_graphs(
    made: Callable[[AnyPipeline], AnyPipeline], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """One that is made anew for each call, or copied for each layer, runs no stage; one of another value does."""
    pipeline = captured(quick(), inputs(1, device))
    new = inputs(2, device)
    expected, other = pipeline(*new), quick(selector=bs.TopK(1))
    forbid_stages(monkeypatch, pipeline)
    assert torch.equal(made(pipeline)(*new), expected)
    with pytest.raises(AssertionError, match="a stage ran"):
        other(*new)


@needs_gpu
def test_threads(device: str) -> None:
    pipeline, prompts = quick(), [inputs(seed, device) for seed in range(3)]
    outputs: dict[int, list[Tensor]] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            outputs[number] = [pipeline(*prompts[number]) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, prompt in enumerate(prompts):
        expected = quick()(*prompt)
        assert all(torch.equal(out, expected) for out in outputs[number])


def test_a_pipeline_without_replay(device: str) -> None:
    pipeline = quick(replay=False)
    assert repr(pipeline).endswith(", replay=False)")
    assert repr(evolve(pipeline, replay=True)) == repr(quick())
    want = captured(quick(), inputs(1, device))(*inputs(2, device))
    assert torch.equal(captured(pipeline, inputs(1, device))(*inputs(2, device)), want)
    before = {len(module.GRAPHS._graphs), len(module.GRAPHS._seen)}
    pipeline(*inputs(2, device))
    assert {len(module.GRAPHS._graphs), len(module.GRAPHS._seen)} == before == {1, 0}


def test_dense_calls_look_nothing_up(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """To find out that such a call is never replayed would take longer than all else that it does."""
    monkeypatch.setattr(pipeline_core, "dense_attention", lambda q, k, v, spec, *, because: v[:, [0, 0]])
    pipeline, (q, k, v) = quick(executor=bs.AutoExecutor()), inputs(1, device)
    for _ in range(3):
        assert torch.equal(pipeline(q, k, v), v[:, [0, 0]])
    assert not module.GRAPHS._graphs
    assert not module.GRAPHS._seen


@needs_gpu
@pytest.mark.parametrize("name", every_preset)
def test_cuda_graphs_streams_and_replays(name: str, device: str) -> None:
    """A CUDA graph captures the stages, and a replay runs on the stream that is current then."""
    pipeline = captured(small_preset(name, FACTOR), inputs(1, device))
    q, k, v = inputs(2, device)
    expected = small_preset(name, FACTOR)(q, k, v)
    assert torch.equal(by_cuda_graph(pipeline, q, k, v), expected)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        for x, new in zip((q, k, v), inputs(3, device), strict=True):
            x.copy_(new)
        out = pipeline(q, k, v)
    side.synchronize()
    assert torch.equal(out, small_preset(name, FACTOR)(q, k, v))


# What may be replayed, by functions of plain tensors.


def x_of(seed: int, device: str, rows: int = 4, cols: int = 6) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(device)


def is_replayed(run: Callable[..., Any], *rest: Any, device: str) -> bool:
    """Whether calls of `run` come to be replayed; each must give what `run` gives."""
    ran = []

    def watched(*args: Any) -> Any:
        ran.append(1)
        return run(*args)

    call = partial(replayed, watched)
    for seed in range(5):
        x = x_of(seed, device)
        expected = run(x.clone(), *rest)
        assert torch.equal(call(x, *rest), expected)
    return len(ran) < 5


def _by_steps(x: Tensor) -> Tensor:
    for by in range(1, 6):
        x = plus(x, by)
    return x


def _in_place(x: Tensor) -> Tensor:
    """Memory that is set to 0 in part, and written in part; the result is a part of it."""
    out = torch.empty(3, 8, 8, device=x.device)
    out[0].zero_()
    out[1:, :, 5:].zero_()
    into(out[1], x[:, :5], 1)
    into(out[2], out[1, :4, :6], 2)
    return out[:2, :4, :5].transpose(0, 1)


def _same_bits(x: Tensor) -> Tensor:
    """Memory that is seen as numbers of another type."""
    memory = torch.empty(4 * 64, dtype=torch.uint8, device=x.device)
    memory.zero_()
    into(memory.view(torch.float32).view(8, 8), x, 1)
    memory.view(torch.int64)[2:4].zero_()
    return plus(memory.view(torch.float32).view(8, 8)[:, :6], 1)


def _views_alone(x: Tensor) -> Tensor:
    return plus(x, 2)[1:].t()[2:4]


def _no_entries(x: Tensor) -> Tensor:
    plus(x[:0], 1)
    return plus(x[1:].unflatten(0, (3, 1))[:, 0].reshape(3, 6).contiguous(), 1)


def _with_empty_places(x: Tensor) -> Tensor:
    """What the kernel for Hopper does with a chunk that starts inside a block: rows in front, and a copy back."""
    out, lse = torch.empty(1, 1, 4, 6, device=x.device), torch.empty(1, 1, 4, device=x.device)
    longer, whole, whole_lse = whole_rows(x[None, None], out, lse, 2)
    whole.copy_(plus(longer[0, 0], 1)[None, None])
    whole_lse.zero_()
    copy_back((whole, whole_lse), (out, lse), 2)
    return out[0, 0]


AN_INPUT = [lambda x: x, lambda x: x[1:], lambda x: x.t()]  # as the result
REPLAYED = [_by_steps, _in_place, _same_bits, _views_alone, _no_entries, _with_empty_places, *AN_INPUT]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("run", REPLAYED)
def test_what_is_replayed(run: Callable[[Tensor], Tensor], mode: Callable[[], Any], device: str) -> None:
    with mode():
        assert is_replayed(run, device=device)


def test_a_replay_relies_on_no_memory_of_an_earlier_one(device: str) -> None:
    """Not on what lies in it: all that it allocates is new and poisoned; and not on where it lies."""
    call, kept = partial(replayed, _in_place), []
    for seed in range(6):
        x = x_of(seed, device)
        out = call(x)
        kept.append(torch.empty(1000 * (seed + 1), device=device))
        assert torch.equal(out, _in_place(x))
        kept.append(out.fill_(float("nan")))


def _sum_of_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    out = torch.empty(3, 8, 8, device=x.device)
    out.zero_()
    for to, each in zip(out, (x[1:].t(), y[:-1], z[2:, :3]), strict=True):
        into(to, each, 1)
    return out


def test_inputs_that_share_memory(device: str) -> None:
    """Parts of one tensor may lie at other places in the next call, and an input may be given twice."""
    call = partial(replayed, _sum_of_three)
    for seed in range(6):
        one, two, three = x_of(seed, device, rows=12).split(4)
        for given in ((one, two, three), (three, one, two), (one, one, two), (two, two.clone(), one)):
            assert torch.equal(call(*given), _sum_of_three(*given))


def test_inputs_of_which_some_share_memory_are_replayed(device: str) -> None:
    """Where the others lie is no matter, though allocations are elsewhere in each call."""
    ran, kept = [], []

    def run(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        ran.append(1)
        return _sum_of_three(x, y, z)

    call = partial(replayed, run)
    for number in range(6):
        kept.append(torch.ones(1000 + 8 * number, device=device))
        x, both = x_of(number, device), x_of(number + 9, device, rows=8)
        assert torch.equal(call(x, both[:4], both[4:]), _sum_of_three(x, both[:4], both[4:]))
    assert len(ran) == 2


def test_what_a_call_depends_on(device: str) -> None:

    def run(x: Tensor, by: float) -> Tensor:
        return plus(x, by + x.shape[-1] + (0.5 if type(by) is int else 0))

    call, x = partial(replayed, run), x_of(0, device, rows=6)
    for _ in range(3):
        for some in (x, x.t(), x[:2], x[:, :2], x[:, 1:], x[::2]):
            for by in (1, 1.0, True, 2.5):
                assert torch.equal(call(some, by), run(some, by))


def test_weights_may_change_in_place(device: str) -> None:
    """What was there before the first call is read in every call."""
    weight = torch.ones(4, 6, device=device)

    def run(x: Tensor) -> Tensor:
        out = torch.empty(2, 8, 8, device=x.device)
        into(out[0], x, 1)
        into(out[1], weight[1:], 1)
        return out[:, :3, :6]

    call, x = partial(replayed, run), x_of(0, device)
    for _ in range(5):
        assert torch.equal(call(x), run(x))
        weight += 1


def _refusing(x: Tensor) -> Tensor:
    launch_graph.refuse_capture("it says so")
    return plus(x, 1)


_CONSTANT = torch.arange(24.0).view(4, 6)
_NEVER_REPLAYED: dict[str, Callable[[Tensor], Tensor]] = {
    "an operation of PyTorch": lambda x: plus(x, 1) * 2,
    "one that writes": lambda x: plus(x, 1).mul_(2),
    "a copy": lambda x: plus(x, 1).clone(),
    "memory that is exchanged": lambda x: plus(x, 1).clone().resize_(2),
    "a number that Python asks for": lambda x: plus(x, 2 if float(x.sum()) > 0 else 3),
    "a size that contents decide": lambda x: plus(x[x[:, 0] > 0], 1),
    "whether something holds": lambda x: plus(x, 1) if bool((x > 0).all()) else plus(x, 2),
    "what was there before": lambda x: _CONSTANT.to(x.device),
    "what refuses": _refusing,
}


@pytest.mark.parametrize("what", _NEVER_REPLAYED)
def test_what_is_not_replayed(what: str, device: str) -> None:
    assert not is_replayed(_NEVER_REPLAYED[what], device=device)


def test_what_was_there_before_is_not_changed_unseen(device: str) -> None:
    """A call that counts itself in a tensor, or sets it to 0, runs each time."""
    count = torch.zeros(3, device=device)

    def run(x: Tensor) -> Tensor:
        count[1:] += 1
        count[:1].zero_()
        return plus(x, float(count[1]))

    call = partial(replayed, run)
    assert [float(call(torch.zeros(1, 1, device=device))) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_random_numbers_are_drawn_anew(device: str) -> None:
    call = partial(replayed, lambda x: plus(torch.rand_like(x), 0))
    x = torch.zeros(4, 6, device=device)
    assert len({float(call(x).sum()) for _ in range(6)}) == 6


def test_much_memory_is_not_replayed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(launch_graph, "_MOST_BYTES", 300)
    assert is_replayed(lambda x: plus(x, 1), device=device)
    assert not is_replayed(lambda x: plus(plus(x, 1), 1), device=device)


def test_the_first_call_keeps_nothing(device: str) -> None:
    """It may be a call that has just enough memory."""
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def run(x: Tensor) -> Tensor:
        for _ in range(3):
            x = plus(x, 1)
            made.append(weakref.ref(x))
        alive.append(sum(ref() is not None for ref in made))
        return x

    replayed(run, torch.zeros(3, 3, device=device))
    assert alive == [1]


def test_nothing_of_a_captured_call_is_kept(device: str) -> None:
    """Neither what it made nor what it was given, also if nothing of that has entries."""
    made: list[weakref.ref[Any]] = []

    def run(x: Tensor) -> Tensor:
        y = plus(x, 1)
        plus(y[:0], 1)
        made.append(weakref.ref(y))
        return plus(y, 1)

    call = partial(replayed, run)
    for _ in range(3):
        x = torch.ones(3, 3, device=device)
        made.append(weakref.ref(x))
        call(x)
        del x
    assert len(made) == 5
    assert not any(ref() is not None for ref in made)
    ((graph, _),) = module.GRAPHS._graphs.values()
    kept = [x for x in graph.fixed if isinstance(x, Tensor)]
    assert [x.untyped_storage().nbytes() for x in kept] == [0]


def test_memory_that_is_too_short_to_capture(device: str) -> None:
    """A call that has just enough runs as it is from then on."""
    ran = []

    def run(x: Tensor) -> Tensor:
        ran.append(launch_graph.current_capture.get() is not None)
        if len(ran) == 2:
            raise torch.OutOfMemoryError
        return plus(x, 1)

    call, x = partial(replayed, run), torch.zeros(3, 3, device=device)
    for _ in range(5):
        assert torch.equal(call(x), x + 1)
    assert ran == [False, True, False, False, False, False]


def test_memory_that_is_too_short_in_one_piece(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A call may still have it in several."""
    call, x = partial(replayed, _by_steps), torch.zeros(3, 3, device=device)
    for _ in range(2):
        call(x)
    allocate = torch.empty

    def short(*shape: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.int32:
            raise torch.OutOfMemoryError
        return allocate(*shape, **options)

    monkeypatch.setattr(torch, "empty", short)
    assert torch.equal(call(x), x + 15)


def test_gradients_and_subclasses_run_as_they_are(device: str) -> None:
    ran = []

    def run(x: Tensor) -> Tensor:
        ran.append(1)
        return x * 2

    call = partial(replayed, run)
    for _ in range(4):
        with torch.enable_grad():
            x = torch.ones(3, device=device, requires_grad=True)
            call(x).sum().backward()
        assert x.grad is not None
        call(torch.nn.Parameter(torch.ones(3, device=device), requires_grad=False))
    assert len(ran) == 8


def test_forward_mode_gradients_are_still_refused(device: str) -> None:
    q, k, v = inputs(1, device)
    pipeline = captured(quick(), (q, k, v))
    want = pipeline(q, k, v)
    with pytest.raises(ValueError, match=r"no forward-mode gradients\. Detach q, k and v"):
        torch.func.jvp(lambda x: pipeline(q, x, v), (k,), (k,))
    detached: Any = torch.func.jvp(lambda x: pipeline(q, x.detach(), v), (k,), (k,))
    assert torch.equal(detached[0], want)


def test_modes_of_torch_functions_are_asked_in_every_call(device: str) -> None:
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out.fill_(2.0) if func is torch.empty else out

    call = partial(replayed, lambda x: torch.empty(2, 2, device=x.device).zero_())
    x = torch.zeros(2, 2, device=device)
    for _ in range(3):
        for _ in range(3):
            assert not bool(call(x).any())
        with Doubles():
            assert not bool(call(x).any())
    assert len(module.GRAPHS._graphs) == 1


def test_an_error_is_not_replayed(device: str) -> None:
    def run(x: Tensor, fails: bool) -> Tensor:
        y = plus(x, 1)
        if fails:
            raise ValueError("as told")
        return y

    call, x = partial(replayed, run), torch.ones(3, 3, device=device)
    for fails in (False, True, True, True, False, False, False):
        if fails:
            with pytest.raises(ValueError, match="as told"):
                call(x, fails)
        else:
            assert torch.equal(call(x, fails), x + 1)
    assert launch_graph.current_capture.get() is None


# The cache of graphs.


def made(calls: GraphCache, *keys: int) -> str:
    """What happens to each call: 1 seen first, r captured, = replayed, . neither."""
    found = ""
    for number in keys:
        key = (number,)
        if calls.get(key) is not None:
            found += "="
        elif (captures := calls.should_capture(key)) is None:
            found += "1"
        else:
            found += "r" if captures else "."
            if captures:
                calls.put(key, "graph")
    return found


def test_what_was_used_least_recently_goes_first() -> None:
    """And comes back as a call that is seen for the first time; one is captured when it is seen again."""
    assert made(GraphCache(2, 9), 1, 2, 1, 1, 3, 2, 2, 1) == "11r=1r=="
    calls = GraphCache(2, 9)
    assert made(calls, 1, 1, 2, 2, 1) == "1r1r="
    assert made(calls, 3, 3) == "1r"
    assert made(calls, 1, 3, 2, 1, 2) == "==1=r"
    assert made(calls, 3, 1, 2) == "1=="


def test_more_calls_than_there_is_room_for_do_not_drive_each_other_out() -> None:
    """In turns: some are replayed all the time, and no other is captured. Later, idle ones give way."""
    calls = GraphCache(8, 99)
    assert made(calls, *range(20)) == "1" * 20
    assert made(calls, *range(20)) == "r" * 8 + "." * 12
    for _ in range(3):
        assert made(calls, *range(20)) == "=" * 8 + "." * 12
    assert made(calls, *[19] * 3, *[18] * 3) == "r==r=="


def test_what_was_seen_once_is_bounded_and_not_captured() -> None:
    calls = GraphCache(4, 8)
    assert made(calls, *range(1000)) == "1" * 1000
    assert len(calls._seen) == 8
    assert made(calls, 0, 999) == "1r"


def test_what_cannot_be_captured_is_not_tried_again() -> None:
    calls = GraphCache(4, 8)
    assert made(calls, 1) == "1"
    calls.exclude((1,))
    assert made(calls, 1, 1, 1) == "..."


@pytest.mark.parametrize("seed", range(20))
def test_memory_in_use_at_a_time_does_not_meet(seed: int) -> None:
    """And takes no more than what is in use at a time, but for gaps: less than half as much again."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 20, (12,), generator=generator)
    last = first + torch.randint(0, 6, (12,), generator=generator)
    sizes = torch.randint(1, 9, (12,), generator=generator).tolist()
    used = list(zip(first.tolist(), last.tolist(), strict=True))
    begins, most = side_by_side(used, sizes), 0
    for step in range(26):
        pieces = sorted(
            (begin, begin + size)
            for begin, size, (a, b) in zip(begins, sizes, used, strict=True)
            if a <= step <= b
        )
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(pieces))
        most = max(most, sum(end - begin for begin, end in pieces))
    assert max(begin + size for begin, size in zip(begins, sizes, strict=True)) <= 1.5 * most


def test_large_memory_is_used_again_within_a_call(device: str) -> None:
    """What each of five steps gives is needed by the next one alone: two pieces are enough for four of them."""
    call = partial(replayed, _by_steps)
    for _ in range(2):
        call(torch.ones(3, 3, device=device))
    ((graph, _),) = module.GRAPHS._graphs.values()
    assert graph.workspace * 4 == 2 * 512
