"""8-bit products: rounding, the kernel against its reference, the cost in accuracy, and who may learn of whom."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.quantize.tokens import fp8_per_token, int8_per_block, int8_per_token, smoothing_mean
from blocksparse.testing import make_qkv
from tests.cases import slow
from tests.kernels.attention.references import approximate_attention_reference
from tests.machine import DTYPES, GPU
from tests.meaning import assert_blind_to_later, relative_l1
from tests.specs import grid_of, not_none
from tests.stages import random_keys

pytest.importorskip("triton")
from blocksparse.execute.int8 import token_operands
from blocksparse.kernels.common.sizes import empty_as
from blocksparse.kernels.common.tiles import TritonTiles
from blocksparse.kernels.masks.arguments import Approximation
from tests.kernels.attention import test_sparse_attention as exact

FP8 = GPU and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(
    not FP8, reason="fp8 products need Ada or later; Triton's interpreter rounds to fp8 wrongly"
)
PV = [False, pytest.param(True, marks=needs_fp8)]


@frozen(eq=False, kw_only=True)
class Call(exact.Call):
    """What the kernel takes."""

    approximation: Approximation
    out_dtype: torch.dtype

    def __call__(self, **changed: Any) -> tuple[Tensor, Tensor]:
        out = empty_as(self.q, self.v.shape[-1], self.out_dtype)
        return super().__call__(**{"approximation": self.approximation, "out": out, **changed})

    def by_reference(self) -> tuple[Tensor, Tensor]:
        """The specification: 8-bit numbers and indices as they are, everything else in float64."""
        scales = [getattr(self.approximation, field.name) for field in attrs.fields(Approximation)]
        return approximate_attention_reference(
            widened(self.q), widened(self.k), widened(self.v), self.lists, self.positions, self.tiles.block_n,
            scale=self.scale, approximation=Approximation(*map(widened, scales)), out_dtype=torch.float64,
        )  # fmt: skip


def widened(x: Any) -> Any:
    floats = torch.float16, torch.bfloat16, torch.float32
    return x.double() if isinstance(x, Tensor) and x.dtype in floats else x


@frozen
class Int8:
    """How queries and keys are rounded."""

    shared: bool = False  # a scale for each block instead of each token
    smooth_k: bool = True


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    int8: Int8 | None = None,
    fp8: bool = False,
    pv_skip: float | None = None,
    block: int = 32,
    causal: bool = True,
    keep: float = 0.6,
    tiles: TritonTiles | None = None,
    permutation: bs.GlobalPermutation = exact.IN_PLACE,
) -> tuple[Call, Tensor | None]:
    """What the kernel takes for a random mask, and what smoothing took from every logit."""
    call = exact.arguments(q, k, v, block=block, causal=causal, keep=keep, tiles=tiles, permutation=permutation)
    keys, values, scale = call.k, call.v, call.scale
    grid = grid_of(q, keys, block, permutation=permutation, causal=causal)
    skip = None if pv_skip is None else torch.full((grid.q_heads,), pv_skip, device=q.device)
    approximation, taken = Approximation(skip), None
    if int8 is not None:
        rounded = token_operands(q, k, permutation, grid, scale=scale, smooth_k=int8.smooth_k, shared=int8.shared)
        q, keys, taken = rounded.q, rounded.k, rounded.taken
        approximation = Approximation(skip, rounded.q_scale, rounded.k_scale, rounded.k_copy)
    if fp8:
        values, v_scale = fp8_per_token(values)
        approximation = evolve(approximation, v_scale=v_scale)
    # Kernels are not told that tokens stand in order, so that they read positions.
    positions = evolve(grid.positions, q_in_order=False, k_in_order=False)
    its: dict[str, Any] = {"q": q, "k": keys, "v": values, "positions": positions, "lists": call.lists}
    its |= {"tiles": call.tiles, "scale": scale, "approximation": approximation, "out_dtype": v.dtype}
    return Call(**its), taken


def assert_as_reference(call: Call) -> None:
    out, lse = call()
    want, want_lse = call.by_reference()
    assert out.dtype == call.out_dtype
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    if call.v.dtype == torch.float8_e4m3fn:
        # A weight at the middle between two fp8 numbers may go either way.
        assert relative_l1(out, want) < 2e-3
    else:
        eps = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[out.dtype]
        torch.testing.assert_close(out.double(), want, rtol=eps, atol=eps * float(call.v.double().abs().max()))


def structured(
    N: int, *, M: int | None = None, Hq: int = 4, Hkv: int = 2, D: int = 64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """As a model has it: keys share an offset larger than what tells them apart, values follow topics."""
    q, k, v = make_qkv(N=N, M=M, Hq=Hq, Hkv=Hkv, D=D)
    generator = torch.Generator().manual_seed(1)
    k = k + 4 * torch.randn(1, Hkv, 1, D, generator=generator)
    v = 0.5 * v + torch.randn(1, Hkv, (N + 39) // 40, D, generator=generator).repeat_interleave(40, 2)[:, :, :N]
    return q.to(device), k.to(device), v.to(device)


# Rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_int8_rounds_to_half_a_step(dtype: torch.dtype) -> None:
    x = make_qkv(N=70, D=16, dtype=dtype)[0]
    for values, scale in (int8_per_token(x), int8_per_block(x, 32, lead=5)):
        assert values.dtype == torch.int8
        assert scale.shape == x.shape[:-1]
        error = (values * scale.unsqueeze(-1) - x.float()).abs()
        assert (error <= 0.5001 * scale.unsqueeze(-1)).all()
    assert (int8_per_token(x)[0].abs().amax(-1) == 127).all()


def test_int8_by_hand() -> None:
    values, scale = int8_per_token(torch.tensor([[254.0, 3.0, -5.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    assert values.tolist() == [[127, 2, -2, 0], [0, 0, 0, 0]]  # 1.5, -2.5 and 0.5 go to even
    assert scale.tolist() == [2.0, 0.0]


def test_blocks_share_a_scale_on_the_grid() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    assert torch.equal(int8_per_block(x, 2)[1] * 127, torch.tensor([2.0, 2.0, 4.0, 4.0, 5.0]))
    assert torch.equal(int8_per_block(x, 2, lead=1)[1] * 127, torch.tensor([1.0, 3.0, 3.0, 5.0, 5.0]))


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 65504.0, 1e38])
def test_rounding_at_every_size(size: float) -> None:
    x = size * torch.tensor([[1.0, -0.5, 0.0]])
    for values, scale in (int8_per_token(x), int8_per_block(x, 1), fp8_per_token(x)):
        back = values.float() * scale.unsqueeze(-1)
        torch.testing.assert_close(back, x if size > 1e-30 else torch.zeros_like(x), rtol=1e-2, atol=0)


def test_fp8_uses_its_range() -> None:
    x = torch.randn(50, 64) * torch.logspace(-4, 4, 50)[:, None]
    values, scale = fp8_per_token(x)
    assert (values.float().abs().amax(-1) == 448).all()
    error = (values.float() * scale[:, None] - x).abs()
    assert (error <= x.abs() / 16 + 2**-10 * scale[:, None]).all()  # half a step of 3 bits, or of a subnormal


def test_smoothing_mean_knows_no_later_token() -> None:
    k = torch.randn(1, 2, 300, 8)
    assert torch.allclose(smoothing_mean(k, False), k.mean(2, keepdim=True), atol=1e-6)
    assert torch.allclose(smoothing_mean(k, True), k[:, :, :128].mean(2, keepdim=True), atol=1e-6)
    assert torch.allclose(smoothing_mean(k, True, 64), k[:, :, :64].mean(2, keepdim=True), atol=1e-6)
    assert torch.equal(smoothing_mean(k, False, 64), smoothing_mean(k, False))


# The kernel against its reference


@pytest.mark.parametrize("fp8", PV)
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        *(({"N": 161, "D": D, "dtype": dtype}, {"block": 64}) for D in (64, 80, 128) for dtype in DTYPES),
        # Of 170 keys: rows before, across and after the end of what smoothing looks at.
        *(({"N": 170, "M": M}, {}) for M in (1, 31, 64, 100, 170)),
        *slow(*(({"N": 170, "Hq": 2 * group, "Hkv": 2}, {}) for group in (1, 3, 4))),
        *slow(*(({"N": 200, "M": 150, "Hq": 4, "Hkv": 2, "D": 64}, {"int8": int8, "causal": causal})
                for int8 in (Int8(), Int8(shared=True), Int8(smooth_k=False)) for causal in (True, False))),
        *slow(*(({"N": 180}, {"heads": heads}) for heads in (1, 2))),
    ],
    ids=str,
)  # fmt: skip
def test_calls(sizes: dict[str, Any], asked: dict[str, Any], fp8: bool, device: str) -> None:
    """Head dims, chunks, groups of heads, options, and keys in an order for each of so many heads."""
    sizes, asked = {"Hq": 2, "Hkv": 1, "D": 32, **sizes}, {"int8": Int8(), **asked}
    dtype = sizes.pop("dtype", torch.float32)
    q, k, v = (x.to(dtype) for x in structured(**sizes, device=device))
    if heads := asked.pop("heads", 0):
        asked["permutation"] = random_keys(k, heads)
    assert_as_reference(arguments(q, k, v, fp8=fp8, **asked)[0])


@pytest.mark.slow
@pytest.mark.parametrize("fp8", PV)
def test_with_pv_skip_and_small_tiles(fp8: bool, device: str) -> None:
    q, k, v = structured(150, Hq=1, Hkv=1, D=32, device=device)
    tiles = TritonTiles(16, 32, 4, 2)
    call, _ = arguments(3 * q, k, v, int8=Int8(), fp8=fp8, block=64, pv_skip=-3.0, keep=0.9, tiles=tiles)
    assert_as_reference(call)
    assert not torch.equal(call()[1], call(approximation=evolve(call.approximation, pv_skip=None))[1])


@pytest.mark.parametrize("fp8", PV)
def test_values_of_every_size(fp8: bool, device: str) -> None:
    """Zero tokens, and sizes that span all of fp8's range and more."""
    q, k, v = structured(150, Hq=2, Hkv=1, D=32, device=device)
    v *= torch.logspace(-5, 5, 150, device=device)[
        torch.randperm(150, generator=torch.Generator().manual_seed(0)), None
    ]
    v[:, :, 10:50] = 0.0
    assert_as_reference(arguments(q, k, v, int8=Int8(), fp8=fp8)[0])


@pytest.mark.parametrize("fp8", PV)
def test_constant_keys_give_the_mean_value(fp8: bool, device: str) -> None:
    """Smoothing leaves nothing of them, whatever their size; `lse` gets it back."""
    q, k, v = structured(256, Hq=2, Hkv=1, D=32, device=device)
    k = 100 * k[:, :, :1].expand_as(k)
    executor = bs.Int8Executor(fp8)
    output = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(64), bs.TopK(9), executor).trace(q, k, v).output
    means = v.cumsum(2) / torch.arange(1, 257, device=device)[:, None]
    tolerance = 0.2 if fp8 else 1e-4
    torch.testing.assert_close(output.out, means.expand(-1, 2, -1, -1), rtol=tolerance, atol=tolerance)
    want = (q @ k[:, :, 0, :, None])[..., 0] * 32**-0.5 + torch.arange(1, 257, device=device).log()
    torch.testing.assert_close(not_none(output.lse)[..., 128:], want[..., 128:], rtol=1e-4, atol=1e-2)


# What it costs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({"fp8_pv": False}, 0.015),
        ({"fp8_pv": False, "scales": "block"}, 0.02),
        pytest.param({"fp8_pv": True}, 0.045, marks=needs_fp8),
    ],
    ids=str,
)
def test_accuracy(options: dict[str, Any], budget: float, causal: bool, device: str) -> None:
    q, k, v = structured(400, Hq=2, Hkv=1, device=device)
    front = bs.SegmentKeySort(S=128) if causal else bs.Identity(), bs.MeanPoolScorer(64), bs.TopCdf(0.9)
    want = bs.Pipeline(*front, bs.ReferenceExecutor()).trace(q, k, v, causal=causal)
    exact = bs.ReferenceExecutor()(q.double(), k.double(), v.double(), want.mask, want.spec)
    got = bs.Int8Executor(**options)(q, k, v, want.mask, want.spec)
    assert relative_l1(got.out, exact.out) < budget
    # When causal, the first rows are not smoothed.
    assert float((not_none(got.lse) - not_none(exact.lse))[..., 128:].abs().mean()) < 0.02


# Who learns of whom


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"fp8_pv": False}, {"fp8_pv": False, "pv_skip": -2.0}, pytest.param({"pv_skip": -2.0}, marks=needs_fp8)],
    ids=str,
)
@pytest.mark.parametrize("permuted", [False, True])
def test_later_tokens_change_no_bit(permuted: bool, options: dict[str, Any], device: str) -> None:
    q, k, v = structured(200, Hq=2, Hkv=1, D=16, device=device)
    order = bs.SegmentKeySort(S=64) if permuted else bs.Identity()
    held = bs.Pipeline(order, bs.MeanPoolScorer(32), bs.TopCdf(0.95), bs.ReferenceExecutor()).trace(q, k, v)
    assert_blind_to_later(bs.Int8Executor(**options), q, k, v, held.mask, held.spec)


@pytest.mark.slow
@pytest.mark.parametrize("M", [20, 72, 100])
def test_chunked_equals_unchunked(M: int, device: str) -> None:
    """Every token is rounded as in the whole prompt, so chunks of later rows differ by fp32 alone."""
    q, k, v = structured(200, Hq=2, Hkv=1, D=32, device=device)
    everything = bs.Identity(), bs.MeanPoolScorer(32), bs.TopK(99)
    pipeline = bs.Pipeline(*everything, bs.Int8Executor(FP8))
    whole, chunk = pipeline(q, k, v), pipeline(q[:, :, -M:], k, v)
    if FP8:
        assert relative_l1(chunk, whole[:, :, -M:]) < 2e-3
    else:
        torch.testing.assert_close(chunk, whole[:, :, -M:], rtol=1e-5, atol=1e-5)


# The executor


def test_fp8_values_need_an_output(device: str) -> None:
    call, _ = arguments(*structured(70, Hq=2, Hkv=1, D=16, device=device), fp8=True)
    with pytest.raises(ValueError, match="'out' must be given with 'v_scale'"):
        call(out=None)


@pytest.mark.skipif(GPU, reason="what the interpreter cannot do")
def test_interpreter_refuses_fp8() -> None:
    with pytest.raises(ValueError, match="interpreter rounds to fp8 wrongly"):
        bs.pbs_attn(executor=bs.Int8Executor())(*make_qkv(D=16))


def test_fp8_needs_wide_tiles(device: str) -> None:
    front = bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2)
    with pytest.raises(ValueError, match="fp8 products need tiles of at least 32 keys, not 16"):
        bs.Pipeline(*front, bs.Int8Executor())(*make_qkv(D=16, device=device))
