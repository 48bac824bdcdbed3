"""8-bit attention on Hopper beside float64 of the same operands, and those operands beside exact attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.launched import BlockPlan
from blocksparse.testing import make_qkv
from tests.kernels.attention.references import int8_attention_reference
from tests.machine import HOPPER, needs_hopper
from tests.specs import asked, grid_of, not_none

pytest.importorskip("triton")
from blocksparse.execute.int8 import tile_operands
from blocksparse.kernels.attention.sparse_attention import int8_attention
from blocksparse.kernels.common.tiles import HopperTiles, tuned_int8
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.kernels.quantize.tile_operands import TileOperands
from tests.meaning import assert_blind_to_later, relative_l1
from tests.stages import random_keys


@frozen(eq=False)
class Call:
    """What the kernel takes."""

    operands: TileOperands
    lists: BlockPlan
    positions: TokenPositions
    tiles: HopperTiles
    scale: float
    pv_skip: Tensor | None
    out_dtype: torch.dtype

    def __call__(self) -> tuple[Tensor, Tensor]:
        return self._with(int8_attention, self.out_dtype)

    def reference(self) -> tuple[Tensor, Tensor]:
        return self._with(int8_attention_reference, self.out_dtype)

    def exactly(self) -> tuple[Tensor, Tensor]:
        """Attention of the operands, in float64."""
        return self._with(int8_attention_reference, torch.float64)

    def _with(self, compute: Any, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        given: tuple[Tensor, Tensor] = compute(
            self.operands, self.lists, self.positions, self.tiles, scale=self.scale, pv_skip=self.pv_skip,
            out_dtype=out_dtype,
        )  # fmt: skip
        return given


def arguments(
    q: Tensor, k: Tensor, v: Tensor, tiles: HopperTiles, *, q_block: int = 128, k_block: int = 128, causal: bool = True,
    keep: float = 0.4, nothing: bool = False, sort: bool = False, shared: bool = False, fp8: bool = True,
    pv_skip: Tensor | None = None, scale: float = 0.1,
) -> Call:  # fmt: skip
    """What the kernel takes, for a random mask."""
    permutation = random_keys(k, segment=256) if sort else bs.GlobalPermutation()
    grid = grid_of(q, k, q_block, k_block, permutation=permutation, causal=causal)
    kept = (torch.rand(*q.shape[:2], grid.rows, grid.cols, device=q.device) < keep) & grid.visible
    mask = bs.BlockMask(kept if nothing else kept | grid.diagonal, grid)
    plan = BlockPlan.of(mask.share_heads() if shared else mask)
    piece = min(k_block, tiles.block_n)
    operands = tile_operands(q, k, v, permutation, grid, piece, scale=scale, smooth_k=True, fp8=fp8)
    return Call(operands, plan, grid.positions, tiles, scale, pv_skip, q.dtype)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize(
    ("N", "M", "D", "causal"), [(300, 300, 64, True), (300, 200, 64, True), (256, 100, 128, False)]
)
def test_operands_stand_for_what_they_were_made_of(
    N: int, M: int, D: int, causal: bool, block_n: int, fp8: bool
) -> None:
    """All blocks kept: the operands' exact attention is dense attention of the inputs, up to rounding to 8 bits."""
    q, k, v = make_qkv(N=N, M=M, Hq=4, Hkv=2, D=D)
    k = k + 3 * torch.randn(1, 2, 1, D)  # what smoothing is for
    tiles = HopperTiles(2, block_n, 2)
    call = arguments(q, k, v, tiles, k_block=64, causal=causal, keep=1.1, sort=True, fp8=fp8)
    out, lse = call.reference()
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.1
    if causal:
        scores = scores.masked_fill(torch.ones(M, N, dtype=torch.bool).triu(N - M + 1), float("-inf"))
    want = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
    assert 1e-4 < relative_l1(out, want) < (0.05 if fp8 else 0.03)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=0.2)


@pytest.mark.skipif(HOPPER, reason="runs here")
def test_says_where_it_runs(device: str) -> None:
    executor = bs.Int8Executor(tiles=HopperTiles(2, 64, 2))
    with pytest.raises(ValueError, match=r"compute capability 9.0.*TritonExecutor\(\)"):
        bs.mean_pooling(block=64, executor=executor)(*make_qkv(N=300, D=64, dtype=torch.float16, device=device))


@needs_hopper
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("N", "M", "D", "q_block", "k_block", "causal", "sort", "shared", "nothing"),
    [
        (1024, 1024, 128, 128, 128, True, False, False, False),
        (1000, 1000, 128, 128, 128, True, True, False, False),
        (1000, 333, 128, 128, 128, True, True, True, False),
        (1000, 700, 64, 128, 64, True, False, False, True),
        (1111, 1111, 128, 64, 64, True, True, False, True),
        (1111, 1111, 128, 128, 64, True, True, False, False),
        (1500, 1400, 128, 128, 64, True, False, True, True),
        (700, 900, 128, 128, 64, False, True, False, True),
        (900, 1000, 64, 256, 128, False, True, False, False),
        (2000, 2000, 128, 128, 256, True, False, True, False),
        (777, 500, 64, 64, 128, False, False, False, True),
        (1, 1, 64, 128, 128, True, False, False, False),
    ],
)
def test_kernel(
    N: int, M: int, D: int, q_block: int, k_block: int, causal: bool, sort: bool, shared: bool, nothing: bool,
    dtype: torch.dtype, fp8: bool,
) -> None:  # fmt: skip
    q, k, v = make_qkv(B=2, N=N, M=M, Hq=4, Hkv=2, D=D, dtype=dtype, device="cuda")
    tiles = tuned_int8(D, q_block, k_block, fp8)
    call = arguments(
        q, k, v, tiles, q_block=q_block, k_block=k_block, causal=causal, sort=sort, shared=shared, nothing=nothing,
        fp8=fp8,
    )  # fmt: skip
    out, lse = call()
    want, want_lse = call.exactly()
    # Weights and outputs have 8 or 11 bits, and 4 where they are fp8.
    assert relative_l1(out, want) < (0.05 if fp8 else 6e-3 if dtype == torch.bfloat16 else 2e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    for _ in range(3):
        assert torch.equal(call()[0], out)  # a difference would be a race
    read = evolve(call, positions=evolve(call.positions, q_in_order=False, k_in_order=False))
    assert torch.equal(read()[0], out)  # positions read
    assert torch.equal(evolve(call, lists=evolve(call.lists, index=call.lists.index.int()))()[0], out)


@needs_hopper
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(scale: float, fp8: bool) -> None:
    q, k, v = make_qkv(N=500, D=64, dtype=torch.float16, device="cuda")
    call = arguments(q, k, v, tuned_int8(64, 128, 128, fp8), scale=scale, fp8=fp8)
    want, want_lse = call.exactly()
    out, lse = call()
    assert relative_l1(out, want) < (0.05 if fp8 else 2e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


@needs_hopper
@pytest.mark.parametrize("k_block", [64, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_pv_skip(fp8: bool, k_block: int) -> None:
    q, k, v = make_qkv(N=2000, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16, device="cuda")
    pv_skip = torch.tensor([-0.5, -1.0, -2.0, -80.0], device="cuda")
    tiles = tuned_int8(128, 128, k_block, fp8)
    call = arguments(q, k, v, tiles, k_block=k_block, keep=0.8, pv_skip=pv_skip, fp8=fp8)
    want, want_lse = call.exactly()
    out, lse = call()
    all_, _ = evolve(call, pv_skip=None).exactly()
    assert relative_l1(want[:, 0], all_[:, 0]) > 0.05
    assert torch.equal(want[:, 3], all_[:, 3])
    # A query that stands on the very edge of a rule may decide otherwise.
    off = (lse - want_lse).abs() > 1e-3
    assert off.float().mean() < 1e-3
    assert relative_l1(out[~off], want[~off]) < (0.05 if fp8 else 6e-3)


@needs_hopper
@pytest.mark.parametrize("N", [8192, 65536, 262144])
def test_fp8_sums_stay_sane(N: int) -> None:
    """Values with a mean, and weights all alike: tensor cores alone would lose a tenth at 8192 keys, and most at 262144."""
    q, k, v = make_qkv(N=N, M=128, Hq=1, Hkv=1, D=128, dtype=torch.bfloat16, device="cuda")
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(128), bs.Everything(), bs.Int8Executor())
    out = pipeline(0.01 * q, k, v + 1).double()
    weight = (0.01 * q.double() @ k.double().mT * 128**-0.5).masked_fill(
        torch.ones(128, N, dtype=torch.bool, device="cuda").triu(N - 127), float("-inf")
    )
    assert relative_l1(out, weight.softmax(-1) @ (v + 1).double()) < 0.01


@needs_hopper
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("blocks", [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize("offset", [0, 64, 300])
def test_no_row_learns_of_a_later_token(blocks: tuple[int, int], offset: int, fp8: bool) -> None:
    """Every path: smoothing by the first tokens, scales of tiles, sorted keys, chunks that start anywhere."""
    q, k, v = make_qkv(N=1000, M=1000 - offset, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, device="cuda")
    order = random_keys(k, segment=256)
    grid = grid_of(q, k, blocks[0], blocks[1], permutation=order)
    mask = bs.BlockMask(grid.visible.expand(1, 4, -1, -1), grid)
    assert_blind_to_later(bs.Int8Executor(fp8), q, k, v, mask, asked(mask, 0.125))


@needs_hopper
def test_against_exact_attention_of_the_kept_blocks() -> None:
    q, k, v = make_qkv(N=1500, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16, device="cuda")
    front = bs.SegmentKeySort(S=256), bs.MeanPoolScorer(128), bs.TopK(4)
    want = bs.Pipeline(*front, bs.ReferenceExecutor()).trace(q, k, v).output
    for fp8, limit in ((False, 0.03), (True, 0.06)):
        got = bs.Pipeline(*front, bs.Int8Executor(fp8)).trace(q, k, v).output
        assert relative_l1(got.out, want.out) < limit
        torch.testing.assert_close(not_none(got.lse), not_none(want.lse).float(), rtol=0, atol=0.1)
