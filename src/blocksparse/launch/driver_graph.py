"""Kernels that a call launches one after another, as one graph of the CUDA driver.

Each launch by Triton takes the host about 15 us; a graph of ten kernels is one launch. No stream is captured
for it, since other threads could not wait for the GPU meanwhile. Each kernel is a node, and a later call sets
the parameters of those nodes of which addresses have changed. Parameters are packed as Triton's launcher packs
them, and their sizes compared with what the driver says of each kernel. Where anything differs from that,
kernels are launched one by one.
"""

from __future__ import annotations

import logging
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL, POINTER, Structure, addressof, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p, memmove
from ctypes import create_string_buffer as memory_of
from ctypes import string_at as bytes_at
from functools import cache, partial
from threading import Lock
from typing import Any, NamedTuple, final
from weakref import finalize

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

Step = tuple[Callable[..., object], Sequence[Any]]
"""What runs, and its arguments."""

Place = tuple[int, int]
"""Where an address points: the index of a base, an address that each call gives, and an offset in bytes."""

_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
    "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_MAP = 128  # bytes of a CUtensorMap, which is aligned to as many
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has used no GPU so far


class _Kernel(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of the CUDA Driver API."""

    _fields_ = (
        ("func", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("params", c_void_p),
        ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p),
    )  # fmt: skip


class _Zeros(Structure):
    """CUDA_MEMSET_NODE_PARAMS: the width is in numbers of `size` bytes."""

    _fields_ = (
        ("dst", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("size", c_uint), ("width", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


_ADD = POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t, c_void_p
_ARGUMENTS = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuTensorMapReplaceAddress": (c_void_p, c_void_p),
    "cuGraphCreate": (POINTER(c_void_p), c_uint),
    "cuGraphAddKernelNode_v2": _ADD,
    "cuGraphAddMemsetNode": (*_ADD, c_void_p),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, c_void_p),
    "cuGraphExecMemsetNodeSetParams": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
}
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class UnlikeError(RuntimeError):
    """A launch that a graph would perhaps not do as Triton does it."""


@final
class Launch(partial[None]):
    """Launches a compiled kernel: its first arguments are that, a grid and the index of a device."""


@cache
def cuda() -> CDLL:
    """The CUDA driver, which PyTorch has loaded; an `AttributeError` where it is older than 12.4."""
    library = CDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


def _check(code: int, what: str) -> None:
    if code:
        raise UnlikeError(f"the CUDA driver cannot {what} (CUresult {code})")


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Graphs are made without an end to what another thread captures, since nothing here is part of that."""
    mode = c_int(_RELAXED)
    _check(cuda().cuThreadExchangeStreamCaptureMode(byref(mode)), "leave captures alone")
    try:
        yield
    finally:
        cuda().cuThreadExchangeStreamCaptureMode(byref(mode))


def is_watched(runtime: Any) -> bool:
    """Whether a profiler hooks into launches, which Triton must then do; of its `knobs.runtime`."""
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def can_join(run: Callable[..., object], arguments: Sequence[Any]) -> bool:
    """Whether a graph can do this: a launch of a kernel, or zeros in one piece of memory."""
    return type(run) is Launch or (run is torch.ops.aten.zero_.default and arguments[0].is_contiguous())


def driver_graph(steps: Sequence[Step], known: Mapping[int, Place], bases: int) -> DriverGraph | None:
    """The graph of steps that can be joined; None if there can be none, for a reason that is logged.

    Args:
        known: the place of each address among the arguments.
        bases: how many there are.
    """
    try:
        with _beside_captures():
            return DriverGraph(steps, known, bases)
    except Exception as error:  # whatever another Triton or driver does instead: separate launches are as good
        _log.debug("kernels are launched one by one: %s", repr(error))  # a record would keep what the error holds
        return None


def _destroy(graph: c_void_p, executable: c_void_p, kept: list[Any]) -> None:
    """Destroy what was made of a graph, by whose nodes it is changed; what runs of it ends first."""
    if executable:
        cuda().cuGraphExecDestroy(executable)
    cuda().cuGraphDestroy(graph)
    kept.clear()


class _Param(NamedTuple):
    """A parameter of a kernel: where it lies in the host's memory, its bytes, and the base that it moves with."""

    where: int
    size: int
    base: int | None


@final
class DriverGraph:
    """Launches kernels one after another on the current stream of their device."""

    def __init__(self, steps: Sequence[Step], known: Mapping[int, Place], bases: int) -> None:
        from triton import knobs
        from triton.runtime import driver

        (self._device,) = {run.args[2] for run, _ in steps if isinstance(run, Launch)}  # there is only one
        self._hooks, self._stream, self._lock = knobs.runtime, driver.active.get_current_stream, Lock()
        self._fails, self._known, self._bases = False, known, bases
        self._tensors: list[Tensor] = []  # that were there before the call: their addresses follow the bases
        self._slots: dict[Place | bytes, c_uint64] = {}  # one for all equal parameters, of addresses or values
        # By base, the addresses and the tensor maps that move with it, and their offsets.
        self._moving: defaultdict[int, list[tuple[c_uint64, int]]] = defaultdict(list)
        self._maps: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._kept: list[Any] = []  # what the driver reads: memory, and kernels, which newer Tritons unload
        self._nodes: list[tuple[set[int | None], Callable[[], int]]] = []  # the bases of a node, and what sets it
        self._graph, self._exec, self._last = c_void_p(), c_void_p(), c_void_p()
        _check(cuda().cuGraphCreate(byref(self._graph), 0), "make a graph")
        finalize(self, _destroy, self._graph, self._exec, self._kept).atexit = False
        for run, arguments in steps:
            self._add_kernel(run, arguments) if isinstance(run, Launch) else self._add_zeros(arguments[0])
        _check(cuda().cuGraphInstantiateWithFlags(byref(self._exec), self._graph, 0), "instantiate a graph")
        self._now: list[int] = []  # the addresses of which parameters are set: none

    def launch(self, bases: Sequence[int]) -> bool:
        """Launch the kernels with addresses relative to these bases; if that fails, launch nothing and say so."""
        if self._fails or is_watched(self._hooks):
            return False
        now = [*bases, *[x.data_ptr() for x in self._tensors]]
        with self._lock:  # a graph is launched with the parameters that are set then
            code = self._set(now) if now != self._now else 0
            code = code or cuda().cuGraphLaunch(self._exec, self._stream(self._device))
        if code not in (0, _NO_CONTEXT):  # Triton's launches then tell why, or do without
            self._fails = True
            _log.warning("the CUDA driver cannot launch a graph (CUresult %d): launches are separate", code)
        return not code

    def _set(self, now: list[int]) -> int:
        """Set the parameters of nodes that have other addresses than before; a CUresult."""
        before, self._now = self._now or [-1] * len(now), []  # if this fails, all are set again
        moved = {base for base, address in enumerate(now) if address != before[base]}
        for base in moved:
            for slot, offset in self._moving[base]:
                slot.value = now[base] + offset
            for where, offset in self._maps[base]:
                if code := cuda().cuTensorMapReplaceAddress(where, now[base] + offset):
                    return int(code)
        for bases, set_node in self._nodes:
            if not moved.isdisjoint(bases) and (code := set_node()):
                return code
        self._now = now
        return 0

    def _add_kernel(self, launch: Launch, arguments: Sequence[Any]) -> None:
        (compiled, grid, _), about = launch.args, launch.args[0].metadata
        clusters = {getattr(about, "num_ctas", 1), *(getattr(about, "cluster_dims", None) or ())}
        scratch = about.global_scratch_size or about.profile_scratch_size
        if about.launch_cooperative_grid or about.launch_pdl or clusters != {1} or scratch:
            raise UnlikeError("a kernel has clusters, scratch memory or a special launch")
        kinds, maps = tuple(compiled.src.signature.values()), iter(getattr(about, "tensordesc_meta", None) or ())
        no_scratch = self._value("i64", 0)
        params = [*self._params(kinds, arguments, maps), no_scratch, no_scratch]
        offset, size, sizes = c_size_t(), c_size_t(), list[int]()
        about_param, to = cuda().cuFuncGetParamInfo, (byref(offset), byref(size))
        while len(sizes) <= len(params) and not about_param(compiled.function, len(sizes), *to):
            sizes.append(size.value)
        if sizes != (packed := [param.size for param in params]):
            raise UnlikeError(f"parameters have {sizes} bytes, packed {packed}")
        pointers = (c_void_p * len(params))(*[param.where for param in params])
        self._kept += compiled, pointers
        threads = 32 * about.num_warps, 1, 1
        node = byref(_Kernel(compiled.function, grid, threads, about.shared, addressof(pointers)))
        self._add("Kernel", node, {param.base for param in params})

    def _add_zeros(self, x: Tensor) -> None:
        (base, offset), size, context = self._known[x.data_ptr()], min(x.itemsize, 4), c_void_p()
        _check(cuda().cuCtxGetCurrent(byref(context)), "name a context")
        node = _Zeros(x.data_ptr(), 0, 0, size, x.numel() * x.itemsize // size, 1)
        self._moving[base].append((c_uint64.from_buffer(node), offset))
        self._add("Memset", byref(node), {base}, context)

    def _add(self, kind: str, node: Any, bases: set[int | None], *context: c_void_p) -> None:
        """Add a node behind the last one."""
        version, this = "_v2" if kind == "Kernel" else "", c_void_p()
        after = (byref(self._last), 1) if self._nodes else (None, 0)
        add = getattr(cuda(), f"cuGraphAdd{kind}Node{version}")
        _check(add(byref(this), self._graph, *after, node, *context), "add a node")
        change = getattr(cuda(), f"cuGraphExec{kind}NodeSetParams{version}")
        self._nodes.append((bases, partial(change, self._exec, this, node, *context)))
        self._last = this

    def _params(self, kinds: Sequence[Any], arguments: Sequence[Any], maps: Iterator[Any]) -> Iterator[_Param]:
        """The parameters that Triton's launcher makes of arguments of these types; constants are none."""
        for kind, x in zip(kinds, arguments, strict=True):
            if isinstance(kind, tuple):
                yield from self._params(kind, x, maps)
            elif kind.startswith("tensordesc"):
                yield self._tensor_map(x, about := next(maps))
                _, *sizes = _by_triton(x, about, x.base)
                for i, size in enumerate(sizes):  # a shape and strides
                    yield self._value("i32" if 2 * i < len(sizes) else "i64", size)
            elif kind[0] == "*":
                base, offset = place = self._place(x)
                if place not in self._slots:
                    self._moving[base].append((self._slots.setdefault(place, c_uint64()), offset))
                yield _Param(addressof(self._slots[place]), 8, base)
            elif kind != "constexpr":
                yield self._value(kind, x)

    def _value(self, kind: str, x: Any) -> _Param:
        packed = struct.pack(f"<{_FORMATS[kind]}", x)
        slot = self._slots.setdefault(packed, c_uint64(int.from_bytes(packed, "little")))
        return _Param(addressof(slot), len(packed), None)

    def _tensor_map(self, x: Any, about: Any) -> _Param:
        """The parameter of a tensor descriptor: a CUtensorMap, moved by writing its address or by the driver."""
        (base, offset), address, memory = self._place(x.base), x.base.data_ptr(), memory_of(2 * _MAP)
        where = addressof(memory) + -addressof(memory) % _MAP
        slot = c_uint64.from_address(where)

        def moves(move: Callable[[int], Any]) -> bool:
            memmove(where, _content(x, about, address), _MAP)
            others = [address + _MAP, address + (1 << 33), address]
            return all(not move(at) and bytes_at(where, _MAP) == _content(x, about, at) for at in others)

        if moves(partial(setattr, slot, "value")):
            self._moving[base].append((slot, offset))
        elif moves(partial(cuda().cuTensorMapReplaceAddress, where)):
            self._maps[base].append((where, offset))
        else:
            raise UnlikeError("a tensor map cannot be moved")
        self._kept.append(memory)
        return _Param(where, _MAP, base)

    def _place(self, x: Any) -> Place:
        if not isinstance(x, Tensor):
            return self._known[int(x)]
        self._tensors.append(x)
        return self._bases + len(self._tensors) - 1, 0


@final
class Base(int):
    """An address, asked for as of a tensor."""

    __slots__ = ()
    data_ptr = int.__int__


def _by_triton(descriptor: Any, about: Any, base: Any) -> list[Any]:
    """The parameters that Triton's launcher makes of a descriptor of what begins at `base`."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    moved = object.__new__(type(descriptor))
    moved.__dict__ = {**vars(descriptor), "base": base}
    more = [None] * (make_tensordesc_arg.__code__.co_argcount - 2)  # Triton 3.8 takes one more, for other GPUs
    return list(make_tensordesc_arg(moved, about, *more))


def _content(descriptor: Any, about: Any, base: int) -> bytes:
    made = _by_triton(descriptor, about, Base(base))[0]
    return bytes_at(id(made) + type(made).__basicsize__ - _MAP, _MAP)  # the last field of the object
