"""Graphs of the CUDA driver pack what Triton's launcher packs, in order, and set anew only what has moved."""

from __future__ import annotations

import gc
import logging
import struct
from collections.abc import Sequence
from ctypes import c_uint8, c_uint64, c_void_p, string_at
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from triton import knobs
from triton.backends.nvidia import driver as triton_driver

from blocksparse.launch import driver_graph as module
from blocksparse.launch.driver_graph import Base, DriverGraph, Launch, driver_graph
from blocksparse.launch.launch_graph import LaunchCapture, LaunchGraph

SIZES = {1: [8, 4, 8, 4, 8, 8], 2: [8, 128, 4, 4, 8, 8, 1, 8, 8]}  # of the parameters of kernels, by function


class Driver:
    """A driver that notes what its newest graph runs: a kernel, grid, threads, memory and parameters; or zeros."""

    def __init__(self) -> None:
        self.nodes: dict[int, Any] = {}
        self.order: list[int] = []
        self.launched: list[tuple[int, list[Any]]] = []  # the stream, and the nodes
        self.set: list[int] = []  # nodes, by place
        self.destroyed: list[str] = []
        self.codes: list[int] = []  # of the next launches
        self.mode = 0  # of other captures, in this thread
        self.modes: list[int] = []  # in which graphs were instantiated

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:  # noqa: N802
        if index >= len(SIZES[function]):
            return 1
        size._obj.value = SIZES[function][index]
        return 0

    def cuTensorMapReplaceAddress(self, where: int, address: int) -> int:  # noqa: N802
        assert where % 128 == 0
        c_uint64.from_address(where).value = address
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = 9
        return 0

    def cuGraphCreate(self, graph: Any, flags: int) -> int:  # noqa: N802
        graph._obj.value = 77
        self.order.clear()
        return 0

    def _added(self, node: Any, graph: Any, after: Any, count: int, what: Any) -> int:
        assert graph.value == 77
        assert (after and after._obj.value, count) == ((self.order[-1], 1) if self.order else (None, 0))
        node._obj.value = 100 + len(self.order)
        self.order.append(node._obj.value)
        self.nodes[node._obj.value] = what
        return 0

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, after: Any, count: int, params: Any) -> int:  # noqa: N802
        return self._added(node, graph, after, count, self._kernel(params._obj))

    def cuGraphAddMemsetNode(  # noqa: N802
        self, node: Any, graph: Any, after: Any, count: int, params: Any, context: Any
    ) -> int:
        assert context.value == 9
        return self._added(node, graph, after, count, self._zeros(params._obj))

    def cuGraphInstantiateWithFlags(self, graph: Any, of: Any, flags: int) -> int:  # noqa: N802
        graph._obj.value = 88
        self.modes.append(self.mode)
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, graph: Any, node: Any, params: Any) -> int:  # noqa: N802
        return self._changed(graph, node, self._kernel(params._obj))

    def cuGraphExecMemsetNodeSetParams(self, graph: Any, node: Any, params: Any, context: Any) -> int:  # noqa: N802
        assert context.value == 9
        return self._changed(graph, node, self._zeros(params._obj))

    def _changed(self, graph: Any, node: Any, what: Any) -> int:
        assert graph.value == 88
        self.set.append(self.order.index(node.value))
        self.nodes[node.value] = what
        return 0

    def cuGraphLaunch(self, graph: Any, stream: int) -> int:  # noqa: N802
        if self.codes and (code := self.codes.pop(0)):
            return code
        self.launched.append((stream, [self.nodes[node] for node in self.order]))
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        self.destroyed.append(f"graph {graph.value}")
        return 0

    def cuGraphExecDestroy(self, graph: Any) -> int:  # noqa: N802
        self.destroyed.append(f"exec {graph.value}")
        return 0

    def _kernel(self, x: Any) -> tuple[Any, ...]:
        assert (x.extra, x.kern, x.ctx) == (None, None, None)
        places = (c_void_p * len(SIZES[x.func])).from_address(x.params)
        params = [string_at(where, size) for where, size in zip(places, SIZES[x.func], strict=True)]
        return x.func, (*x.grid,), (*x.block,), x.shared, params

    def _zeros(self, x: Any) -> tuple[Any, ...]:
        assert (x.value, x.height) == (0, 1)
        return "zeros", x.dst, x.size * x.width


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(module, "cuda", lambda: made)
    active = SimpleNamespace(get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton_driver, "make_tensordesc_arg", lambda x, about: [about, *x.shape, *x.strides])
    monkeypatch.setattr(module, "_content", lambda x, about, base: map_of(base))
    return made


def map_of(base: int) -> bytes:
    return struct.pack("<Q120s", base, b"map")


def kernel(function: int = 1, signature: Sequence[Any] = (), **about: Any) -> Any:
    plain = {
        "num_warps": 4, "shared": 1000, "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "profile_scratch_size": 0, "tensordesc_meta": ["swizzled"],
    }  # fmt: skip
    kinds = signature or ["*fp16", ("i32", "constexpr"), "*fp32", "fp32", "constexpr"]
    return SimpleNamespace(
        function=function, metadata=SimpleNamespace(**{**plain, **about}),
        src=SimpleNamespace(signature=dict(enumerate(kinds))),
    )  # fmt: skip


class Boxes:
    """A tensor descriptor."""

    def __init__(self, base: int) -> None:
        self.base, self.shape, self.strides, self.block_shape = Base(base), [5, 64], [64, 1], [16, 64]


ONE_BY_ONE: list[tuple[Any, ...]] = []


def launch(compiled: Any, grid: tuple[int, int, int] = (3, 2, 1)) -> Launch:
    return Launch(
        lambda compiled, grid, device, *args: ONE_BY_ONE.append((compiled.function, *args)), compiled, grid, 1
    )


def pointer(address: int) -> bytes:
    return struct.pack("<Q", address)


def number(kind: str, value: float) -> bytes:
    return struct.pack(f"<{kind}", value)


DESCRIBED = ["*i8", "tensordesc<fp16[16, 64],NVMMASharedLayout()>", "i1"]
NONE = pointer(0)


def test_parameters_are_those_of_triton(cuda: Driver) -> None:
    """Tuples lie flat, constants vanish, negative numbers have two's complement, and no scratch memory follows."""
    weight = torch.ones(4)
    boxes = Boxes(2064)
    zeros = torch.zeros(3, dtype=torch.int64)
    known = {1000: (0, 0), 1016: (0, 16), 2000: (1, 0), 2064: (1, 64), zeros.data_ptr(): (1, 128)}
    graph = DriverGraph(
        [
            (launch(kernel()), (1016, (-7, 1), 2000, 0.5, 64)),
            (torch.ops.aten.zero_.default, (zeros,)),
            (launch(kernel(2, DESCRIBED, num_warps=8), (1, 1, 1)), (weight, boxes, True)),
        ],
        known,
        2,
    )
    assert not cuda.launched

    def expected(first: int, second: int, at: Tensor) -> tuple[int, list[Any]]:
        return 71, [
            (1, (3, 2, 1), (128, 1, 1), 1000,
             [pointer(first + 16), number("i", -7), pointer(second), number("f", 0.5), NONE, NONE]),
            ("zeros", second + 128, 24),
            (2, (1, 1, 1), (256, 1, 1), 1000,
             [pointer(at.data_ptr()), map_of(second + 64), number("i", 5), number("i", 64), number("q", 64),
              number("q", 1), b"\1", NONE, NONE]),
        ]  # fmt: skip

    assert graph.launch([1000, 2000])
    assert cuda.launched.pop() == expected(1000, 2000, weight)
    for first, second, nodes in ((1000, 2000, []), (5000, 2000, [0]), (5000, 9000, [0, 1, 2])):
        cuda.set.clear()
        assert graph.launch([first, second])
        assert cuda.launched.pop() == expected(first, second, weight)
        assert cuda.set == nodes
    cuda.set.clear()
    weight.data = torch.ones(9)
    assert graph.launch([5000, 9000])
    assert cuda.launched.pop() == expected(5000, 9000, weight)
    assert cuda.set == [2]
    del graph
    gc.collect()
    assert cuda.destroyed == ["exec 88", "graph 77"]


ARGUMENTS = (1016, (-7, 1), 1000, 0.5, 64)


@pytest.mark.parametrize(
    ("compiled", "arguments", "because"),
    [
        (kernel(num_ctas=2), ARGUMENTS, "clusters"),
        (kernel(cluster_dims=(2, 1, 1)), ARGUMENTS, "clusters"),
        (kernel(launch_pdl=True), ARGUMENTS, "clusters"),
        (kernel(launch_cooperative_grid=True), ARGUMENTS, "clusters"),
        (kernel(global_scratch_size=8), ARGUMENTS, "scratch"),
        (kernel(profile_scratch_size=8), ARGUMENTS, "scratch"),
        (kernel(signature=["*fp16", ("i64", "constexpr"), "*i8", "fp32", "constexpr"]), ARGUMENTS, "packed"),
        (kernel(signature=["*fp16"]), (1016,), "bytes, packed"),
        (kernel(2, ["*i8", "nvTmaDesc"]), (1016, 5), "nvTmaDesc"),
        (kernel(), (1004, *ARGUMENTS[1:]), "1004"),
        (kernel(), ARGUMENTS[:-1], "shorter"),
        (kernel(2, DESCRIBED, tensordesc_meta=None), (1016, Boxes(1000), 1), "StopIteration"),
    ],
)  # fmt: skip
def test_anything_else_is_launched_one_by_one(
    compiled: Any, arguments: tuple[Any, ...], because: str, cuda: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [(launch(kernel()), ARGUMENTS), (launch(compiled), arguments)]
    with caplog.at_level(logging.DEBUG, module.__name__):
        assert driver_graph(steps, {1000: (0, 0), 1016: (0, 16)}, 1) is None
    assert because in caplog.text
    gc.collect()
    assert cuda.destroyed == ["graph 77"]
    assert driver_graph([steps[0], steps[0]], {1000: (0, 0), 1016: (0, 16)}, 1) is not None
    # It ends captures of other threads where it makes a graph, but for a thread that is relaxed about them.
    assert (cuda.modes, cuda.mode) == ([2], 0)


@pytest.mark.parametrize("how", ["plain", "driver", "neither"])
def test_tensor_maps_are_moved_as_triton_makes_them(
    how: str, cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no write of the address and no move by the driver gives Triton's bytes, kernels stay separate."""

    def content(x: Any, about: Any, base: int) -> bytes:
        end = {"plain": 7, "driver": base % 251, "neither": base % 241}[how]
        return struct.pack("<Q119sB", base, b"map", end)

    def moved(where: int, address: int) -> int:
        c_uint64.from_address(where).value = address
        c_uint8.from_address(where + 127).value = address % 251
        return 0

    monkeypatch.setattr(module, "_content", content)
    monkeypatch.setattr(cuda, "cuTensorMapReplaceAddress", moved)
    graph = driver_graph(
        [(launch(kernel(2, DESCRIBED)), (1000, Boxes(1064), 1))], {1000: (0, 0), 1064: (0, 64)}, 1
    )
    if how == "neither":
        assert graph is None
    else:
        assert graph is not None
        assert graph.launch([5000])
        assert cuda.launched[0][1][0][4][1] == content(None, None, 5064)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    active = SimpleNamespace(get_current_stream=lambda device: 70)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(module, "cuda", module.cuda.__wrapped__)
    monkeypatch.setattr(module, "CDLL", absent)
    assert driver_graph([(launch(kernel()), ARGUMENTS)], {1000: (0, 0), 1016: (0, 16)}, 1) is None


def test_launches_that_fail(cuda: Driver, caplog: pytest.LogCaptureFixture) -> None:
    """In a thread without a context Triton makes one, so the next launch is tried; after other errors none is."""
    graph = DriverGraph([(launch(kernel()), ARGUMENTS)], {1000: (0, 0), 1016: (0, 16)}, 1)
    cuda.codes += [201, 0, 2]
    assert [graph.launch([1000]) for _ in range(2)] == [False, True]
    assert not caplog.records
    assert [graph.launch([1000]) for _ in range(3)] == [False] * 3
    assert len(cuda.launched) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the CUDA driver cannot launch a graph (CUresult 2): launches are separate"
    ]


def test_parameters_that_cannot_be_set_are_set_again(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = DriverGraph([(launch(kernel()), ARGUMENTS)] * 2, {1000: (0, 0), 1016: (0, 16)}, 1)
    assert graph.launch([1000])
    before = cuda._changed
    monkeypatch.setattr(cuda, "_changed", lambda *_: 201)
    assert not graph.launch([3000])
    monkeypatch.setattr(cuda, "_changed", before)
    assert graph.launch([1000])
    assert cuda.launched[0] == cuda.launched[1]
    assert graph.launch([3000])
    assert cuda.launched[2][1][1][4][0] == pointer(3016)


def test_profilers_see_launches(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = DriverGraph([(launch(kernel()), ARGUMENTS)], {1000: (0, 0), 1016: (0, 16)}, 1)
    hooks = knobs.HookChain[Any]()
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", hooks)
    assert graph.launch([1000])
    hooks.add(print)
    assert not graph.launch([1000])


def captured(x: Tensor, weight: Tensor) -> tuple[LaunchGraph, Tensor]:
    """The launches of a call: two kernels and zeros, an operation that no graph does, and a kernel."""
    with (capture := LaunchCapture([x], functions=False)):
        a, out = torch.empty(16), torch.empty(2, 8)
        count = torch.empty(4, dtype=torch.int32)
        count.zero_()
        capture.launched(launch(kernel()), (x, (-7, 1), a, 0.5, 64))
        capture.launched(launch(kernel()), (a, (8, 1), weight, 0.5, 64))
        a[:4].copy_(count)
        capture.launched(launch(kernel()), (a, (9, 1), out, 0.5, 64))
        result = out[1]
    return capture.graph(result), result


def test_a_call_is_joined_where_it_can_be(cuda: Driver) -> None:
    """The first call launches one by one; later ones do the same with graphs, from other memory too."""
    weight = torch.ones(16)
    graph, like = captured(torch.zeros(16), weight)
    ONE_BY_ONE.clear()
    first = graph(x := torch.ones(16))
    assert [args[2][0] for args in ONE_BY_ONE] == [-7, 8, 9]
    assert not cuda.launched
    assert first.shape == like.shape
    for new in (x, torch.ones(16)):
        ONE_BY_ONE.clear()
        out = graph(new)
        (_, (zeros, one, two)), (_, *rest) = cuda.launched.pop(), *ONE_BY_ONE
        assert zeros[0] == "zeros"
        assert zeros[2] == 16
        (memory,) = {one[4][2], two[4][0]}
        assert one[4][:2] == [pointer(new.data_ptr()), number("i", -7)]
        assert two[4][2] == pointer(weight.data_ptr())
        assert rest[:2] == [struct.unpack("<Q", memory)[0], (9, 1)]
        assert rest[2] == out.data_ptr() - 32


def test_a_call_whose_graph_fails(cuda: Driver) -> None:
    """Its kernels are launched one by one, as if there were no graph."""
    graph, _ = captured(torch.zeros(16), torch.ones(16))
    for _ in range(2):
        graph(x := torch.ones(16))
    ONE_BY_ONE.clear()
    cuda.codes.append(700)
    for _ in range(2):
        graph(x)
        found = [(args[1] == x.data_ptr(), args[2][0]) for args in ONE_BY_ONE]
        assert found == [(True, -7), (False, 8), (False, 9)]
        ONE_BY_ONE.clear()


def test_one_address_of_two_inputs_is_no_place(cuda: Driver) -> None:
    """Their memory overlaps in the first call, and need not in the next."""
    memory = torch.zeros(64)
    first, second = (from_dlpack(x) for x in (memory[:32], memory[16:48]))
    with (capture := LaunchCapture([first, second], functions=False)):
        out = torch.empty(16)
        capture.launched(launch(kernel()), (first[16:], (1, 1), out, 0.5, 64))
        capture.launched(launch(kernel()), (second, (2, 1), out, 0.5, 64))
    graph = capture.graph(out)
    for _ in range(2):
        graph(first, second)
    assert not cuda.launched


def test_temporaries_that_share_memory_are_joined(cuda: Driver) -> None:
    """The first one is read for the last time before the third one is written."""
    with (capture := LaunchCapture([x := torch.zeros(16)], functions=False)):
        a, b, c, out = (torch.empty(16) for _ in range(4))
        for source, to in ((x, a), (a, b), (b, c), (c, out)):
            capture.launched(launch(kernel()), (source, (1, 1), to, 0.5, 64))
    graph = capture.graph(out)
    for _ in range(2):
        graph(x)
    ((_, (one, _, three, _)),) = cuda.launched
    assert one[4][2] == three[4][2]


def test_memory_of_the_caller_leaves_kernels_as_they_are_set(cuda: Driver) -> None:
    """A call whose workspace stays sets the kernels that take what has moved; with too little memory, all."""
    x, out, memory = torch.zeros(16), torch.zeros(16), torch.empty(256, dtype=torch.int32)
    with (capture := LaunchCapture([x, out], functions=False)):
        a, b = torch.empty(16), torch.empty(16)
        for source, to in ((x, a), (a, b), (b, out)):
            capture.launched(launch(kernel()), (source, (1, 1), to, 0.5, 64))
    graph = capture.graph(out)
    for _ in range(2):
        assert graph(x, out, memory=memory) is out
    other = torch.empty(16)
    for given, to, room, expected in (
        (x, out, memory, []),
        (other, out, memory, [0]),
        (other, other, memory, [2]),
        (other, other, memory[:1], [0, 1, 2]),
    ):
        cuda.set.clear()
        assert graph(given, to, memory=room) is to
        assert cuda.set == expected
        _, (first, _, last) = cuda.launched[-1]
        assert first[4][0] == pointer(given.data_ptr())
        assert last[4][2] == pointer(to.data_ptr())
        assert (first[4][2] == pointer(memory.data_ptr())) is (room is memory)
    ONE_BY_ONE.clear()
    cuda.codes.append(700)
    assert graph(x, out, memory=memory) is out
    assert [args[1] for args in ONE_BY_ONE] == [x.data_ptr(), memory.data_ptr(), memory.data_ptr() + 512]
