"""The kernel against float64 under the budget: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.launched import BlockPlan
from blocksparse.testing import assert_within_budget, make_qkv
from tests import meaning
from tests.cases import slow
from tests.kernels.attention.references import approximate_attention_reference, sparse_attention_reference
from tests.machine import DTYPES, GPU, needs_hopper, python
from tests.on_kernels import pretend_gpu
from tests.specs import asked, grid_of
from tests.stages import random_keys

pytest.importorskip("triton")
from blocksparse.execute import triton as executor_module
from blocksparse.kernels.attention import sparse_attention as op
from blocksparse.kernels.attention.sparse_attention import UNCHANGED, sparse_attention
from blocksparse.kernels.attention.sparse_attention_triton import runs_interpreted
from blocksparse.kernels.common.hardware import INTERPRETER, hardware_of
from blocksparse.kernels.common.tiles import MOST_SOFTCAP, HopperTiles, Tiles, TritonTiles, portable, tuned
from blocksparse.kernels.hopper import split_kv
from blocksparse.kernels.hopper.launch import copy_back, whole_rows
from blocksparse.kernels.hopper.tile_scheduler import positive
from blocksparse.kernels.layout.gather import gather_two
from blocksparse.kernels.masks.arguments import Approximation, LogitChange
from blocksparse.kernels.masks.grid import TokenPositions

# The interpreter is slow.
LENGTHS = [1, 63, 65, 127, 129, 200, *([1000, 4096] if GPU else [])]


@frozen(eq=False)
class Call:
    """What the kernel takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    lists: BlockPlan
    positions: TokenPositions
    tiles: Tiles
    scale: float
    change: LogitChange = UNCHANGED

    def __call__(self, **changed: Any) -> tuple[Tensor, Tensor]:
        """Run the kernel with other options, or with other fields, for this once."""
        mine = {name: changed.pop(name) for name in list(changed) if name in attrs.fields_dict(Call)}
        if mine:
            return evolve(self, **mine)(**changed)
        given = self.q, self.k, self.v, self.lists, self.positions, self.tiles
        return sparse_attention(*given, scale=self.scale, change=self.change, **changed)

    def exactly(self) -> tuple[Tensor, Tensor]:
        """The specification in the dtype of the inputs."""
        return sparse_attention_reference(
            self.q, self.k, self.v, self.lists, self.positions, scale=self.scale, change=self.change
        )

    def approximately(self, approximation: Approximation, *, tile: int) -> tuple[Tensor, Tensor]:
        """The specification where tiles of so many keys leave out what the approximation says."""
        return approximate_attention_reference(
            self.q, self.k, self.v, self.lists, self.positions, tile, scale=self.scale,
            approximation=approximation, change=self.change,
        )  # fmt: skip

    def in_float64(self) -> Call:
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        return evolve(self, q=q, k=k, v=v)

    def on_cpu(self) -> Call:
        def moved(x: Any) -> Any:
            entries = {each.name: getattr(x, each.name) for each in attrs.fields(type(x))}
            return evolve(x, **{name: y.cpu() if isinstance(y, Tensor) else y for name, y in entries.items()})

        q, k, v = self.q.cpu(), self.k.cpu(), self.v.cpu()
        own = {name: moved(getattr(self, name)) for name in ("lists", "positions", "change")}
        return evolve(self, q=q, k=k, v=v, **own)


IN_PLACE = bs.GlobalPermutation()


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    causal: bool = True,
    keep: float = 0.5,
    tiles: Tiles | None = None,
    permutation: bs.GlobalPermutation = IN_PLACE,
) -> Call:
    """What the kernel takes, for a random mask."""
    k, v = permutation.gather_keys(k), permutation.gather_keys(v)
    grid = grid_of(q, k, block, permutation=permutation, causal=causal)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(q.shape[0], q.shape[1], grid.rows, grid.cols, generator=generator).to(q.device) < keep
    plan = BlockPlan.of(bs.BlockMask((chosen | grid.diagonal) & grid.visible, grid))
    tiles = tiles or portable(block, block, q.shape[-1], q.element_size(), hardware_of(q))
    return Call(q, k, v, plan, grid.positions, tiles, q.shape[-1] ** -0.5)


@contextlib.contextmanager
def multiplied_by_numpy() -> Iterator[None]:
    """As in Triton's interpreter: on some CPUs, the library behind NumPy sums less exactly than the one behind torch."""

    by_torch = torch.bmm

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype == torch.bfloat16:  # NumPy has no such numbers, and the interpreter refuses them
            return by_torch(a, b)
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", bmm)
        yield


def assert_same_bits(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert all(map(torch.equal, got, want))


def assert_right(call: Call) -> None:
    """The tiles asked for, and those that a pipeline would take here."""
    want, want_lse = call.in_float64().exactly()
    # On the CPU, also for a GPU: sums in another order err by as much.
    with multiplied_by_numpy():
        yardstick = call.on_cpu().exactly()[0].to(want.device)
    plain = (call.change.softcap or 0) <= MOST_SOFTCAP
    for tiles in (call.tiles, tuned(call.q, call.k, call.v, call.lists.q_block, call.lists.k_block, plain=plain)):
        out, lse = call(tiles=tiles)
        assert_within_budget(out, want, yardstick)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3 if call.q.dtype != torch.float32 else 1e-5)


CHUNKS = [
    *({"M": M, "D": 32} for M in (1, 31, 64, 100, 129)),
    *({"M": 70, "D": D, "Dv": Dv} for D, Dv in ((64, 32), (48, 128), (16, 8), (5, 3))),
]
TILES = [(64, 16, 32), (64, 64, 16), (96, 32, 32), (48, 16, 16)]  # smaller than blocks


@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        *(({"N": N, "dtype": dtype}, {"block": 64}) for N in LENGTHS for dtype in DTYPES),
        *((sizes, {"causal": causal}) for sizes in CHUNKS for causal in (True, False)),
        # The running maximum keeps exponents in range, whatever the order in which blocks come.
        ({"N": 200, "D": 64}, {"size": 100}),
        *slow(*(({"D": D, "dtype": dtype}, {"block": 64}) for D in (64, 80, 96, 128, 256) for dtype in DTYPES)),
        *slow(*(({"B": 2, "Hq": 2 * group, "Hkv": 2, "N": 90, "D": 32}, {"causal": causal})
                for group in (1, 3, 4, 7) for causal in (True, False))),
        *slow(*(({"N": 200, "M": 150, "D": 32}, {"block": block, "tiles": TritonTiles(m, n, 4, 2)})
                for block, m, n in TILES)),
        *slow(*(({"N": 150, "D": 32}, {"order_heads": heads}) for heads in (1, 2))),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_blocks_and_orders(sizes: dict[str, Any], asked: dict[str, Any], device: str) -> None:
    q, k, v = make_qkv(**{"N": 129, "Hq": 2, "Hkv": 1, **sizes}, device=device)
    asked = {"block": 32, **asked}
    q = q * asked.pop("size", 1)
    if heads := asked.pop("order_heads", None):
        asked["permutation"] = random_keys(k, heads)
    assert_right(arguments(q, k, v, **asked))


def test_lists_of_either_type(device: str) -> None:
    """The same bits, also where a block's number fits int16 and that of its tile does not."""
    q, k, v = make_qkv(N=600_000, M=1, Hq=1, Hkv=1, D=16, dtype=torch.float16, device=device)
    call = arguments(q, k, v, block=64, keep=0.002, tiles=TritonTiles(64, 16, 4, 2))
    lists = call.lists
    assert lists.index.dtype == torch.int16
    assert lists.index[0, 0, 0, int(lists.full_count.item()) - 1].item() * 4 > 2**15
    assert_same_bits(call(), call(lists=evolve(lists, index=lists.index.int())))


@pytest.mark.slow
@pytest.mark.parametrize("order_heads", [2, 4])
def test_moves_keys_a_few_heads_at_a_time(order_heads: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go or head by head, the same bits, and the same as keys that were moved beforehand; sinks stay with heads."""
    q, k, v = make_qkv(B=2, N=150, Hq=4, Hkv=2, D=32, device=device)
    permutation = random_keys(k, order_heads)
    assert permutation.k_index is not None
    moved = evolve(arguments(q, k, v, block=32, permutation=permutation), change=a_change(4, device))
    want = moved()
    for bytes_at_a_time in (2**28, 1):
        monkeypatch.setattr(op, "_WORKSPACE", bytes_at_a_time)
        assert_same_bits(moved(k=k, v=v, key_slots=permutation.k_index[:, :, 0]), want)


@pytest.mark.parametrize("one_head", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order_heads", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_chunk_moves_what_it_visits(
    one_head: bool, order_heads: int, shared: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as where all keys are moved, also in a row that keeps nothing; others stay NaN in the memory."""
    dtype, factor = (torch.float16, 4) if GPU else (torch.float32, 1)  # on Hopper for its own kernel
    M, N, block = 33 * factor, 250 * factor, 16 * factor
    q, k, v = make_qkv(B=2, M=M, N=N, Hq=4, Hkv=2, D=16 * factor, dtype=dtype, device=device)
    permutation = random_keys(k, order_heads)
    grid = grid_of(q, k, block, permutation=permutation)
    keep = torch.rand(2, 4, grid.rows, grid.cols, generator=torch.Generator().manual_seed(0)).to(device) < 0.1
    keep[..., 0] = False
    keep[:, :, -1] = False
    mask = bs.BlockMask(keep & grid.visible, grid)
    mask = mask.share_heads() if shared else mask
    gathered: list[Tensor] = []

    def noted(*args: Any, **wanted: Any) -> tuple[Tensor, Tensor]:
        gathered.extend(gather_two(*args, **wanted))
        return gathered[-2], gathered[-1]

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(op, "gather_two", noted)
    if one_head:
        monkeypatch.setattr(op, "_WORKSPACE", 1)
    output = bs.TritonExecutor()(q, k, v, mask, asked(mask, 0.1))
    assert len(gathered) == (4 if one_head else 2)
    assert all(0.1 < x.isnan().float().mean() < 0.9 for x in gathered)
    monkeypatch.setattr(executor_module, "visited_columns", lambda keep, heads: None)
    want = bs.TritonExecutor()(q, k, v, mask, asked(mask, 0.1))
    assert not gathered[-1].isnan().any()
    meaning.assert_same_bits(output, want)
    assert not output.out[:, :, -(N % block) :].any()


def a_change(heads: int, device: str, *, softcap: float | None = 2.0, sinks: bool = True) -> LogitChange:
    return LogitChange(softcap, torch.linspace(-3, 5, heads, device=device) if sinks else None)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of squares that overflow and are not taken
@pytest.mark.parametrize("softcap", [1e-30, 0.3, 30.0, 1e30])
def test_softcaps_of_any_size(softcap: float, device: str) -> None:
    """A tiny cap makes all logits alike, a huge one changes nothing."""
    q, k, v = make_qkv(N=70, Hq=2, Hkv=1, D=16, device=device)
    call = arguments(q, k, v, block=32)
    assert_right(evolve(call, change=LogitChange(softcap)))
    tiny = call(change=LogitChange(1e-45))[0]  # smaller than its own inverse can be in fp32
    torch.testing.assert_close(tiny, evolve(call, scale=0.0)()[0])


def test_a_sink_that_weighs_nothing_changes_no_bit(device: str) -> None:
    q, k, v = make_qkv(N=70, Hq=2, Hkv=1, D=16, device=device)
    call = arguments(q, k, v, block=32)
    none = LogitChange(None, torch.full((2,), -1e30, device=device))
    assert_same_bits(call(change=none), call())


@pytest.mark.slow
def test_pv_skip_of_capped_logits(device: str) -> None:
    """What a query leaves out follows from its capped logits, and a sink is none of those that it met."""
    q, k, v = make_qkv(N=150, Hq=2, Hkv=1, D=32, device=device)
    call = arguments(6 * q, k, v, block=32, keep=0.8, tiles=TritonTiles(32, 32, 4, 2))
    call = evolve(call, change=LogitChange(6.0, torch.tensor([1.0, 30.0], device=device)))
    skip = Approximation(torch.full((2,), -1.5, device=device))
    want = call.in_float64().approximately(skip, tile=32)
    got, exact = call(approximation=skip), call()
    for a, b, c in zip(got, want, exact, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=2e-5)
        assert not torch.equal(a[:, 0], c[:, 0])


def test_hopper_takes_no_softcap_of_any_size(device: str) -> None:
    """Its tanh rounds a logit, for nothing where the cap is huge: the executor then takes the other kernel."""
    q, k, v = make_qkv(N=70, D=16, dtype=torch.float16, device=device)
    front = bs.Identity(), bs.MeanPoolScorer(64), bs.TopK(2)
    executor = bs.TritonExecutor(HopperTiles(1, 64, 2))
    with pytest.raises(ValueError, match="takes softcaps up to 100, but TritonTiles take any"):
        bs.Pipeline(*front, executor)(q, k, v, softcap=2000.0)
    assert isinstance(tuned(q, k, v, 64, 64, plain=False), TritonTiles)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_stay_in_their_rows(value: float, changed: bool, device: str) -> None:
    q, k, v = make_qkv(N=100, Hq=2, Hkv=1, D=32, device=device)
    change = a_change(2, device) if changed else UNCHANGED
    clean = arguments(q, k, v, block=32)(change=change)[0]
    q[:, :, 40] = value
    out = arguments(q, k, v, block=32)(change=change)[0]
    others = [i for i in range(100) if i != 40]
    assert torch.equal(out[:, :, others], clean[:, :, others])


def falling(N: int, D: int, device: str, *, gap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits by hand (scale times product): 0 for the first 32 keys, then `gap`."""
    q = torch.zeros(1, 1, N, D, device=device)
    q[..., 0] = math.sqrt(D)
    k = torch.zeros(1, 1, N, D, device=device)
    k[:, :, 32:, 0] = gap
    v = torch.ones(1, 1, N, D, device=device)
    v[:, :, 32:] = -1.0
    return q, k, v


def left_out_by_hand(call: Call, pv_skip: list[float], tile: int) -> Tensor:
    """Which pairs the rule leaves out, one tile after the other; B = 1, and keys in place."""
    q, k, lists, lead = call.q, call.k, call.lists, call.positions.q_lead
    count, index, block = lists.full_count, lists.index, lists.q_block
    Hq, M, N = q.shape[1], q.shape[2], k.shape[2]
    out = torch.zeros(1, Hq, M, N, dtype=torch.bool, device=q.device)
    for h in range(Hq):
        logits = (q[0, h].double() @ k[0, h * k.shape[1] // Hq].double().T * call.scale).tolist()
        for i in range(M):
            row, met = (lead + i) // block, -math.inf
            for turn in range(int(count[0, h, row])):
                first = int(index[0, h, row, turn]) * block
                for start in range(first, first + block, tile):
                    best = max(logits[i][start : start + tile])
                    if best - met < pv_skip[h]:
                        out[0, h, i, start : start + tile] = True
                    met = max(met, best)
    return out


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("M", "block", "tile"),
    [(129, 32, 16), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((200, 32, 32), (100, 64, 16)))],
)
def test_pv_skip_leaves_out_what_the_rule_says(M: int, block: int, tile: int, causal: bool, device: str) -> None:
    """Kernel and reference against a walk by hand, one number for each head; and the bounds of docs/reference/numerics.md."""
    q, k, v = make_qkv(N=200, M=M, Hq=2, Hkv=1, D=32, device=device)
    pv_skip = [-2.0, -4.0]
    call = arguments(3 * q, k, v, block=block, causal=causal, keep=0.8, tiles=TritonTiles(tile, tile, 4, 2))
    gone = left_out_by_hand(call, pv_skip, tile)
    assert gone.any((-1, -2)).all()
    skip = torch.tensor(pv_skip, device=device)
    out, lse = call(approximation=Approximation(skip))
    wide = call.in_float64()
    kept, kept_lse = wide.approximately(Approximation(skip), tile=tile)
    torch.testing.assert_close(out, kept.float(), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse, kept_lse, rtol=1e-4, atol=2e-5)

    exact, exact_lse = wide.exactly()
    mass = gone.sum(-1) * skip.double().exp()[:, None]  # [B, Hq, M], m e^lambda
    lost = 1 - (kept_lse - exact_lse).double().exp()
    logits = wide.q @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * call.scale
    share = (logits - exact_lse.unsqueeze(-1)).exp().masked_fill(~gone, 0.0).sum(-1)
    torch.testing.assert_close(lost, share, rtol=1e-4, atol=1e-5)
    assert (lost <= mass / (1 + mass) + 1e-6).all()
    assert (exact_lse - kept_lse <= mass.log1p() + 1e-6).all()
    spread = v.amax(2) - v.amin(2)
    assert ((out - exact).abs() <= (mass / (1 + mass)).unsqueeze(-1) * spread.unsqueeze(-2) + 2e-5).all()


def test_pv_skip_saves_the_product(device: str) -> None:
    """Values that all queries leave out are never multiplied: not even NaN gets through."""
    q, k, v = falling(129, 16, device, gap=-20.0)
    skip = Approximation(torch.tensor([-10.0], device=device))
    clean = arguments(q, k, v, block=32, keep=1.0)(approximation=skip)[0]
    v[:, :, 32:64] = float("nan")
    call = arguments(q, k, v, block=32, keep=1.0)
    skipped = call(approximation=skip)[0]
    assert torch.equal(skipped[:, :, 64:], clean[:, :, 64:])
    assert call()[0][:, :, 64:].isnan().all()


@pytest.mark.slow
def test_pv_skip_of_the_executor(device: str) -> None:
    q, k, v = make_qkv(N=300, Hq=2, Hkv=1, D=32, device=device)
    front = bs.Identity(), bs.MeanPoolScorer(32), bs.TopCdf(0.95)
    by_head = bs.Pipeline(*front, bs.TritonExecutor(pv_skip=[-1.0, -50.0]))(4 * q, k, v)
    exact = bs.Pipeline(*front, bs.TritonExecutor())(4 * q, k, v)
    assert torch.equal(by_head[:, 1], exact[:, 1])
    assert not torch.equal(by_head[:, 0], exact[:, 0])
    one = bs.Pipeline(*front, bs.TritonExecutor(pv_skip=-1.0))(4 * q, k, v)
    assert torch.equal(one[:, 0], by_head[:, 0])


def test_pv_skip_is_checked(device: str) -> None:
    executor = bs.TritonExecutor(pv_skip=[-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match="'pv_skip' has 3 entries for 4 query heads"):
        bs.pbs_attn(executor=executor)(*make_qkv(D=16, device=device))


def test_config_is_refused_or_used(device: str) -> None:
    q, k, v = make_qkv(N=70, D=16, device=device)
    front = bs.Identity(), bs.MeanPoolScorer(32), bs.TopK(2)
    with pytest.raises(ValueError, match=r"block_m=64.* does not divide blocks of 32 x 32"):
        bs.Pipeline(*front, bs.TritonExecutor(TritonTiles(64, 32, 4, 2)))(q, k, v)
    bs.Pipeline(*front, bs.TritonExecutor(TritonTiles(16, 32, 4, 2)))(q, k, v)


HOPPER_TILES = [HopperTiles(*x) for x in ((2, 128, 2), (1, 64, 2, 2), (1, 128, 2), (2, 64, 3), (2, 64, 2))]


@contextlib.contextmanager
def cut_lists() -> Iterator[None]:
    """Lists of more than two blocks are split, whatever the sizes of a call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "_KEYS", 0)
        patch.setattr(split_kv, "_KEYS_PER_ROW", 0)
        patch.setattr(split_kv, "_SHORTEST", 256)
        split_kv._sizes.cache_clear()
        yield
    split_kv._sizes.cache_clear()


def assert_hopper_right(call: Call, *, cut: bool = True) -> None:
    """Within the budget, with lists cut or not; the same bits again, and by positions instead of in order."""
    want, want_lse = call.in_float64().exactly()
    yardstick, _ = call.exactly()
    outputs = [call()]
    if cut:
        with cut_lists():
            outputs.append(call())
    for out, lse in outputs:
        assert_within_budget(out, want, yardstick)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert torch.equal(call()[0], outputs[0][0])  # a tile is computed in one order: a difference would be a race
    by_position = evolve(call.positions, q_in_order=False, k_in_order=False)
    assert torch.equal(call(positions=by_position)[0], outputs[0][0])


@needs_hopper
@pytest.mark.parametrize("tiles", HOPPER_TILES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("N", "M", "D", "Dv", "q_block", "k_block", "causal", "ordered", "shared", "nothing"),
    [
        (1024, 1024, 128, 128, 128, 128, True, True, False, False),
        (1000, 1000, 128, 128, 128, 128, True, False, False, False),
        (1000, 333, 128, 128, 128, 128, True, False, True, False),
        (1000, 700, 64, 64, 128, 64, True, True, False, True),
        (1111, 1111, 96, 96, 128, 32, True, False, False, True),
        (900, 1000, 80, 48, 256, 128, False, False, False, False),
        (2000, 2000, 40, 128, 128, 256, True, True, True, False),
        (777, 500, 64, 64, 128, 16, False, True, False, True),
        (1, 1, 8, 8, 128, 128, True, True, False, False),
        (1000, 700, 256, 256, 128, 64, True, True, False, True),
        (1000, 333, 256, 256, 128, 128, True, False, True, False),
        (777, 500, 240, 200, 128, 16, False, True, False, True),
        (1000, 1000, 192, 128, 128, 128, True, True, False, False),
        (900, 1000, 136, 72, 256, 128, False, False, False, True),
    ],
)
def test_hopper(
    tiles: HopperTiles, dtype: torch.dtype, N: int, M: int, D: int, Dv: int, q_block: int, k_block: int,
    causal: bool, ordered: bool, shared: bool, nothing: bool,
) -> None:  # fmt: skip
    """Every way into the kernel: tails, chunks, orders, masks per KV head, rows with nothing kept."""
    q, k, v = make_qkv(B=2, N=N, M=M, Hq=4, Hkv=2, D=D, Dv=Dv, dtype=dtype, device="cuda")
    permutation = IN_PLACE if ordered else random_keys(k, segment=256)  # causal blocks stay visible
    k, v = permutation.gather_keys(k), permutation.gather_keys(v)
    grid = grid_of(q, k, q_block, k_block, permutation=permutation, causal=causal)
    keep = (torch.rand(2, 4, grid.rows, grid.cols, device="cuda") < 0.3) & grid.visible
    if not nothing:
        keep = keep | grid.diagonal
    mask = bs.BlockMask(keep, grid)
    plan = BlockPlan.of(mask.share_heads() if shared else mask)
    call = Call(q, k, v, plan, grid.positions, tiles, 0.1)
    if reasons := tiles.unsupported(q, k, v, q_block, k_block):
        pytest.skip(str(reasons))
    assert_hopper_right(call, cut=dtype == torch.bfloat16)
    longer_lists, _ = call(lists=evolve(plan, index=plan.index.int()))
    assert torch.equal(longer_lists, call()[0])


@needs_hopper
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [
        (200, None, False),
        (1, None, True),
        (64, 20.0, True),
        (None, 3.0, False),
        (300, 50.0, False),
        (None, None, True),
    ],
)
@pytest.mark.parametrize(
    ("tiles", "N", "M", "D", "q_block", "k_block", "ordered"),
    [
        (HopperTiles(2, 128, 4), 1000, 1000, 64, 128, 128, True),
        (HopperTiles(2, 128, 2), 1000, 700, 128, 128, 64, True),
        (HopperTiles(2, 128, 2), 1000, 1000, 128, 128, 128, False),
        (HopperTiles(2, 64, 2), 900, 333, 256, 128, 128, True),
        (HopperTiles(1, 64, 2, 2), 777, 500, 96, 64, 32, False),
        (HopperTiles(1, 128, 2, 2), 1024, 1024, 64, 64, 64, True),
    ],
)
def test_hopper_windows_softcaps_and_sinks(
    tiles: HopperTiles, N: int, M: int, D: int, q_block: int, k_block: int, ordered: bool,
    window: int | None, softcap: float | None, sinks: bool,
) -> None:  # fmt: skip
    """Rows whose first keys are all hidden, rows without any key, and lists that are cut."""
    q, k, v = make_qkv(B=2, N=N, M=M, Hq=4, Hkv=2, D=D, dtype=torch.bfloat16, device="cuda")
    permutation = IN_PLACE if ordered else random_keys(k, segment=256)
    k, v = permutation.gather_keys(k), permutation.gather_keys(v)
    grid = grid_of(q, k, q_block, k_block, permutation=permutation, window=window)
    keep = (torch.rand(2, 4, grid.rows, grid.cols, device="cuda") < 0.6) & grid.visible
    plan = BlockPlan.of(bs.BlockMask(keep, grid))
    change = a_change(4, "cuda", softcap=softcap, sinks=sinks)
    call = Call(4 * q, k, v, plan, grid.positions, tiles, 0.1, change)
    assert_hopper_right(call)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rise", [-100.0, 7.9, 13.9, 14.1, 39.9, 40.1, 100.0, 1e4])
@pytest.mark.parametrize(
    ("D", "tiles"),
    [
        (64, HopperTiles(2, 128, 4)),
        (128, HopperTiles(2, 128, 2)),
        (256, HopperTiles(2, 64, 2)),
        (128, HopperTiles(1, 64, 2, 2)),
    ],
)
def test_logits_that_rise(D: int, tiles: HopperTiles, rise: float, dtype: torch.dtype) -> None:
    """Logits of a block are `rise` above those of the next one in the sequence, which is visited before it, in base 2.

    A row raises what its weights are relative to where they come to more than 2^14 in fp16, and 2^40 in bf16.
    """
    block = 64 * tiles.consumers
    q, k, v = make_qkv(N=700, D=D, dtype=dtype, device="cuda")
    q, k, v = q / 4, k / 4, 1e4 * v.clamp(-1, 1)
    q[..., 0] = rise * (torch.arange(700, device="cuda") % 3 > 0)  # some rows of a warp have nothing to raise
    k[..., 0] = -(torch.arange(700, device="cuda") // block).to(dtype)
    sinks = torch.tensor([-1e4, 0.0, 30.0, 1e5], device="cuda")[: q.shape[1]]
    plain = evolve(arguments(q, k, v, block=block, tiles=tiles), scale=math.log(2))
    for call in (plain, evolve(plain, change=LogitChange(sinks=sinks))):
        want, want_lse = call.in_float64().exactly()
        with cut_lists():
            cut = call()
        for out, lse in (call(), cut):
            # Plain torch rounds logits of 1e4 by up to 32 in bfloat16, and is no yardstick.
            error = (out.double() - want).norm() / want.norm()
            assert error < (4e-3 if dtype == torch.bfloat16 else 1e-3)
            torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
        assert torch.equal(call()[0], call()[0])


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("value", "softcap"), [(100.0, None), (100.0, 30.0), (math.inf, None), (-math.inf, None), (math.nan, None)]
)
@pytest.mark.parametrize(("D", "tiles"), [(64, HopperTiles(2, 128, 4)), (128, HopperTiles(1, 64, 2, 2))])
def test_no_row_depends_on_its_neighbours(
    D: int, tiles: HopperTiles, value: float, dtype: torch.dtype, softcap: float | None
) -> None:
    """What a row's weights are relative to is raised by its own logits, whatever its warp does for other rows.

    Under a softcap, to share a division among logits, or to choose a formula by their greatest, would move bits.
    """
    q, k, v = make_qkv(N=700, D=D, dtype=dtype, device="cuda")
    call = arguments(3 * q, k, v, block=64 * tiles.consumers, tiles=tiles)
    if softcap is not None:
        call = evolve(call, change=a_change(q.shape[1], "cuda", softcap=softcap))
    great = call.q.clone()
    great[:, :, 7::16] *= value
    same = torch.arange(700, device="cuda") % 16 != 7
    for got, other in zip(call(), call(q=great), strict=True):
        assert torch.equal(got[:, :, same], other[:, :, same])
        assert not torch.equal(got[:, :, ~same], other[:, :, ~same])


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
@pytest.mark.parametrize("sign", [-1, 1])
def test_capped_logits_all_at_one_end(sign: int, size: float, dtype: torch.dtype) -> None:
    """Where rows have no maximum of their own, all weights are e^50, or e^-50."""
    q, k, v = make_qkv(N=500, D=64, dtype=dtype, device="cuda")
    q, k, v = 4 * q.abs(), 4 * sign * k.abs(), size * v
    change = LogitChange(50.0, torch.tensor([-60.0, -49.0, 30.0, 60.0], device="cuda")[: q.shape[1]])
    call = evolve(arguments(q, k, v, block=128, tiles=HopperTiles(2, 128, 4)), change=change)
    assert_hopper_right(call)


@needs_hopper
def test_hopper_weighs_large_logits() -> None:
    """Some -2e5; from some 1e7 on, rounding the product of a row's maximum and the scale alone moves weights."""
    q, k, v = make_qkv(N=300, D=64, dtype=torch.bfloat16, device="cuda")
    q, k = -q.abs() - 1, k.abs() + 1
    call = evolve(arguments(q, k, v, block=128, tiles=HopperTiles(2, 128, 4)), scale=1e3)
    assert_hopper_right(call, cut=False)


@needs_hopper
@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize(("D", "Dv"), [(256, 256), (192, 128), (160, 192)])
def test_hopper_takes_wide_heads_by_default(D: int, Dv: int, block: int) -> None:
    """The executor as it is: a chunk of queries, permuted keys, tails, and rows of few blocks."""
    q, k, v = make_qkv(N=1500, M=1100, Hq=4, Hkv=2, D=D, Dv=Dv, dtype=torch.bfloat16, device="cuda")
    assert isinstance(tuned(q, k, v, block, block), HopperTiles)
    front = bs.SegmentKeySort(S=256), bs.MeanPoolScorer(block), bs.TopK(1)
    trace = bs.Pipeline(*front, bs.TritonExecutor()).trace(q, k, v)
    exact, yardstick = (
        bs.ReferenceExecutor()(
            q.to(dtype), k.to(dtype), v.to(dtype), trace.mask, asked(trace.mask, trace.spec.scale)
        ).out
        for dtype in (torch.float64, q.dtype)
    )
    assert_within_budget(trace.output.out, exact, yardstick)


@needs_hopper
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_hopper_takes_any_scale(scale: float) -> None:
    q, k, v = make_qkv(N=500, D=64, dtype=torch.float16, device="cuda")
    call = evolve(arguments(q, k, v, block=128, tiles=HopperTiles(2, 128, 2)), scale=scale)
    assert_hopper_right(call, cut=False)


@needs_hopper
def test_hopper_reads_what_hosts_hand_over() -> None:
    """Heads behind tokens in memory, and the output lies as the queries do."""
    q, k, v = make_qkv(N=500, D=64, dtype=torch.bfloat16, device="cuda")
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    want, out = (arguments(*x, block=128, tiles=HopperTiles(2, 128, 2))()[0] for x in ((q, k, v), apart))
    assert torch.equal(out, want)
    assert out.stride() == apart[0].stride()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_a_scale_above_zero_gives_the_same_logits(scale: float) -> None:
    q, k, _ = make_qkv(N=20, D=16)
    queries, factor = positive(q, scale)
    assert factor > 0
    assert torch.equal(queries @ k[:, :1].mT * factor, q @ k[:, :1].mT * scale)


def test_hopper_says_what_it_cannot(device: str) -> None:
    q, k, v = make_qkv(N=70, D=20, device=device)
    front = bs.Identity(), bs.MeanPoolScorer(48), bs.TopK(2)
    message = r"takes float16 and bfloat16, not torch.float32.*multiples of 8 up to 256"
    with pytest.raises(ValueError, match=message):
        bs.Pipeline(*front, bs.TritonExecutor(HopperTiles(2, 128, 2)))(q, k, v)
    with pytest.raises(ValueError, match="cannot be combined with 'pv_skip'"):
        bs.Pipeline(*front, bs.TritonExecutor(HopperTiles(2, 128, 2), pv_skip=-3.0))(q, k, v)
    with pytest.raises(ValueError, match=r"does not divide blocks of 48 x 48"):
        bs.Pipeline(*front, bs.TritonExecutor(HopperTiles(2, 128, 2)))(q, k, v)
    wide = make_qkv(N=70, D=128, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"num_stages=4.* needs 306 KiB of shared memory, and there are 228"):
        bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(128), bs.TopK(2), bs.TritonExecutor(HopperTiles(2, 128, 4)))(
            *wide
        )
    with pytest.raises(ValueError, match="'consumers' must be 1 or 2: "):
        HopperTiles(3, 128, 2)


@pytest.mark.parametrize(
    ("tiles", "D", "Dv", "q_buffers", "out_parts"),
    [
        (HopperTiles(2, 128, 4), 64, 64, 2, 1),
        (HopperTiles(2, 128, 2), 128, 128, 2, 1),
        (HopperTiles(2, 128, 2), 192, 128, 1, 2),
        (HopperTiles(2, 64, 2), 192, 128, 2, 1),
        (HopperTiles(2, 64, 2), 256, 256, 1, 2),
        (HopperTiles(1, 64, 2), 256, 256, 2, 1),
        (HopperTiles(1, 64, 1, 2), 192, 128, 2, 1),
        (HopperTiles(2, 128, 6), 64, 64, 1, 1),  # half of 64 columns would be less than a bulk copy takes
    ],
    ids=repr,
)
def test_hopper_has_the_best_buffers_that_fit(
    tiles: HopperTiles, D: int, Dv: int, q_buffers: int, out_parts: int
) -> None:
    assert tiles.buffers(D, Dv) == {"Q_BUFFERS": q_buffers, "OUT_PARTS": out_parts}
    assert tiles.too_large(D, Dv) == []


@pytest.mark.parametrize(
    ("D", "Dv", "q_block", "want"),
    [
        (64, 64, 128, HopperTiles(2, 128, 4)),
        (40, 128, 128, HopperTiles(2, 128, 2)),
        (128, 128, 64, HopperTiles(1, 64, 2, 2)),
        (192, 128, 128, HopperTiles(2, 128, 2)),
        (136, 72, 64, HopperTiles(1, 64, 1, 2)),
        (192, 192, 128, HopperTiles(2, 64, 2)),
        (256, 64, 256, HopperTiles(2, 64, 2)),
        (256, 256, 64, HopperTiles(1, 64, 2)),
        (100, 100, 128, portable(128, 128, 100, 2, INTERPRETER)),  # no multiple of 8
    ],
)
def test_tiles_for_hopper_follow_head_dims_and_blocks(
    D: int, Dv: int, q_block: int, want: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocksparse.kernels.common.tiles.is_hopper", lambda device: True)
    q, k, v = (torch.empty(1, 2, 1000, x, dtype=torch.bfloat16, device="meta") for x in (D, D, Dv))
    assert tuned(q, k, v, q_block, 128) == want


@pytest.mark.skipif(GPU, reason="what the interpreter cannot do")
def test_interpreter_refuses_bfloat16() -> None:
    assert runs_interpreted()
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        bs.pbs_attn(executor=bs.TritonExecutor())(*make_qkv(dtype=torch.bfloat16))


@pytest.mark.slow
def test_plain_cpu_tensors_say_what_to_use() -> None:
    """Outside the interpreter, the line that runs on a GPU tells a CPU user all reasons and the way out."""
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "import torch\nfrom blocksparse import *\n"
        "q, k, v = torch.rand(1, 4, 64, 16), torch.rand(1, 2, 64, 16), torch.rand(1, 2, 64, 16)\n"
        "try: Pipeline(SegmentKeySort(S=256), MeanPoolScorer(), TopCdf(0.9), TritonExecutor())(q, k, v)\n"
        "except ValueError as error: print(error)"
    )
    printed = python(code).stdout
    assert "TritonExecutor cannot run q (1, 4, 64, 16) float32 on cpu" in printed
    assert "Triton compiles for GPUs, and these tensors are on cpu" in printed
    assert "Use AutoExecutor(), or CpuExecutor() on a CPU." in printed


@pytest.mark.parametrize("tokens_first", [False, True])
def test_a_chunk_that_starts_inside_a_block_is_copied_in_its_own_order(tokens_first: bool) -> None:
    """Of rows that lie as a server has them, the copies turn nothing; and what comes back is what was there."""
    q, out = torch.rand(2, 1, 3, 7, 16)
    if tokens_first:
        q, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, out))
    longer, whole, lse = whole_rows(q, out, out[..., 0], 5)
    for x in (longer, whole):
        assert (x.shape, lse.shape) == ((1, 3, 12, 16), (1, 3, 12))
        assert (x.transpose(1, 2) if tokens_first else x).is_contiguous()
    assert torch.equal(longer[:, :, 5:], q)
    assert not longer[:, :, :5].any()
    whole.copy_(longer + 1)
    copy_back((whole, lse), (out, out.new_empty(1, 3, 7)), 5)
    assert torch.equal(out, q + 1)


@pytest.mark.filterwarnings("ignore:overflow encountered in matmul")  # of numpy, in the interpreter
def test_logits_that_overflow_to_minus_infinity_have_no_weight(device: str) -> None:
    """Also where all logits of a row's first full tile do: a maximum of -inf would make NaN of them."""
    q = torch.full((1, 1, 64, 16), 1e19, device=device)
    k = q.clone()
    k[:, :, :32] *= -1.0
    k[:, :, 32:] = 1e-11
    v = torch.arange(64.0, device=device).view(1, 1, 64, 1).expand(1, 1, 64, 16).contiguous()
    spec = bs.AttentionSpec(scale=1.0, causal=False)
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(), spec, q_block=16, k_block=16)
    mask = bs.BlockMask(torch.ones(1, 1, 4, 4, dtype=torch.bool, device=device), grid)
    output = bs.TritonExecutor(TritonTiles(16, 16, 4, 1))(q, k, v, mask, spec)
    torch.testing.assert_close(output.out, torch.full_like(output.out, 47.5))
