"""Dense attention: the same meaning for all inputs, memory that grows with tokens, and no setting changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from blocksparse.execute.dense_attention import _by_rows, dense_attention
from blocksparse.spec import AttentionSpec
from blocksparse.testing import assert_within_budget, make_qkv, masked_attention
from tests.layouts import LAYOUTS
from tests.machine import needs_gpu, needs_hopper

ALL_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SCALE = 0.3


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """In plain torch, in the precision of the inputs."""
    pairs = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return masked_attention(q, k, v, pairs.tril(k.shape[2] - q.shape[2]) if causal else pairs, SCALE)


def by_pytorch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The same by PyTorch's attention, with a key for each query head.

    PyTorch's memory-efficient kernel reads misaligned addresses of some fp32 inputs that are not contiguous, and
    then no kernel runs in this process any more.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    pairs = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool)
    pairs = pairs.tril(k.shape[2] - q.shape[2]) if causal else pairs
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs, scale=SCALE)


def check(got: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    assert got.dtype == q.dtype
    truth = exact(q.double(), k.double(), v.double(), causal=causal)
    if q.dtype == torch.float64:
        torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-13)
        return
    yardsticks = [exact(q, k, v, causal=causal)]
    if q.is_cuda:  # PyTorch's own kernels, which run here, may err more than its products
        yardsticks.append(by_pytorch(q, k, v, causal=causal))
    assert_within_budget(got, truth, max(yardsticks, key=lambda x: float((x.double() - truth).abs().max())))


@pytest.mark.parametrize("M", [1, 40, 150])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float, M: int, device: str) -> None:
    """By whichever kernel: PyTorch's hide keys before they scale."""
    q, k, v = make_qkv(N=150, M=M, Hq=4, Hkv=2, D=16, device=device)
    pairs = q.new_ones(M, 150, dtype=torch.bool).tril(150 - M)
    want = masked_attention(q.double(), k.double(), v.double(), pairs, scale)
    torch.testing.assert_close(
        dense_attention(q, k, v, AttentionSpec(scale=scale)).double(), want, rtol=1e-4, atol=1e-5
    )


def test_the_compiled_kernel_reads_nothing_beyond_tensors_that_do_not_fit() -> None:
    q, k, v = make_qkv(N=150, Hq=4, Hkv=2, D=16)
    for bad in (
        (q, k, v[:, :, :100]),
        (q, k[..., :8], v),
        (q[:, :3], k, v),
        (q, k[:, :, :99], v[:, :, :99]),
        (q, k, v[:, :1]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            dense_attention(*bad, AttentionSpec(scale=0.25))


DIMS = (20, 20), (64, 24), (24, 64), (192, 128), (256, 256), (1, 3)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("M", [200, 131, 1])
@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        *(({"B": 2, "Hkv": Hkv, "D": 32}, causal) for Hkv in (4, 2, 1) for causal in (True, False)),
        *(({"D": D, "Dv": Dv}, True) for D, Dv in DIMS),
    ],
    ids=str,
)
def test_dense_attention_is_attention_to_all(
    sizes: dict[str, Any], causal: bool, M: int, dtype: torch.dtype, device: str
) -> None:
    q, k, v = make_qkv(**sizes, M=M, dtype=dtype, device=device)
    check(dense_attention(q, k, v, AttentionSpec(scale=SCALE, causal=causal)), q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("M", [200, 131])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, M: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = map(LAYOUTS[layout], make_qkv(M=M, D=32, dtype=dtype, device=device))
    check(dense_attention(q, k, v, AttentionSpec(scale=SCALE)), q, k, v, causal=True)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("M", [300, 131])
def test_products_of_a_few_queries_at_a_time(dtype: torch.dtype, causal: bool, M: int, device: str) -> None:
    """What runs where PyTorch has no kernel, as for float64 on a GPU."""
    q, k, v = make_qkv(Hkv=4, M=M, N=300, D=32, dtype=dtype, device=device)
    check(_by_rows(q, k, v, causal=causal, scale=SCALE), q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("M", [200, 131])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_reaches_only_queries_that_see_it(
    value: float, M: int, dtype: torch.dtype, device: str
) -> None:
    q, k, v = make_qkv(M=M, D=32, dtype=dtype, device=device)
    clean = dense_attention(q, k, v, AttentionSpec(scale=SCALE))
    k[:, :, 150] = value
    seen_by = 150 - (200 - M)
    out = dense_attention(q, k, v, AttentionSpec(scale=SCALE))
    assert torch.equal(out[:, :, :seen_by], clean[:, :, :seen_by])
    assert not torch.equal(out[:, :, seen_by:], clean[:, :, seen_by:])


def peak_bytes(call: Callable[[], Tensor], device: str) -> int:
    """The most that a call holds at a time, its output included."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    # PyTorch 2.11 warns where events are not kept.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        call()
    held = peak = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize(
    ("dtype", "M", "Dv"),
    [
        (torch.float32, 2048, 16),  # on a GPU no kernel takes fp32 in groups of heads
        (torch.float64, 2048, 16),  # on a GPU no kernel takes float64
        (torch.bfloat16, 2048, 8),  # no kernel for a CPU takes D and Dv that differ
        (torch.bfloat16, 1024, 16),  # none takes a causal chunk
        (torch.float32, 1024, 20),
    ],
    ids=str,
)
def test_memory_grows_with_tokens(dtype: torch.dtype, M: int, Dv: int, causal: bool, device: str) -> None:
    """All weights of these calls are four or eight times what is allowed."""
    q, k, v = make_qkv(Hq=4, Hkv=2, N=2048, M=M, D=16, Dv=Dv, dtype=dtype, device=device)
    dense_attention(q, k, v, AttentionSpec(scale=SCALE, causal=causal))
    peak = peak_bytes(lambda: dense_attention(q, k, v, AttentionSpec(scale=SCALE, causal=causal)), device)
    by_rows = 3 * 4 * 128 * 2048 * 8 if device == "cuda" and dtype == torch.float64 else 0
    assert peak <= 2 * 2**20 * dtype.itemsize + by_rows


# ---- settings of PyTorch


def settings() -> tuple[Any, ...]:
    """What `sdpa_kernel` sets, for a whole process."""
    names = ("cudnn", "flash", "mem_efficient", "math", "overrideable")
    return (
        tuple(getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in names),
        tuple(torch._C._get_sdp_priority_order()),
    )


def test_threads_never_see_other_settings() -> None:
    q, k, v = make_qkv(N=64, D=16)
    before, seen, done = settings(), set(), threading.Event()

    def attend() -> None:
        for start in (0, 10) * 50:
            dense_attention(q[:, :, start:], k, v, AttentionSpec(scale=SCALE))

    def watch() -> None:
        while not done.is_set():
            seen.add(settings())

    watcher, workers = threading.Thread(target=watch), [threading.Thread(target=attend) for _ in range(2)]
    for thread in (watcher, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    done.set()
    watcher.join()
    assert seen == {before}
    assert settings() == before


def kernel_of(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> str:
    """The name of PyTorch's kernel that runs, if one does."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as watched:
        dense_attention(q, k, v, AttentionSpec(scale=SCALE, causal=causal))
    kernels = "aten::_scaled_dot_product", "aten::_efficient_attention"  # the latter where there is a mask
    names = [event.key for event in watched.key_averages()]
    return next((name for name in names if name.startswith(kernels)), "products")


@needs_hopper
def test_the_fastest_kernel_is_taken_and_what_is_switched_off_is_not() -> None:
    half = make_qkv(Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, device="cuda")
    q, k, v = half
    assert "cudnn" in kernel_of(*half)
    assert "cudnn" in kernel_of(q[:, :, 50:], k, v, causal=False)
    assert "_scaled_dot_product_flash" in kernel_of(q[:, :, 50:], k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert "_scaled_dot_product_flash" in kernel_of(*half)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert "efficient" in kernel_of(*half)
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(*half) == "products"


@needs_gpu
def test_kernels_of_other_dtypes_on_a_gpu() -> None:
    single = make_qkv(Hq=4, Hkv=2, D=64, device="cuda")
    q, k, v = single
    assert "efficient" in kernel_of(*single)
    assert "efficient" in kernel_of(q[:, :, 50:], k, v)
    assert kernel_of(q.double(), k.double(), v.double()) == "products"


def test_cpu_tensors_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that was built for GPUs, on a machine without one, raises at any question about a GPU."""

    def no_gpu(*_: Any) -> bool:
        raise torch.AcceleratorError("CUDA error: no CUDA-capable device is detected")

    for name in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(f"blocksparse.execute.dense_attention.can_use_{name}_attention", no_gpu)
    q, k, v = make_qkv(N=70, D=16)
    for start in (0, 30):
        assert dense_attention(q[:, :, start:], k, v, AttentionSpec(scale=SCALE)).isfinite().all()


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("M", [40, 70])
def test_a_cpu_that_may_round_fp32_multiplies_in_float64(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.set_float32_matmul_precision` may ask a CPU with units for bf16."""
    q, k, v = make_qkv(N=70, M=M, D=16)
    want = dense_attention(q.double(), k.double(), v.double(), AttentionSpec(scale=0.25))
    monkeypatch.setattr("blocksparse.execute.dense_attention.rounds_fp32", lambda: True)
    out = dense_attention(q, k, v, AttentionSpec(scale=0.25))
    assert out.dtype == torch.float32
    assert torch.equal(out, want.float())
