"""Rounding values to fp8 in one launch: the reference's numbers, here by arithmetic, on a GPU by its conversion."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.quantize import tokens_triton as module
from blocksparse.kernels.quantize.tokens import fp8_values
from blocksparse.kernels.quantize.tokens_triton import fp8_values_triton


def tokens(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def slots_of(*shape: int, tokens_: int, device: str) -> Tensor:
    """Every slot names some token or is empty."""
    index = torch.randint(-1, tokens_, shape, generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    return index.to(device)


def check(v: Tensor, index: Tensor | None = None) -> None:
    """Numbers compare equal, so that -0.0 may be 0.0."""
    values, scale = fp8_values_triton(v, index)
    want, want_scale = fp8_values.reference(v, index)
    assert values.dtype == torch.float8_e4m3fn
    assert values.is_contiguous()
    assert torch.equal(values.float(), want.float())
    assert torch.equal(scale, want_scale)


@pytest.fixture(params=["conversion", "arithmetic"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where there is hardware for it, both ways."""
    if request.param == "arithmetic":
        monkeypatch.setattr(module, "converts_to_fp8", lambda x: False)
    elif not torch.cuda.is_available():
        pytest.skip("the interpreter rounds to fp8 wrongly")
    return str(request.param)


@pytest.mark.parametrize("N", [1, 15, 63, 64, 129, 300])
def test_lengths(N: int, way: str, device: str) -> None:
    check(tokens(1, 2, N, 64, device=device))


@pytest.mark.parametrize(
    "D", [16, pytest.param(80, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_head_dims_and_dtypes(D: int, dtype: torch.dtype, way: str, device: str) -> None:
    check(tokens(2, 2, 70, D, device=device, dtype=dtype), slots_of(2, 4, 90, tokens_=70, device=device))


def test_layouts(way: str, device: str) -> None:
    check(
        tokens(2, 70, 3, 32, device=device).transpose(1, 2),
        slots_of(70, tokens_=70, device=device).expand(2, 3, 70),
    )
    check(tokens(2, 3, 32, 70, device=device).mT)


def test_every_number_and_what_lies_between(way: str, device: str) -> None:
    """The first entry is the largest, so that the scale is one."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [torch.nextafter(between, torch.tensor(to)) for to in (0.0, 500.0)]
    entries = torch.cat((numbers, between, *near))
    largest = torch.full((1, 1, 2, 1), 448.0)
    v = torch.cat((largest, torch.stack((entries, -entries)).view(1, 1, 2, -1)), -1).to(device)
    assert torch.equal(fp8_values_triton(v, None)[1], torch.ones(1, 1, 2, device=device))
    check(v)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-25, 1e-18, 1e30, 3e38])
def test_every_size(size: float, way: str, device: str) -> None:
    spread = torch.logspace(-4, 0, 64, device=device)
    check(tokens(1, 1, 50, 64, device=device).clamp(-3, 3) / 3 * spread * size)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_stay_in_their_token(value: float, way: str, device: str) -> None:
    v = tokens(1, 1, 16, 8, device=device)
    want, want_scale = fp8_values.reference(v, None)
    v[0, 0, 8, 3] = value
    rest = torch.arange(16, device=device) != 8
    for f in (fp8_values_triton, fp8_values.reference):
        values, scale = f(v, None)
        assert values[0, 0, 8].isnan().all()
        assert scale[0, 0, 8].isnan()
        assert torch.equal(values[:, :, rest].float(), want[:, :, rest].float())
        assert torch.equal(scale[:, :, rest], want_scale[:, :, rest])
