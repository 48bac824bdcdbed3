"""The gather kernel against its reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.attention.gather_attention import fits_hopper, gather_attention_reference
from blocksparse.kernels.masks.arguments import RankedLists, StopRule
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.order.content_orders import GlobalIndexMap
from blocksparse.presets.text import s2o
from blocksparse.testing import assert_within_budget, make_qkv, masked_attention
from tests.cases import slow
from tests.machine import DTYPES, GPU, needs_hopper
from tests.meaning import pairs_of
from tests.specs import grid_of

pytest.importorskip("triton")
from blocksparse.kernels.attention.gather_attention_hopper import gather_attention_hopper, tile_options
from blocksparse.kernels.attention.gather_attention_triton import gather_attention_triton

# The interpreter is slow.
LENGTHS = [1, 63, 65, 129, *([200, 1000, 4096] if GPU else [])]
Kernel = Callable[..., tuple[Tensor, Tensor, Tensor]]


@frozen(eq=False)
class Call:
    """What the kernel takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    lists: RankedLists
    positions: TokenPositions
    rule: StopRule
    scale: float
    permutation: bs.Permutation
    grid: bs.Grid

    def by(self, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        return kernel(self.q, self.k, self.v, self.lists, self.positions, self.rule, scale=self.scale)

    def in_float64(self) -> Call:
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        return evolve(self, q=q, k=k, v=v)


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    permuter: bs.Permuter[Any] | None = None,
    block: int = 16,
    k_block: int | None = None,
    causal: bool = True,
    tau: float = 0.2,
    patience: int = 1,
    commit: bool = True,
    mean: bool = False,
    keep: float = 0.8,
    band: int = 0,
) -> Call:
    """What the kernel takes, for a random mask in random order, of which diagonal and band open each row."""
    scale, k_block = q.shape[-1] ** -0.5, k_block or block
    permutation = (permuter or GlobalIndexMap(64))(q, k, bs.AttentionSpec(scale=scale, causal=causal))
    grid = grid_of(q, k, block, k_block, permutation=permutation, causal=causal)
    shape = q.shape[0], q.shape[1], grid.rows, grid.cols
    generator = torch.Generator().manual_seed(0)
    chosen = (torch.rand(shape, generator=generator) < keep).to(q.device)
    rank = torch.rand(shape, generator=generator).argsort(-1).to(q.device)
    opening = (grid.within(band) if band else grid.diagonal).expand(shape)
    listed = (chosen | opening) & grid.visible
    order = (rank - grid.cols * opening.int()).where(listed, 1 << 20).argsort(-1).int()
    lists = RankedLists(order, opening.sum(-1).int(), listed.sum(-1).int(), block, k_block)
    rule = StopRule(torch.full((q.shape[1],), tau, device=q.device), patience, commit, mean)
    return Call(q, k, v, lists, grid.positions, rule, scale, permutation, grid)


def assert_right(call: Call, kernel: Kernel = gather_attention_triton) -> Tensor:
    """Right against float64 where the reference stops, and it stops there too; gives the blocks it left out."""
    out, lse, visited = call.by(kernel)
    _, want_lse, want_visited = call.by(gather_attention_reference)
    assert torch.equal(visited, want_visited)
    # Exactly the blocks that were visited, in one go.
    whole = evolve(call, lists=evolve(call.lists, opened=visited, count=visited))
    want, _, _ = whole.in_float64().by(gather_attention_reference)
    assert_within_budget(out, want, plain(whole))
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3 if call.q.dtype != torch.float32 else 1e-5)
    return call.lists.count - visited


def plain(call: Call) -> Tensor:
    """Masked softmax attention in the precision of the inputs, over the pairs that the lists mean."""
    index, count = call.lists.index.long(), call.lists.count.unsqueeze(-1)
    listed = torch.arange(index.shape[-1], device=index.device) < count
    mask = bs.BlockMask(torch.zeros_like(listed).scatter_(-1, index, listed), call.grid)
    pairs = pairs_of(call.permutation, mask, call.q, call.k).to(call.q.device)
    return masked_attention(call.q, call.k, call.v, pairs, call.scale)


ONE_MAP = bs.SegmentKeySort(32, last_q=8)  # for all queries
RULES: tuple[dict[str, Any], ...] = (
    {"tau": 0.0}, {"tau": 0.3, "commit": False}, {"tau": 0.3, "mean": True}, {"tau": 0.6, "patience": 2},
    {"tau": 0.6, "patience": 2, "commit": False, "mean": True}, {"tau": float("inf")},
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow, in the interpreter
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        *(({"N": N, "D": 32, "dtype": dtype}, {"block": 32}) for N in LENGTHS for dtype in DTYPES),
        # The running maximum keeps exponents in range, and the stop rule does not see it.
        ({"N": 200, "D": 64}, {"block": 32, "size": 100}),
        *(({"N": 129, "M": M}, {"block": 32}) for M in (1, 31, 64, 100, 128)),
        *slow(*(({"B": 2, "N": 70, "M": 40, "Hq": group}, {"permuter": GlobalIndexMap(32, per_query_head=each)})
                for group in (1, 3, 4) for each in (True, False))),
        *slow(*(({"N": 160}, rule) for rule in RULES)),
        *slow(*(({"N": 100, "M": 70}, {"permuter": permuter, "causal": causal})
                for permuter in (bs.Identity(), ONE_MAP) for causal in (True, False))),
        # Any block: a wide one takes several tiles, and what does not fill a tile is masked.
        *slow(*(({"N": 150}, {"permuter": permuter, "block": block, "k_block": k_block})
                for block, k_block in ((64, 16), (16, 64), (32, 128), (48, 24), (8, 40), (128, 128))
                for permuter in (GlobalIndexMap(16 * block), ONE_MAP))),
        *slow(*(({"N": N, "D": D, "Dv": Dv, "dtype": dtype}, {"block": 32}) for dtype in DTYPES
                for N, D, Dv in ((129, 80, 80), (129, 96, 32), (70, 5, 3), (129, 256, 256)))),
    ],
    ids=str,
)  # fmt: skip
def test_calls(sizes: dict[str, Any], asked: dict[str, Any], device: str) -> None:
    """Lengths, great logits, chunks, groups of heads, rules, orders, blocks and head dims."""
    q, k, v = make_qkv(**{"Hq": 2, "Hkv": 1, "D": 16, **sizes}, device=device)
    asked = dict(asked)
    left = assert_right(arguments(q * asked.pop("size", 1), k, v, **asked))
    assert "tau" not in asked or (int(left.sum()) == 0) == (asked["tau"] == 0)


@pytest.mark.parametrize(
    ("near", "band"),
    [(40, 40), pytest.param(32, 32, marks=pytest.mark.slow), pytest.param(0, 20, marks=pytest.mark.slow)],
)
def test_rows_that_open_with_a_band(near: int, band: int, device: str) -> None:
    """Near keys in blocks of their own, in one block with others, and wherever the order put them."""
    q, k, v = make_qkv(N=130, M=100, Hq=2, Hkv=1, D=16, device=device)
    for tau in (0.2, float("inf")):
        assert_right(arguments(q, k, v, permuter=GlobalIndexMap(32, near=near), band=band, tau=tau))


def test_a_row_with_nothing_kept(device: str) -> None:
    q, k, v = make_qkv(B=2, N=70, Hq=2, Hkv=1, D=16, device=device)
    call = arguments(q, k, v, permuter=GlobalIndexMap(64, order_queries=False))
    for counts in (call.lists.opened, call.lists.count):
        counts[:, 1, 2:4] = 0
    out, lse, visited = call.by(gather_attention_triton)
    want, want_lse, want_visited = call.by(gather_attention_reference)
    assert torch.equal(visited, want_visited)
    assert bool((visited[:, 1, 2:4] == 0).all())
    assert bool((out[:, 1, 32:64] == 0).all())
    assert bool((lse[:, 1, 32:64] == float("-inf")).all())
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"dtype": torch.float16, "q_block": 64, "D": 64, "Dv": 64}, True),
        ({"q_block": 64, "k_block": 32}, True),
        ({"q_block": 64, "k_block": 192}, True),
        ({"k_block": 192}, False),  # not whole tiles of 128
        ({"k_block": 16}, False),
        ({"q_block": 32}, False),
        ({"D": 96, "Dv": 96}, False),
        ({"Dv": 64}, False),
        ({"dtype": torch.float32}, False),
        ({"commit": False}, False),
    ],
    ids=repr,
)
def test_what_the_kernel_for_hopper_takes(changed: dict[str, Any], fits: bool) -> None:
    call: dict[str, Any] = {"dtype": torch.bfloat16, "D": 128, "Dv": 128, "q_block": 128, "k_block": 128}
    call |= {"commit": True, **changed}
    q, v = (torch.empty(1, 1, 1, call[D], dtype=call["dtype"]) for D in ("D", "Dv"))
    assert fits_hopper(q, v, call["q_block"], call["k_block"], call["commit"]) is fits


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("q_block", "k_block"), [(64, 32), (64, 64), (64, 192), (128, 32), (128, 64), (128, 512)])
def test_tiles_for_hopper_fit(q_block: int, k_block: int, D: int) -> None:
    """The loader works a tile ahead, so there are two stages at least."""
    tiles = tile_options(q_block, k_block, D)
    keys = tiles["BLOCK_N"] * tiles["STAGES"]
    assert tiles["STAGES"] >= 2
    assert tiles["BLOCK_N"] * tiles["K_SPLIT"] == k_block
    assert q_block * D * 2 + keys * (4 * D + 4) <= (227 if q_block == 128 else 113) * 1024


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [
    {"tau": 0.0}, {"tau": 0.3}, {"tau": 0.3, "patience": 2}, {"tau": 0.3, "mean": True},
], ids=repr)  # fmt: skip
@pytest.mark.parametrize(
    ("N", "M", "D", "block", "k_block", "causal", "permuter"),
    [
        (1000, 1000, 128, 128, 128, True, GlobalIndexMap(256)),
        (1000, 300, 64, 128, 64, True, GlobalIndexMap(256)),
        (700, 700, 128, 64, 64, True, GlobalIndexMap(128, per_query_head=False)),
        (1000, 300, 64, 64, 64, True, GlobalIndexMap(128, near=200)),
        (900, 900, 128, 64, 256, True, bs.SegmentKeySort(256)),
        (600, 600, 64, 128, 32, True, bs.Identity()),
        (500, 777, 128, 128, 256, False, bs.Identity()),
        (5, 5, 64, 64, 64, True, GlobalIndexMap(128)),
    ],
)
def test_hopper(
    N: int, M: int, D: int, block: int, k_block: int, causal: bool, permuter: bs.Permuter[Any], rule: dict[str, Any],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    q, k, v = make_qkv(B=2, N=N, M=M, Hq=4, Hkv=2, D=D, dtype=dtype, device="cuda")
    near = getattr(permuter, "near", 0)
    call = arguments(q, k, v, permuter=permuter, block=block, k_block=k_block, causal=causal, band=near, **rule)
    assert fits_hopper(q, v, block, k_block, True)
    left = assert_right(call, gather_attention_hopper)
    assert rule["tau"] > 0 or not left.any()
    want = call.by(gather_attention_hopper)
    for _ in range(3):
        assert all(map(torch.equal, call.by(gather_attention_hopper), want))  # a difference would be a race


@needs_hopper
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_hopper_takes_any_scale(scale: float) -> None:
    q, k, v = make_qkv(N=500, D=64, dtype=torch.float16, device="cuda")
    call = arguments(q, k, v, permuter=GlobalIndexMap(256), block=128)
    assert_right(evolve(call, scale=scale), gather_attention_hopper)


@needs_hopper
def test_hopper_reads_no_empty_slot() -> None:
    """What lies at key 0 must not meet a slot that holds none: nothing times infinity is not nothing."""
    q, k, v = make_qkv(N=300, D=64, dtype=torch.bfloat16, device="cuda")
    call = arguments(q, k, v, permuter=bs.Identity(), block=128, causal=False, keep=1.1, tau=0.0)
    k_position = call.positions.k_position.clone()
    k_position[..., 0] = -1  # key 0 stands nowhere
    k[:, :, 0], v[:, :, 0] = float("nan"), float("inf")
    call = evolve(call, positions=evolve(call.positions, k_position=k_position))
    out, lse, _ = call.by(gather_attention_hopper)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.skipif(not GPU, reason="the limits of the kernel are a GPU's")
def test_wide_query_blocks_are_refused(device: str) -> None:
    q, k, v = make_qkv(N=600, D=32, device=device)
    with pytest.raises(ValueError, match=r"query blocks must be at most 128, not 256: choose smaller ones"):
        s2o(S=256, block=256)(q, k, v)
