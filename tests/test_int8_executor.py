"""What `Int8Executor` refuses, which tiles it takes, and what it computes, by its reference in float64."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.execute import int8
from blocksparse.kernels.common import tiles
from blocksparse.kernels.common.tiles import HopperTiles, TritonTiles, tuned, tuned_int8
from blocksparse.testing import make_qkv
from tests.kernels.attention.references import int8_attention_reference
from tests.meaning import assert_blind_to_later, relative_l1
from tests.specs import asked, grid_of, not_none
from tests.stages import random_keys

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


def _named(options: dict[str, Any], reason: str) -> str:
    """Reasons that come from tiles name them."""
    return f"{options['tiles']} {reason}" if "tiles" in options else reason


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
        [] if reason is None else [_named(options, reason)]
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
def test_values_may_lie_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit values are made anew, and the kernel's launch moves others that the copy engine cannot read."""
    monkeypatch.setattr(int8, "is_hopper", lambda device: True)
    q, k, v = halves()
    v = torch.cat((v, v), -1)[..., 1:129]
    mask = mask_of(q, k, bs.GlobalPermutation())
    for fp8_pv in (True, False):
        assert bs.Int8Executor(fp8_pv=fp8_pv).unsupported(q, k, v, mask, asked(mask)) == []


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "is_hopper", lambda device: True)
    monkeypatch.setattr(int8, "find_spec", lambda name: None)
    q, k, v = halves()
    mask = mask_of(q, k, bs.GlobalPermutation())
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
        (65, 65, None, (64, 128), True),  # less than a block of keys
        (1, 1, None, (128, 128), True),
    ],
)
def test_beside_the_reference(
    N: int, M: int, maps: int | None, blocks: tuple[int, int], causal: bool, fp8_pv: bool
) -> None:
    q, k, v = make_qkv(B=2, N=N, M=M, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16)
    k = k + 3 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    order = bs.GlobalPermutation() if maps is None else random_keys(k, maps, 128)
    mask = mask_of(q, k, order, blocks=blocks, causal=causal)
    got = bs.Int8Executor(fp8_pv)(q, k, v, mask, asked(mask, 0.125))
    want = bs.ReferenceExecutor()(q, k, v, mask, asked(mask, 0.125))
    assert relative_l1(got.out, want.out) < (0.06 if fp8_pv else 0.03)
    torch.testing.assert_close(not_none(got.lse), not_none(want.lse).float(), rtol=0, atol=0.2)


@pytest.mark.usefixtures("on_cpu")
def test_queries_in_an_order_of_their_own() -> None:
    q, k, v = make_qkv(N=240, Hq=4, Hkv=2, D=64, dtype=torch.float16)
    order = bs.HilbertOrder((4, 6, 10))(q, k, bs.AttentionSpec(scale=0.125, causal=False))
    mask = mask_of(q, k, order, blocks=(64, 64), causal=False)
    got = bs.Int8Executor(False)(q, k, v, mask, asked(mask, 0.125))
    want = bs.ReferenceExecutor()(q, k, v, mask, asked(mask, 0.125))
    assert relative_l1(got.out, want.out) < 0.03


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
