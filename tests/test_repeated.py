"""Calls that repeat what an earlier call of the same sizes did: they give its bits, on other inputs."""

from __future__ import annotations

import copy
import ctypes
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import blocksparse as bs
from blocksparse.kernels.common import repetition
from blocksparse.repeated import Repeated
from blocksparse.testing import every_preset, make_qkv
from tests.machine import GPU, needs_gpu, needs_hopper
from tests.on_kernels import pretend_gpu, small_preset

AnyPipeline = bs.Pipeline[Any, Any, Any]
QKV = tuple[Tensor, Tensor, Tensor]

# Interpreted kernels are slow, and those for GPUs want some blocks.
SIZES: dict[str, Any] = {"Hq": 2, "Hkv": 1, "N": 700, "D": 64} if GPU else {"Hq": 2, "Hkv": 1, "N": 40, "D": 16}
FACTOR = 4 if GPU else 1
QUICK = "mean_pooling"
# The others launch no kernel and call nothing of PyTorch that these do not; on a GPU all are quick.
NAMES = (
    [*every_preset] if GPU else [QUICK, "pbs_attn", "s2o", "sparge", "xattention", "flex_prefill", "minference"]
)


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)


def inputs(seed: int, device: str, **sizes: Any) -> QKV:
    return make_qkv(**{**SIZES, **sizes}, seed=seed, dtype=torch.float16, device=device)


def quick(**changes: Any) -> AnyPipeline:
    return evolve(small_preset(QUICK, FACTOR), **changes)


def learnt(pipeline: AnyPipeline, call: QKV, **options: Any) -> AnyPipeline:
    """The pipeline, which has seen a call of these sizes twice."""
    for _ in range(2):
        pipeline(*call, **options)
    return pipeline


def forbid_stages(monkeypatch: pytest.MonkeyPatch, pipeline: AnyPipeline) -> None:
    def never(*_: object, **__: object) -> Any:
        raise AssertionError("a stage ran, though the call could have been repeated")

    for stage in (pipeline.permuter, pipeline.scorer, pipeline.selector, pipeline.executor):
        for method in ("__call__", "attend_into", "with_places"):
            monkeypatch.setattr(type(stage), method, never, raising=False)


def replayed(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of a graph that captured the call."""
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
    """A third call runs no stage, and has the bits of a pipeline that sees such a call for the first time."""
    pipeline = learnt(small_preset(name, FACTOR), inputs(1, device))
    new = inputs(2, device)
    expected = small_preset(name, FACTOR)(*new)
    forbid_stages(monkeypatch, pipeline)
    assert torch.equal(pipeline(*new), expected)


@needs_hopper
@pytest.mark.parametrize("name", ["pbs_attn", "mean_pooling"])
def test_lists_that_are_cut(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A chunk that sees many keys, repeated and as a graph; results of shares are memory of launches alone."""
    sizes = {"N": 70000, "M": 150}
    pipeline = learnt(preset := small_preset(name, FACTOR), inputs(1, device, **sizes))
    q, k, v = inputs(2, device, **sizes)
    expected = small_preset(name, FACTOR)(q, k, v)
    forbid_stages(monkeypatch, pipeline)
    assert torch.equal(pipeline(q, k, v), expected)
    monkeypatch.undo()
    assert torch.equal(replayed(preset, q, k, v), expected)


EXECUTORS: dict[str, Callable[[], bs.Executor[Any, Any]]] = {
    "pv_skip": lambda: bs.TritonExecutor(pv_skip=-3.0),
    "8 bits": bs.Int8Executor,
    "softcap and sinks": lambda: bs.TritonExecutor(logits=bs.Logits(softcap=20.0, sinks=[0.5, -1.0])),
    "auto": lambda: bs.AutoExecutor(dense_below=0),
}


@needs_gpu
@pytest.mark.parametrize("name", EXECUTORS)
def test_executors(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    executor = EXECUTORS[name]()
    pipeline = learnt(quick(executor=executor), inputs(1, device))
    new = inputs(2, device)
    expected = quick(executor=executor)(*new)
    forbid_stages(monkeypatch, pipeline)
    assert torch.equal(pipeline(*new), expected)


@needs_gpu
@pytest.mark.parametrize("name", every_preset)
def test_other_calls_in_between(name: str, device: str) -> None:
    """Other sizes, directions, scales, layouts and chunks are calls of their own; so are parts of one tensor."""
    pipeline = learnt(small_preset(name, FACTOR), inputs(1, device))
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
    lengths = [SIZES["N"] - 18, 18]
    sequences = bs.Sequences.packed(lengths)
    pipeline = learnt(quick(), inputs(1, device), sequences=sequences)
    new = inputs(2, device)
    expected = quick()(*new, sequences=sequences)
    forbid_stages(monkeypatch, pipeline)
    assert torch.equal(pipeline(*new, sequences=sequences), expected)


def test_each_output_has_memory_of_its_own(device: str) -> None:
    pipeline = learnt(quick(), inputs(1, device))
    first = pipeline(*inputs(2, device))
    before = first.clone()
    pipeline(*inputs(3, device))
    assert torch.equal(first, before)


@final
@frozen(eq=False)
class Counting(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A stage from elsewhere, which does what no recording sees."""

    calls: list[int]

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        self.calls.append(1)
        return bs.Everything()(scores)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside another"])
def test_stages_from_elsewhere_always_run(inside: bool, device: str) -> None:
    calls: list[int] = []
    selector: bs.Selector[Any, Any] = Counting(calls)
    pipeline = quick(selector=bs.Band(16) | selector if inside else selector)
    for seed in range(4):
        pipeline(*inputs(seed, device))
    assert len(calls) == 4


def _pickled(pipeline: AnyPipeline) -> AnyPipeline:
    return pickle.loads(pickle.dumps(pipeline))  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [pytest.param(copy.deepcopy, marks=pytest.mark.slow), _pickled])
def test_copies_of_a_pipeline(copied: Callable[[AnyPipeline], AnyPipeline], device: str) -> None:
    pipeline = learnt(quick(), inputs(1, device))
    new = inputs(2, device)
    assert torch.equal(learnt(copied(pipeline), new)(*new), pipeline(*new))


@needs_gpu
def test_threads(device: str) -> None:
    """Threads may learn and repeat the same call at the same time."""
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


def test_traces_run_stages(device: str) -> None:
    pipeline = learnt(quick(), inputs(1, device))
    new = inputs(2, device)
    trace = pipeline.trace(*new)
    assert torch.equal(trace.output.out, pipeline(*new))


@needs_gpu
@pytest.mark.parametrize("name", every_preset)
def test_graphs_streams_and_repetitions(name: str, device: str) -> None:
    """A graph captures the stages, and what is repeated runs on the stream that is current then."""
    pipeline = learnt(small_preset(name, FACTOR), inputs(1, device))
    q, k, v = inputs(2, device)
    expected = small_preset(name, FACTOR)(q, k, v)
    assert torch.equal(replayed(pipeline, q, k, v), expected)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        for x, new in zip((q, k, v), inputs(3, device), strict=True):
            x.copy_(new)
        out = pipeline(q, k, v)
    side.synchronize()
    assert torch.equal(out, small_preset(name, FACTOR)(q, k, v))


# What may be repeated, by functions of plain tensors.


def repeats(run: Callable[..., Any], *rest: Any, device: str, sizes: tuple[int, ...] = (4, 6)) -> bool:
    """Whether calls of `run` come to be repeated; each must give what `run` gives."""
    ran = []

    def watched(*args: Any) -> Any:
        ran.append(1)
        return run(*args)

    repeated = Repeated(watched)
    for seed in range(5):
        x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(device)
        expected = run(x.clone(), *rest)
        found = repeated(x, *rest)
        assert torch.equal(found, expected)
    return len(ran) < 5


def _in_place(x: Tensor) -> Tensor:
    y = torch.zeros(3, 4, device=x.device)
    y[1].copy_(x[:, 2])
    y.t()[2:, 1:].mul_(2).add_(x[2:, :2])
    return y


def _several(x: Tensor) -> Tensor:
    values, places = x.sort(-1, descending=True)
    low, high = x.aminmax(dim=1)
    return torch.cat([values, places.float(), torch.stack((low, high), 1)], dim=1).t()


def _same_bits(x: Tensor) -> Tensor:
    bits = (x + 1).view(torch.int32) >> 3
    halves = bits.view(torch.int16)[:, ::2]
    return (halves + 1).float() + x.unfold(1, 2, 2).sum((1, 2))[:, None]


def _views_alone(x: Tensor) -> Tensor:
    return (x * 2)[1:].t()[2:4]


@pytest.mark.parametrize("run", [_in_place, _several, _same_bits, _views_alone])
def test_operations_that_are_repeated(run: Callable[[Tensor], Tensor], device: str) -> None:
    assert repeats(run, device=device)


def test_inputs_that_are_views(device: str) -> None:
    """What is seen of an input begins where that input begins, wherever in its memory it lies."""

    def run(x: Tensor) -> Tensor:
        return x[1:, 2:] + x.t()[:4, :3].t().flip(0)

    repeated = Repeated(run)
    for seed in range(5):
        whole = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed)).to(device)
        x = whole[4 * (seed % 3) :][:4]
        assert torch.equal(repeated(x), run(x))


def test_inputs_that_share_memory(device: str) -> None:
    """Parts of one tensor may lie at other places in the next call, and an input may be given twice."""

    def run(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x[1:] - 2 * y[:-1]).t() + z[2:, :3].sum(0)

    repeated = Repeated(run)
    for seed in range(6):
        one, two, three = torch.randn(12, 6, generator=torch.Generator().manual_seed(seed)).to(device).split(4)
        for x, y, z in ((one, two, three), (three, one, two), (one, one, two), (two, two.clone(), one)):
            assert torch.equal(repeated(x, y, z), run(x, y, z))


def test_which_inputs_share_memory(device: str) -> None:
    """At the same distances the first two may, or the last two."""

    def run(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + 2 * y + 3 * z

    repeated, memory = Repeated(run), torch.arange(48.0, device=device)
    x, y, z = memory[:4], memory[4:8], memory[16:20]
    for _ in range(3):
        assert torch.equal(repeated(x, y, z), run(x, y, z))

    def own(part: slice) -> Tensor:
        """The same addresses, as a memory of its own."""
        return torch.from_numpy(memory[part].numpy()) if device == "cpu" else memory[part].clone()

    apart = own(slice(0, 4))
    behind = own(slice(4, 20))
    for _ in range(3):
        assert torch.equal(repeated(apart, behind[:4], behind[12:]), run(x, y, z))
        assert torch.equal(repeated(apart, y, z), run(x, y, z))


def test_inputs_of_which_some_share_memory_are_repeated(device: str) -> None:
    """Where the others lie is no matter, though allocations are elsewhere in each call."""
    ran, kept = [], []

    def run(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        ran.append(1)
        return x + y * z

    repeated = Repeated(run)
    for number in range(6):
        kept.append(torch.ones(1000 + 8 * number, device=device))
        x, both = torch.ones(4, device=device), torch.ones(8, device=device)
        assert torch.equal(repeated(x, both[:4], both[4:]), torch.full_like(x, 2))
    assert len(ran) == 2


def test_what_a_call_depends_on(device: str) -> None:
    """Sizes, strides, dtypes, values and their types: each decides anew."""

    def run(x: Tensor, y: Tensor, n: float) -> Tensor:
        return torch.cat((x.flatten() + n, y.flatten().float() * x.stride(0), y.new_full((1,), y.shape[-1])))

    repeated, x = Repeated(run), torch.randn(4, 4, device=device)
    for _ in range(3):
        for a in (x, x.t(), x[:2], x[:, :2], x.double(), x[:, 1:], x.view(2, 8)):
            for b in (x, x.t(), x.half()):
                for n in (1, 1.0, True, 2.5):
                    assert torch.equal(repeated(a, b, n), run(a, b, n))


def test_weights_may_change_in_place(device: str) -> None:
    """What was there before the first call is read in every call."""
    weight = torch.ones(3, device=device)
    repeated, x = Repeated(lambda x: x + weight[1:].sum()), torch.ones(2, device=device)
    for _ in range(5):
        assert torch.equal(repeated(x), x + weight[1:].sum())
        weight += 1


def test_what_was_there_before_is_not_changed_twice(device: str) -> None:
    """A call that counts itself in a tensor runs each time."""
    count = torch.zeros(3, device=device)

    def run(x: Tensor) -> Tensor:
        count[1:] += 1
        return x + count[1]

    repeated = Repeated(run)
    assert [float(repeated(torch.zeros(1, device=device))) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_memory_that_is_exchanged(device: str) -> None:
    def run(x: Tensor) -> Tensor:
        y = torch.zeros(2, device=x.device)
        y.resize_(6).copy_(x[0])
        return y * 2

    assert not repeats(run, device=device)


def test_the_first_call_keeps_nothing(device: str) -> None:
    """It may be a call that has just enough memory."""
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def run(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 1
            made.append(weakref.ref(x))
            repetition.noted(lambda _: None, (x,), pointers=False)
        alive.append(sum(ref() is not None for ref in made))
        return x

    Repeated(run)(torch.zeros(3, device=device))
    assert alive == [1]


_CONSTANT = torch.arange(24.0).view(4, 6)

_NEVER_REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "a number that Python asks for": lambda x: x * (2 if float(x.sum()) > 0 else 3),
    "a size that contents decide": lambda x: x[x > 0],
    "whether something holds": lambda x: x if bool((x > 0).all()) else -x,
    "an input itself": lambda x: x,
    "a part of an input": lambda x: x[1:],
    "what was there before": lambda x: _CONSTANT.to(x.device),
}


@pytest.mark.parametrize("what", [x for x in _NEVER_REPEATED if "input" not in x and "before" not in x])
def test_operations_that_are_not_repeated(what: str, device: str) -> None:
    assert not repeats(_NEVER_REPEATED[what], device=device)


@pytest.mark.parametrize("what", [x for x in _NEVER_REPEATED if "input" in x or "before" in x])
def test_results_that_are_not_new(what: str, device: str) -> None:
    """They are what the function gives, repeated or not."""
    repeats(_NEVER_REPEATED[what], device=device)


def test_random_numbers_are_drawn_anew(device: str) -> None:
    repeated = Repeated(lambda x: x + torch.rand_like(x))
    x = torch.zeros(4, 6, device=device)
    assert len({float(repeated(x).sum()) for _ in range(6)}) == 6


def test_what_refuses_is_not_repeated(device: str) -> None:
    def run(x: Tensor) -> Tensor:
        repetition.refuse_repetition("it says so")
        return x + 1

    assert not repeats(run, device=device)


def test_much_memory_is_not_repeated(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(repetition, "_MOST_BYTES", 150)
    assert repeats(lambda x: x + 1, device=device)
    assert not repeats(lambda x: x + 1 + 1, device=device)


def test_gradients_and_subclasses_run_as_they_are(device: str) -> None:
    ran = []

    def run(x: Tensor) -> Tensor:
        ran.append(1)
        return x * 2

    repeated = Repeated(run)
    for _ in range(4):
        with torch.enable_grad():
            x = torch.ones(3, device=device, requires_grad=True)
            repeated(x).sum().backward()
        assert x.grad is not None
        repeated(torch.nn.Parameter(torch.ones(3, device=device), requires_grad=False))
    assert len(ran) == 8


def test_forward_mode_gradients_are_still_refused(device: str) -> None:
    q, k, v = inputs(1, device)
    pipeline = learnt(quick(), (q, k, v))
    want = pipeline(q, k, v)
    with pytest.raises(ValueError, match="no forward-mode gradients: detach q, k and v"):
        torch.func.jvp(lambda x: pipeline(q, x, v), (k,), (k,))
    detached: Any = torch.func.jvp(lambda x: pipeline(q, x.detach(), v), (k,), (k,))
    assert torch.equal(detached[0], want)


def test_nothing_of_a_recorded_call_is_kept(device: str) -> None:
    """Neither what it made nor what it was given."""
    made: list[weakref.ref[Tensor]] = []

    def run(x: Tensor) -> Tensor:
        y = x + 1
        made.append(weakref.ref(y))
        return y * 2

    repeated = Repeated(run)
    for _ in range(3):
        x = torch.ones(3, device=device)
        made.append(weakref.ref(x))
        repeated(x)
        del x
    assert len(made) == 5
    assert not any(ref() is not None for ref in made)


@dataclass
class Descriptor:
    """What a tensor descriptor has."""

    base: Any
    block_shape: list[int]


def test_neither_descriptors_nor_empty_views_keep_anything(device: str) -> None:
    alive: list[weakref.ref[Tensor]] = []
    seen: list[Any] = []

    def read(descriptor: Descriptor) -> None:
        seen.append(float(descriptor.base.sum()))

    def run(x: Tensor) -> Tensor:
        descriptor = Descriptor(x, [1])
        with repetition.unseen():
            read(descriptor)
        repetition.noted(read, (descriptor,), pointers=True)
        return torch.cat((x[:0], x * 2))

    repeated = Repeated(run)
    for number in range(4):
        x = torch.full((3,), float(number), device=device)
        alive.append(weakref.ref(x))
        assert torch.equal(repeated(x), x * 2)
        del x
    assert seen == [0, 3, 6, 9]
    assert not any(ref() is not None for ref in alive)
    (known,) = repeated._known.values()
    constants = [x for step in known._steps for x in tree_leaves(step.arguments) if isinstance(x, Tensor)]
    assert all(x.untyped_storage().nbytes() == 0 for x in constants)


def test_memory_that_is_too_short_to_record(device: str) -> None:
    """A call that has just enough runs as it is from then on."""
    ran = []

    def run(x: Tensor) -> Tensor:
        ran.append(repetition.is_recording())
        if len(ran) == 2:
            raise torch.OutOfMemoryError
        return x + 1

    repeated, x = Repeated(run), torch.zeros(3, device=device)
    for _ in range(5):
        assert torch.equal(repeated(x), x + 1)
    assert ran == [True, True, False, False, False, False]


def test_modes_of_torch_functions_are_asked_in_every_call(device: str) -> None:
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.softmax else out

    repeated, x = Repeated(lambda x: torch.softmax(x, 0)), torch.zeros(2, device=device)
    for _ in range(3):
        for _ in range(3):
            assert repeated(x).tolist() == [0.5, 0.5]
        with Doubles():
            assert repeated(x).tolist() == [1.0, 1.0]
    assert len(repeated._known) == 1


def test_calls_of_many_sizes_are_forgotten(device: str) -> None:
    repeated = Repeated(lambda x: x + 1)
    for size in range(1, 700):
        for _ in range(2 if size % 5 else 1):
            repeated(torch.zeros(size, device=device))
    assert len(repeated._known) == 64
    assert len(repeated._met) <= 512


def test_memory_is_free_as_soon_as_nobody_needs_it(device: str) -> None:
    repeated = Repeated(lambda x: ((x + 1) * 2).sum(0))
    for _ in range(2):
        repeated(torch.ones(3, device=device))
    (known,) = repeated._known.values()
    assert [len(step.done) for step in known._steps] == [1, 1, 1]


@pytest.mark.skipif(GPU, reason="launches copy by the CPU; those of presets are tested there")
def test_small_memory_that_only_launches_use_is_allocated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is large, what PyTorch reads, or the result; a launch may begin inside of it."""
    monkeypatch.setattr(repetition, "_SMALL", 100)

    def launch(*args: Any) -> None:
        ctypes.memmove(*(x.data_ptr() if isinstance(x, Tensor) else x for x in args))
        repetition.noted(ctypes.memmove, args, pointers=True)

    def run(x: Tensor) -> Tensor:
        one, two = torch.empty(24), torch.empty_strided((2, 6), (12, 1))
        read, large = torch.empty(24), torch.empty(26)
        launch(one, x, 96)
        launch(two[1], x[0], 24)
        launch(two, x[3], 24)
        launch(large, one, 96)
        launch(read, one, 48)
        launch(read[12:], two, 24)
        launch(read[18:], two[1], 24)
        out = torch.empty_like(x)
        launch(out, large, 96)
        return out.add_(read.view(4, 6))

    assert repeats(run, device="cpu")
    repeated, x = Repeated(run), torch.ones(4, 6)
    for _ in range(2):
        repeated(x)
    (known,) = repeated._known.values()
    assert [len(step.results) for step in known._steps] == [3, 1, 1, *[0] * 7, 1, 0, 0]
    (memory,) = [x for x in known._steps[0].run() if isinstance(x, Tensor)]
    assert memory.nbytes == 1024  # two pieces of less than 100 bytes, each at a multiple of 512


def test_an_error_is_no_repetition(device: str) -> None:
    def run(x: Tensor, fails: bool) -> Tensor:
        y = x + 1
        if fails:
            raise ValueError("as told")
        return y

    repeated, x = Repeated(run), torch.ones(3, device=device)
    for fails in (False, True, True, True, False, False, False):
        if fails:
            with pytest.raises(ValueError, match="as told"):
                repeated(x, fails)
        else:
            assert torch.equal(repeated(x, fails), x + 1)
    assert not repetition.is_recording()
