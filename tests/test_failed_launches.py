"""A kernel that cannot be compiled or launched is a reason: another one runs, or a sentence says it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import blocksparse as bs
from blocksparse.execute import flex, int8
from blocksparse.inputs import UnsupportedError
from blocksparse.kernels.attention import (
    gather_attention,
    gather_attention_hopper,
    gather_attention_triton,
    int8_attention_hopper,
    sparse_attention_hopper,
    sparse_attention_triton,
)
from blocksparse.kernels.common import tiles
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.kernels.select import top_cdf_triton
from blocksparse.launch import failures
from blocksparse.launch.failures import LaunchError
from blocksparse.testing import make_qkv
from tests.machine import GPU
from tests.on_kernels import pretend_gpu, small_preset

pytestmark = pytest.mark.skipif(GPU, reason="pretends launches that fail")
TOO_LARGE = OutOfResources(300000, 232448, "shared memory")


class Planted:
    """A function of Triton whose launches fail; it counts them."""

    def __init__(self, jit: Any, error: Exception) -> None:
        self.fn, self.error, self.tried = jit.fn, error, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            self.tried += 1
            raise self.error

        return fail


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_why", {})
    pretend_gpu(monkeypatch, TARGETS["sm_90"])


def plant(
    monkeypatch: pytest.MonkeyPatch, module: Any, error: Exception = TOO_LARGE, name: str = "_kernel"
) -> Planted:
    kernel = getattr(module, name)
    planted = Planted(kernel.jit, error)
    monkeypatch.setattr(kernel, "jit", planted)
    if hasattr(kernel, "_failed"):  # what it remembers itself
        monkeypatch.setattr(kernel, "_failed", {})
    return planted


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gather_attention, int8, tiles):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)


def inputs(block: int = 16, D: int = 16) -> tuple[torch.Tensor, ...]:
    return make_qkv(Hq=2, Hkv=1, N=3 * block, D=D, dtype=torch.float16)


def pipeline(executor: bs.Executor[Any, Any], block: int = 16) -> bs.Pipeline[Any, Any, Any]:
    return evolve(bs.mean_pooling(block=block), executor=executor)


@pytest.mark.parametrize(
    ("executor", "module"),
    [
        (bs.TritonExecutor(), sparse_attention_triton),
        (bs.Int8Executor(False), sparse_attention_triton),
        (bs.GatherExecutor(), gather_attention_triton),
    ],
)
def test_a_named_executor_says_so_in_a_sentence(
    executor: bs.Executor[Any, Any], module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = small_preset("s2o") if isinstance(executor, bs.GatherExecutor) else pipeline(executor)
    q, k, v = inputs()
    planted = plant(monkeypatch, module)
    with caplog.at_level(logging.WARNING, "blocksparse"):
        for _ in range(3):
            message = r"_kernel cannot .*300000.*\. Use|_kernel cannot .*\. Choose"
            with pytest.raises(UnsupportedError, match=message) as error:
                named(q, k, v)
            assert "\n" not in str(error.value)
            assert error.value.__cause__ is None
            assert error.value.__suppress_context__ or error.value.__context__ is None
    assert planted.tried == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("named", "of_hopper", "D"),
    [
        (pipeline(bs.TritonExecutor(), 64), sparse_attention_hopper, 16),
        pytest.param(pipeline(bs.Int8Executor(False), 64), int8_attention_hopper, 64, marks=pytest.mark.slow),
        pytest.param(bs.s2o(S=64, block=64), gather_attention_hopper, 64, marks=pytest.mark.slow),
    ],
)
def test_the_portable_kernel_runs_instead_of_hoppers(
    named: bs.Pipeline[Any, Any, Any], of_hopper: Any, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(64, D)
    want = named(q, k, v)
    on_hopper(monkeypatch)
    planted = plant(monkeypatch, of_hopper)
    for _ in range(2):
        assert torch.equal(named(q, k, v), want)
    assert planted.tried == 1


@pytest.mark.parametrize(
    "error",
    [
        TOO_LARGE,
        PTXASError("fatal\nptxas died"),
        CompilationError("x = 1", None, "no"),
        RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
    ],
)
def test_auto_goes_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """To FlexAttention, and where that cannot be compiled either to the reference."""
    q, k, v = inputs()
    auto = bs.AutoExecutor(dense_below=0)
    want = pipeline(bs.ReferenceExecutor())(q, k, v)
    plant(monkeypatch, sparse_attention_triton, error)

    def not_compiled() -> Any:
        raise RuntimeError(
            "No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused Required: 1"
        )

    monkeypatch.setattr(flex, "_compiled", not_compiled)
    monkeypatch.setattr(flex, "uncompiled_because", lambda: None)
    assert torch.equal(pipeline(auto)(q, k, v), want)
    trace = pipeline(auto).trace(q, k, v)
    chosen = str(auto.choose(q, k, v, trace.mask, trace.spec))
    assert chosen.startswith(
        "ReferenceExecutor runs; TritonExecutor cannot: sparse_attention_triton._kernel cannot"
    )
    assert "FlexExecutor cannot: FlexAttention cannot be compiled" in chosen


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver says of an earlier kernel comes through, and nothing is remembered."""
    q, k, v = inputs()
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    planted = plant(monkeypatch, sparse_attention_triton, error)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            pipeline(bs.AutoExecutor(dense_below=0))(q, k, v)
    assert planted.tried == 2


def test_a_stage_says_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(monkeypatch, top_cdf_triton, name="_top_cdf_kernel")
    q, k, v = inputs()
    with pytest.raises(LaunchError, match=r"top_cdf_triton\._top_cdf_kernel cannot be compiled or launched"):
        pipeline(bs.TritonExecutor())(q, k, v)
    assert planted.tried == 1


def test_auto_names_the_kernel_and_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(64, 64)
    auto = bs.AutoExecutor(dense_below=0)
    trace = pipeline(bs.ReferenceExecutor(), 64).trace(q, k, v)
    assert str(auto.choose(q, k, v, trace.mask, trace.spec)).startswith(
        "TritonExecutor runs the portable kernel with Tri"
    )
    on_hopper(monkeypatch)
    assert str(auto.choose(q, k, v, trace.mask, trace.spec)).startswith(
        "TritonExecutor runs the kernel for Hopper with Hop"
    )
