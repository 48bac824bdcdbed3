"""Which executor runs, and what they hand to others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import blocksparse as bs
from blocksparse.execute import flex, int8
from blocksparse.execute.flex import uncompiled_because
from blocksparse.kernels.attention import cpu_attention
from blocksparse.kernels.common import tiles
from blocksparse.kernels.common.tiles import HopperTiles, TritonTiles, tuned, tuned_int8
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.testing import check_executor, make_qkv
from tests import stages
from tests.kernels.attention.references import int8_attention_reference
from tests.largest import Largest
from tests.machine import GPU, needs_flex, needs_gpu, python
from tests.meaning import assert_blind_to_later, relative_l1
from tests.specs import asked, grid_of, not_none
from tests.stages import random_keys

ON_A_GPU: list[bs.Executor[Any, Any]] = [
    bs.TritonExecutor(), bs.GatherExecutor(0.0), *([bs.Int8Executor()] if GPU else []),
]  # fmt: skip


def test_auto_takes_the_cpu_executor_on_a_cpu() -> None:
    """For any dtype, and without a compiler, so without a word."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        q, k, v = make_qkv(N=64, D=16, dtype=dtype)
        trace = bs.pbs_attn(executor=bs.ReferenceExecutor()).trace(q, k, v)
        choice = bs.AutoExecutor().choose(q, k, v, trace.mask, trace.spec)
        assert str(choice).startswith("CpuExecutor runs by ")


def test_heads_that_share_a_mask_may_have_key_orders_of_their_own() -> None:
    q, k, v = make_qkv(N=64, D=16)
    front = bs.SegmentKeySort(16, last_q=16, per_query_head=True), bs.NoScorer(4), bs.SharedByGroup(bs.Random(0.3))
    want = bs.Pipeline(*front, bs.ReferenceExecutor())(q, k, v)
    torch.testing.assert_close(bs.Pipeline(*front, bs.CpuExecutor())(q, k, v), want)


def test_the_default_device_changes_no_dense_chunk_order_sinks_or_record() -> None:
    """What these make themselves is on the CPU."""
    q, k, v = (x.double() for x in make_qkv(M=40, N=64, D=16))
    auto, by_order, sinks = bs.auto(), bs.GivenOrder((1, 1, 3), [2, 0, 1]), [1.0] * q.shape[1]
    want, with_sinks = auto(q, k, v), auto(q, k, v, sinks=sinks)
    compiled = torch.compile(lambda q, k, v: auto(q, k, v, sinks=sinks), backend="eager")
    with torch.device("meta"):
        assert torch.equal(auto(q, k, v), want)
        assert torch.equal(compiled(q, k, v), with_sinks)
        assert bs.GivenOrder((1, 1, 3), [2, 0, 1]) == by_order
        recorder = DensityRecorder()
        recorder.saw_sparse(0, torch.tensor([[0.25, 0.5]], device="cpu"), q_len=2, k_len=2)
        assert recorder.density().tolist() == [[0.25, 0.5]]


def test_a_large_scale_meets_logits_alone() -> None:
    """Which are small: a query times the scale would overflow."""
    q, k, v = make_qkv(N=64, D=16)
    for make in (bs.a_shape, bs.s2o):
        call = make(block=16)(q * 1e20, k * 1e-38, v, scale=2.0**64)
        assert bool(call.isfinite().all())


def test_blocks_far_longer_than_the_prompt_take_no_memory() -> None:
    q, k, v = make_qkv(N=10, D=16)
    pipeline = bs.mean_pooling(block=16384, executor=bs.CpuExecutor())
    with Largest() as made:
        pipeline(q, k, v)
    assert made.numbers <= 2 * 4 * 16384 * 16


@pytest.mark.parametrize(
    ("asked", "answer", "lacking"),
    [
        ("blocksparse.execute.flex.cpp_compiler", None, "no C\\+\\+ compiler is found"),
        ("torch.backends.cpu.get_cpu_capability", "DEFAULT", "CPUs with AVX2 or AVX-512 alone"),
    ],
    ids=["compiler", "vectors"],
)
def test_flex_says_what_a_machine_lacks(
    asked: str, answer: str | None, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, lambda: answer)
    q, k, v = make_qkv(N=64, D=16)
    with pytest.raises(ValueError, match=rf"{lacking}.*Use ReferenceExecutor\(\)"):
        bs.pbs_attn(executor=bs.FlexExecutor())(q, k, v)


SWITCHED_OFF: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "mode": (Largest, "under an active TorchDispatchMode torch.compile does nothing"),
    "config": (lambda: torch._dynamo.config.patch(disable=True), "torch.compile is switched off"),
    "stance": (lambda: torch.compiler.set_stance("force_eager"), "torch.compile is switched off"),
}


@pytest.mark.parametrize(("switch", "sentence"), SWITCHED_OFF.values(), ids=SWITCHED_OFF)
def test_flex_says_that_nothing_is_compiled(
    switch: Callable[[], AbstractContextManager[Any]], sentence: str
) -> None:
    """Uncompiled it would attend to what was dropped. The default on a CPU asks torch to compile nothing.

    A mode sees PyTorch's operations alone, so that under it these compute what the compiled kernel else does.
    """
    q, k, v = make_qkv(N=64, D=16)
    want = bs.pbs_attn(0.5, block=16, S=32)(q, k, v)
    with switch():
        with pytest.raises(ValueError, match=f"FlexAttention must be compiled, and {sentence}.*Use Reference"):
            bs.pbs_attn(0.5, block=16, S=32, executor=bs.FlexExecutor())(q, k, v)
        torch.testing.assert_close(bs.pbs_attn(0.5, block=16, S=32)(q, k, v), want)
    assert uncompiled_because() is None  # and afterwards it is as before


def test_whether_torch_compiles_is_asked_as_often_as_one_likes() -> None:
    """What a compiled function would be guarded by changes nothing: torch would soon stop compiling it anew."""
    default = torch.get_default_dtype()
    try:
        for i in range(20):
            torch.set_default_dtype((torch.float32, torch.float64)[i % 2])
            with torch.autocast("cpu", (torch.bfloat16, torch.float16)[i // 2 % 2]), torch.set_grad_enabled(i > 9):
                assert uncompiled_because() is None
    finally:
        torch.set_default_dtype(default)


def test_flex_never_runs_uncompiled() -> None:
    """Nor where torch.compile gives up in the middle."""
    message = r"needs compiled FlexAttention, .* or use ReferenceExecutor\(\)"
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match=message):
        flex._compiled()(*make_qkv(N=64, D=16))


@pytest.mark.slow
def test_flex_says_that_the_environment_switches_compilation_off() -> None:
    code = (
        "import blocksparse as bs; from blocksparse.testing import make_qkv; q, k, v = make_qkv(N=64, D=16)\n"
        "try: bs.mean_pooling(0.5, executor=bs.FlexExecutor())(q, k, v)\nexcept ValueError as e: print(e)\n"
        "print(bs.mean_pooling(0.5)(q, k, v).shape)"
    )
    result = python(code, TORCHDYNAMO_DISABLE="1")
    assert "and torch.compile is switched off (by TORCHDYNAMO_DISABLE=1" in result.stdout
    assert "torch.Size([1, 4, 64, 16])" in result.stdout


@needs_flex
@pytest.mark.slow
def test_flex_is_the_same_whatever_surrounds_it() -> None:
    """Autocast neither changes its output nor compiles anew, and a call that was refused leaves nothing behind."""
    q, k, v = make_qkv(N=100, D=16)
    sparse = [bs.mean_pooling(0.3, block=16, executor=e) for e in (bs.FlexExecutor(), bs.ReferenceExecutor())]
    with Largest(), pytest.raises(ValueError, match="must be compiled"):
        sparse[0](q, k, v)
    out = sparse[0](q, k, v)
    torch.testing.assert_close(out, sparse[1](q, k, v))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype), torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(sparse[0](q, k, v), out)
    with Largest(), pytest.raises(ValueError, match="must be compiled"):
        sparse[0](q, k, v)
    assert torch.equal(sparse[0](q, k, v), out)


@needs_gpu
def test_auto_takes_triton_on_a_gpu() -> None:
    q, k, v = make_qkv(N=64, D=16, device="cuda")
    trace = bs.pbs_attn(executor=bs.ReferenceExecutor()).trace(q, k, v)
    assert str(bs.AutoExecutor(dense_below=0).choose(q, k, v, trace.mask, trace.spec)) == "TritonExecutor runs"
    assert str(bs.AutoExecutor().choose(q, k, v, trace.mask, trace.spec)).startswith("dense attention runs: dense")


@pytest.mark.parametrize("start", [0, 37])
def test_lists_are_those_of_flex(start: int) -> None:
    """Our lists are FlexAttention's, and its own dense view agrees."""
    q, k, v = make_qkv(N=200, D=16)
    trace = bs.pbs_attn(0.5, block=16, S=64, executor=bs.ReferenceExecutor()).trace(q[:, :, start:], k, v)
    block_mask = flex.to_flex(trace.mask)
    assert torch.equal(block_mask.to_dense().bool(), trace.mask.keep)


@pytest.mark.slow
def test_flex_mask_is_right_even_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled FlexAttention looks at `mask_mod` alone, so that must say everything."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_WARNINGS_SHOWN", set())  # it warns once a process
    q, k, v = make_qkv(N=100, Hq=2, Hkv=2, D=16)
    trace = bs.pbs_attn(0.5, block=16, S=32, executor=bs.ReferenceExecutor()).trace(q, k, v)
    keys, values = trace.permutation.gather_keys(k), trace.permutation.gather_keys(v)
    with pytest.warns(UserWarning, match="without torch.compile"):
        out = flex_attention(q, keys, values, block_mask=flex.to_flex(trace.mask))
    torch.testing.assert_close(out, trace.output.out)
    assert float(trace.density().mean()) < 0.9


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float32, torch.float16))]
)
def test_reference_memory_stays_with_kept_blocks(dtype: torch.dtype) -> None:
    """A row gathers the keys it keeps, not all of them: 4 blocks of 512 keys, never all 16384."""
    q, k, v = make_qkv(N=16384, Hq=1, Hkv=1, D=8, dtype=dtype)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(512), bs.TopK(4), bs.ReferenceExecutor())
    front = pipeline.trace(q[:, :, :512], k[:, :, :512], v[:, :, :512])
    assert front.output.out.dtype == dtype
    scores = pipeline.scorer(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.3))
    mask = pipeline.selector(scores)
    with Largest() as made:
        bs.ReferenceExecutor()(q, k, v, mask, asked(mask, 0.3))
    assert made.nbytes <= 512 * 4 * 512 * 8  # one row of logits against kept keys (or its int64 index), in bytes


def test_flex_refuses_what_its_cpu_kernel_computes_wrongly() -> None:
    """The kernel writes past a block of 8 keys where a CPU has AVX2 and no wider vectors."""
    q, k, v = make_qkv(N=64, D=16)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(8), bs.TopCdf(0.5), bs.FlexExecutor())
    with pytest.raises(ValueError, match="head dim of 16 with key blocks of 8"):
        pipeline(q, k, v)


@pytest.mark.usefixtures("either_way")
def test_cpu_keeps_fp32_where_products_may_be_rounded() -> None:
    q, k, v = make_qkv(N=200, D=16)
    pipeline = bs.mean_pooling(0.5, block=16, executor=bs.CpuExecutor())
    want = pipeline(q, k, v)
    try:
        torch.set_float32_matmul_precision("medium")
        torch.testing.assert_close(pipeline(q, k, v), want)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(params=["kernel", "without"])
def either_way(request: pytest.FixtureRequest) -> None:
    """With the kernel for CPUs, and as where it cannot be compiled."""
    if request.param == "without":
        request.getfixturevalue("without_kernel")


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_without_the_kernel(dtype: torch.dtype) -> None:
    """What every executor must guarantee; others here run with the kernel."""
    check_executor(bs.CpuExecutor(), dtype=dtype, head_dim=16, block=16)


@pytest.mark.usefixtures("either_way")
def test_cpu_says_what_runs() -> None:
    q, k, v = make_qkv(N=64, D=16)
    kernel = cpu_attention.cpu_kernel()
    says = bs.CpuExecutor().runs_by(q, k, v)
    assert says == "the compiled kernel" if kernel.why_not is None else kernel.why_not in says
    assert "float64" in bs.CpuExecutor().runs_by(q.double(), k.double(), v.double())


@pytest.mark.parametrize(
    "executor", [bs.CpuExecutor(), bs.ReferenceExecutor(), bs.TritonExecutor()], ids=stages.name
)
def test_an_executor_by_itself_refuses_gradients_too(executor: bs.Executor[Any, Any], device: str) -> None:
    if device == "cuda" and isinstance(executor, bs.CpuExecutor):
        pytest.skip("it runs on a CPU")
    q, k, v = make_qkv(N=32, D=16, device=device)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(1), executor)
    trace = pipeline.trace(q, k, v)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"computes no gradients\. Call it under"):
        executor(q.requires_grad_(), k, v, trace.mask, asked(trace.mask, 0.25))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("q_all", [None, 1e19])
@pytest.mark.parametrize("N", [1, 16, 64, 70])
def test_a_logit_of_infinity_is_no_row_of_zeros(N: int, q_all: float | None) -> None:
    """In bf16, too, where PyTorch's flash kernel gives it the weight 0; also if all inputs are finite."""
    q, k, v = make_qkv(N=N, D=16, dtype=torch.bfloat16)
    if q_all is None:
        k[:, :, 0, 0], q[:, :, -1, 0] = float("inf"), 1.0
    else:
        q[:], k[:, :, 0] = q_all, 3e19
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.CpuExecutor())
    want = attrs.evolve(everything, executor=bs.ReferenceExecutor())(q, k, v, scale=1.0)
    assert bool(want.isnan().any())
    assert torch.equal(everything(q, k, v, scale=1.0).isnan(), want.isnan())


@pytest.mark.usefixtures("either_way")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("executor", [bs.CpuExecutor(), bs.ReferenceExecutor(), *ON_A_GPU], ids=repr)
def test_a_query_without_keys_is_0_beside_any_value(
    executor: bs.Executor[Any, Any], bad: float, device: str
) -> None:
    """Some queries of a block see a key whose value is not finite, and others none. A GPU runs its own kernel."""
    if device == "cuda" and isinstance(executor, bs.CpuExecutor):
        pytest.skip("it runs on a CPU")
    block, D, dtype = (64, 64, torch.float16) if device == "cuda" else (16, 16, torch.float32)
    q, k, v = make_qkv(Hq=2, Hkv=1, N=2 * block, D=D, dtype=dtype, device=device)
    grid = grid_of(q, k, 2 * block, block)
    keep = torch.zeros_like(grid.visible.expand(1, 2, 1, 2))
    keep[..., 1] = True
    mask = bs.RankedBlockMask(keep, grid, torch.zeros_like(keep, dtype=torch.int32))
    v[:, :, block:] = bad
    output = executor(q, k, v, mask, asked(mask, 0.25))
    assert bool((output.out[:, :, :block] == 0).all())
    assert not bool(output.out[:, :, block:].isfinite().any())


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_a_cpu_without_compiler_takes_any_scale(scale: float) -> None:
    q, k, v = make_qkv(N=100, D=16)
    spec = bs.AttentionSpec(scale=scale)
    mask = mask_of(q, k, bs.GlobalPermutation(), blocks=(32, 32))
    got, want = bs.CpuExecutor()(q, k, v, mask, spec), bs.ReferenceExecutor()(q, k, v, mask, spec)
    torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_a_cpu_without_compiler_rounds_no_large_logits(size: float) -> None:
    """They are computed in float64, since fp32 would round them; small rows keep their bits."""
    q, k, v = make_qkv(N=300, D=16)
    q[..., 0], k[..., 0] = 1.0, size
    spec = bs.AttentionSpec(scale=1.0)
    mask = mask_of(q, k, bs.GlobalPermutation(), blocks=(32, 32))
    small = q.clone()
    small[:, :, ::2] = 0.0
    of_all, of_small = (bs.CpuExecutor()(x, k, v, mask, spec) for x in (q, small))
    want = bs.ReferenceExecutor()(q.double(), k.double(), v.double(), mask, spec)
    torch.testing.assert_close(of_all.out, want.out.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(of_small.out[:, :, 1::2], of_all.out[:, :, 1::2])


# 8 bits


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is asked for first")


def mask_of(
    q: Tensor, k: Tensor, order: bs.GlobalPermutation, *, blocks: tuple[int, int] = (128, 128), causal: bool = True
) -> bs.BlockMask:
    """Everything that can be seen."""
    grid = grid_of(q, k, blocks[0], blocks[1], permutation=order, causal=causal)
    return bs.BlockMask(grid.visible.expand(*q.shape[:2], -1, -1), grid)


def halves(N: int = 300, D: int = 128, Dv: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [*make_qkv(N=N, Hq=4, Hkv=2, D=D, Dv=Dv or D, dtype=dtype)]


# ---- what is refused

TILES = HopperTiles(2, 128, 4)


@needs_triton
@pytest.mark.parametrize(
    ("options", "inputs", "blocks", "reason"),
    [
        ({}, {}, (128, 128), None),
        ({"fp8_pv": False, "pv_skip": [-1.0, -2.0, -3.0, -4.0]}, {"D": 64}, (64, 192), None),
        ({"tiles": TILES}, {"dtype": torch.float32}, (128, 128), "takes float16 and bfloat16, not torch.float32"),
        ({"tiles": TILES}, {"D": 96}, (128, 128), "takes head dims 64 or 128, and equal, not 96 and 96"),
        ({"tiles": TILES}, {"Dv": 64}, (128, 128), "takes head dims 64 or 128, and equal, not 128 and 64"),
        ({"tiles": TILES}, {}, (128, 32), "takes blocks that are multiples of 64, not 128 x 32"),
        ({"tiles": TILES}, {}, (96, 64), "takes blocks that are multiples of 64, not 96 x 64"),
        ({"tiles": TILES}, {}, (64, 128), "does not divide blocks of 64 x 128"),
        ({"tiles": HopperTiles(1, 128, 2)}, {}, (128, 192), "does not divide blocks of 128 x 192"),
        ({"tiles": HopperTiles(2, 128, 6)}, {}, (128, 128), "needs 272 KiB of shared memory, and there are 228"),
        ({"pv_skip": [-1.0, -2.0]}, {}, (128, 128), "'pv_skip' has 2 entries for 4 query heads"),
    ],
)
def test_every_reason(
    options: dict[str, Any], inputs: dict[str, Any], blocks: tuple[int, int], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(int8, "is_hopper", lambda device: True)
    q, k, v = halves(**inputs)
    mask = mask_of(q, k, bs.GlobalPermutation(), blocks=blocks)
    assert bs.Int8Executor(**options).unsupported(q, k, v, mask, asked(mask)) == (
        [] if reason is None else [f"{options['tiles']} {reason}" if "tiles" in options else reason]
    )


@needs_triton
@pytest.mark.parametrize(
    ("inputs", "blocks", "scales"),
    [
        ({"dtype": torch.float16, "D": 96}, (128, 128), "token"),
        ({"dtype": torch.float32}, (128, 128), "token"),
        ({"dtype": torch.float16}, (128, 32), "token"),
        ({"dtype": torch.float16}, (128, 128), "block"),
    ],
)
def test_what_the_kernel_for_hopper_does_not_take_takes_the_portable_one(
    inputs: dict[str, Any], blocks: tuple[int, int], scales: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "is_hopper", lambda device: True)
    q, k, v = halves(**inputs)
    grid = mask_of(q, k, bs.GlobalPermutation(), blocks=blocks).grid
    assert isinstance(next(bs.Int8Executor(scales=scales)._kernels(q, k, v, grid)), TritonTiles)
    q, k, v = halves()
    grid = mask_of(q, k, bs.GlobalPermutation()).grid
    assert isinstance(next(bs.Int8Executor()._kernels(q, k, v, grid)), HopperTiles)


@needs_triton
def test_values_may_lie_anywhere_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit values are made anew, and the kernel's launch moves others that the copy engine cannot read."""
    monkeypatch.setattr(int8, "is_hopper", lambda device: True)
    q, k, v = halves()
    v = torch.cat((v, v), -1)[..., 1:129]
    mask = mask_of(q, k, bs.GlobalPermutation())
    for fp8_pv in (True, False):
        assert bs.Int8Executor(fp8_pv=fp8_pv).unsupported(q, k, v, mask, asked(mask)) == []
    monkeypatch.setattr(int8, "find_spec", lambda name: None)
    assert bs.Int8Executor().unsupported(q, k, v, mask, asked(mask)) == ["triton is not installed"]


# ---- tiles


@pytest.mark.parametrize("fp8_pv", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("blocks", [(64, 64), (64, 128), (128, 64), (128, 128), (192, 192), (256, 512)])
def test_tuned_tiles_divide_blocks_and_fit(blocks: tuple[int, int], D: int, fp8_pv: bool) -> None:
    found = tuned_int8(D, *blocks, fp8_pv)
    assert blocks[0] % (64 * found.consumers) == 0
    assert max(blocks[1], found.block_n) % min(blocks[1], found.block_n) == 0
    assert found.too_large(D, D, qk_bytes=1, pv_bytes=1 if fp8_pv else 2) == []


def test_shared_memory_of_8_bits() -> None:
    """Four stages of 128 keys fit where both products are of 8 bits, two where both are of 16."""
    assert HopperTiles(2, 128, 4).too_large(128, 128, qk_bytes=1, pv_bytes=1) == []
    assert HopperTiles(2, 128, 2).too_large(128, 128) == []
    for wide in ({}, {"qk_bytes": 1}, {"pv_bytes": 1}):
        assert "KiB of shared memory" in HopperTiles(2, 128, 4).too_large(128, 128, **wide)[0]


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((32768, 1, 100, 64), True),
        ((32769, 1, 1, 64), False),  # prompts
        ((1, 65537, 1, 64), False),  # heads
        ((1, 1, 65534 * 64, 64), True),
        ((1, 1, 65536 * 64, 64), False),  # tiles of one head
        ((64, 512, 512 * 64, 64), False),  # tiles in all
    ],
)
def test_what_the_queue_cannot_count_is_left_to_the_portable_kernel(
    shape: tuple[int, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "is_hopper", lambda device: True)
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    q_block = 64
    reasons = HopperTiles(1, 64, 2, 2).too_many(q, q_block, 1)
    assert (reasons == []) is fits
    assert fits or "takes up to 32768 prompts" in reasons[0]
    assert isinstance(tuned(q, q, q, q_block, 64), HopperTiles if fits else TritonTiles)


# ---- what is computed, with the kernel's reference


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands as ever; float64 in place of the kernel."""
    monkeypatch.setattr(int8, "int8_attention", int8_attention_reference)
    monkeypatch.setattr(bs.Int8Executor, "unsupported", lambda *_: [])
    monkeypatch.setattr(bs.Int8Executor, "_hopper_reasons", lambda *_: [])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("fp8_pv", [False, True])
@pytest.mark.parametrize(
    ("N", "M", "maps", "blocks", "causal"),
    [
        (500, 500, None, (128, 128), True),
        (500, 300, 2, (128, 64), True),
        (500, 500, 4, (64, 128), True),  # a map for each query head
        (300, 400, 2, (128, 128), False),
        (240, 240, "queries", (64, 64), False),  # which have an order of their own
        (65, 65, None, (64, 128), True),  # less than a block of keys
        (1, 1, None, (128, 128), True),
    ],
)
def test_beside_the_reference(
    N: int, M: int, maps: Any, blocks: tuple[int, int], causal: bool, fp8_pv: bool
) -> None:
    q, k, v = make_qkv(B=2, N=N, M=M, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16)
    k = k + 3 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    order = (
        bs.GlobalPermutation()
        if maps is None
        else random_keys(k, maps, 128)
        if maps != "queries"
        else (bs.HilbertOrder((4, 6, 10))(q, k, bs.AttentionSpec(scale=0.125, causal=False)))
    )
    mask = mask_of(q, k, order, blocks=blocks, causal=causal)
    got = bs.Int8Executor(fp8_pv)(q, k, v, mask, asked(mask, 0.125))
    want = bs.ReferenceExecutor()(q, k, v, mask, asked(mask, 0.125))
    assert relative_l1(got.out, want.out) < (0.06 if fp8_pv else 0.03)
    torch.testing.assert_close(not_none(got.lse), not_none(want.lse).float(), rtol=0, atol=0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("blocks", [(128, 128), (64, 128), (128, 64), (64, 256)])
@pytest.mark.parametrize("offset", [0, 100])
def test_no_row_learns_of_a_later_token(blocks: tuple[int, int], offset: int) -> None:
    """The mean that keys lose, the queries that take it back, and the scales of tiles."""
    q, k, v = make_qkv(B=2, N=400, M=400 - offset, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16)
    mask = mask_of(q, k, random_keys(k, segment=128), blocks=blocks)
    assert_blind_to_later(bs.Int8Executor(), q, k, v, mask, asked(mask, 0.125))


def test_rows_of_more_blocks_than_the_queue_counts() -> None:
    """A count of blocks has 19 bits there; more are refused, of 16 keys each from eight million keys on."""
    q = torch.empty(1).expand(1, 1, 128, 64)
    assert HopperTiles(2, 128, 4).too_many(q, 128, 2**19 - 1) == []
    (reason,) = HopperTiles(2, 128, 4).too_many(q, 128, 2**19)
    assert "takes rows of up to 524287 key blocks, not 524288" in reason
