"""Split-KV: the work list of split lists, and how their results are combined; the kernels are interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn.functional import pad

import blocksparse as bs
from blocksparse.execute.launched import BlockPlan
from blocksparse.testing import assert_within_budget, make_qkv
from tests.kernels.attention.references import sparse_attention_reference
from tests.machine import needs_hopper
from tests.specs import grid_of, not_none
from tests.stages import random_keys

pytest.importorskip("triton")
from blocksparse.kernels.attention.sparse_attention import sparse_attention
from blocksparse.kernels.common.tiles import HopperTiles, tuned
from blocksparse.kernels.hopper import split_kv as module
from blocksparse.kernels.hopper.split_kv import SplitKV, split_kv
from blocksparse.kernels.masks.arguments import LogitChange

N, M = 65768, 232  # a chunk that begins at a block; lists are split from 65536 keys on


def lists_of_any_length(
    q: Tensor, k: Tensor, order: bs.GlobalPermutation, *, q_block: int, k_block: int, causal: bool, heads: int = 1
) -> tuple[BlockPlan, bs.Grid]:
    """A mask whose rows keep nothing, few, or nearly all of their blocks; `heads` query heads share one."""
    grid = grid_of(q, k, q_block, k_block, permutation=order, causal=causal)
    generator = torch.Generator().manual_seed(1)
    density = torch.tensor([0.0, 0.01, 0.1, 0.3, 0.9])
    shape = q.shape[0], q.shape[1] // heads, grid.rows
    density = density[torch.randint(0, 5, shape, generator=generator)]
    keep = torch.rand(*shape, grid.cols, generator=generator) < density[..., None]
    keep = keep.repeat_interleave(heads, 1).to(q.device) & grid.visible
    mask = bs.BlockMask(keep, grid)
    return BlockPlan.of(mask.share_heads() if heads > 1 else mask), grid


def first_of_batch(lists: BlockPlan) -> BlockPlan:
    """One mask for all batch entries."""
    some = {name: getattr(lists, name)[:1] for name in ("full_count", "partial_count", "index")}
    return evolve(lists, **some)


def attended_by_entry(
    q: Tensor, k: Tensor, v: Tensor, lists: BlockPlan, tile: int, grid: bs.Grid, scale: float, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the attention kernel does with the work list, in float64 torch; references are rounded to fp32, as there.

    Sinks join the lists that are not split.
    """
    splits = not_none(split_kv((2, q.shape[1]), (1, N), 24, lists, tile))
    out, lse = q.new_full((2, 2, M, 24), 7.0), q.new_full((2, 2, M), 7.0)
    index = lists.index.expand(q.shape[0], -1, -1, -1)
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2] if grid.causal else k.shape[2]
    q, k, v = q.double() * scale / math.log(2), k.double(), v.double()
    for item, coords, slot in splits.work.T.tolist():
        if item < 0:  # the last entry was before this one
            assert (coords, slot) == (0, -1)
            continue
        first, full, partial = item & 0xFFFFFF, item >> 24 & 0xFFFFF, item >> 44
        b, h, h_key, row = coords >> 48, coords >> 32 & 0xFFFF, coords >> 16 & 0xFFFF, coords & 0xFFFF
        assert h_key == h // group
        of_row = index[b, h * index.shape[1] // q.shape[1], row * tile // lists.q_block]
        blocks = of_row[first : first + full + partial].long()
        query = torch.arange(row * tile, min((row + 1) * tile, q.shape[2]), device=q.device)
        key = (blocks[:, None] * lists.k_block + torch.arange(lists.k_block, device=q.device)).flatten()
        unmasked = torch.arange(len(key), device=q.device) < full * lists.k_block
        sees = unmasked | ((key <= query[:, None] + offset) & (key < k.shape[2]))
        key = key.clamp(max=k.shape[2] - 1)
        logits = (q[b, h, query] @ k[b, h_key, key].mT).masked_fill(~sees, float("-inf"))
        reference = pad(logits, (0, 1), value=torch.finfo(torch.float32).min).amax(-1).float()
        weight = (logits - reference[:, None]).exp2()
        total = weight.sum(-1)
        mean = (weight @ v[b, h_key, key] / total[:, None]).nan_to_num(0.0)
        if slot < 0:
            lse_of_keys = whole = (reference + total.log2()) * math.log(2)
            if sinks is not None:
                whole = whole.logaddexp(sinks[h].double())
            out[b, h, query] = (mean * (lse_of_keys - whole).exp().nan_to_num(0.0)[:, None]).to(out.dtype)
            lse[b, h, query] = whole.float()
        else:
            splits.out[slot, : len(query), : v.shape[3]] = mean.float()
            splits.sums[slot, :, : len(query)] = torch.stack((reference, total.float()))
    splits.combine(out, lse, sinks)
    return out, lse


def large_logits(
    size: float, queries: int, D: int, Dv: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, float]:
    """`q` `[2, 2, M, D]`, `k` `[2, 1, N, D]`, `v` `[2, 1, N, Dv]` and a scale, for logits of `size` and about 4 more or less.

    Scores are whole numbers that fp32 holds, so that a kernel may lose nothing of them. Values grow from 0 to 1 along the
    keys, so that a split with a wrong weight changes the mean.
    """
    q, k = (torch.randint(0, 2, (2, heads, n, D)) * 2.0 - 1.0 for heads, n in ((2, queries), (1, N)))
    bits = round(math.log2(size))
    q[..., 0], k[..., 0] = 2.0 ** (bits // 2), 2.0 ** (bits - bits // 2)
    q[..., 5:] = 0.0
    v = torch.linspace(0, 1, N)[:, None] * torch.rand(2, 1, 1, Dv)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return q, k, v, size / 2**bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_block", "k_block", "tile", "causal", "heads", "one_mask"),
    [(128, 128, 128, True, 1, False), (64, 64, 64, True, 2, True), (256, 128, 128, False, 1, True)],
)
def test_combined_splits_are_the_whole(
    q_block: int, k_block: int, tile: int, causal: bool, heads: int, one_mask: bool, device: str
) -> None:
    q, k, v = make_qkv(B=2, Hq=2, Hkv=1, N=N, M=M, D=8, Dv=24, dtype=torch.float32, device=device)
    lists, grid = lists_of_any_length(
        q, k, bs.GlobalPermutation(), q_block=q_block, k_block=k_block, causal=causal, heads=heads
    )
    lists = first_of_batch(lists) if one_mask else lists
    out, lse = attended_by_entry(q, k, v, lists, tile, grid, 0.2)
    in_float64 = sparse_attention_reference(q.double(), k.double(), v.double(), lists, grid.positions, scale=0.2)
    torch.testing.assert_close(out, in_float64[0].float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, in_float64[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e4, 1e5, 1e6])
def test_splits_of_large_logits_are_the_whole(size: float, device: str) -> None:
    """With a sink that weighs as much as the keys, whose product with log2(e) fp32 rounds, and without one."""
    q, k, v, scale = large_logits(size, M, 8, 24, torch.float32, device)
    lists, grid = lists_of_any_length(q, k, bs.GlobalPermutation(), q_block=128, k_block=128, causal=True)
    sinks = torch.tensor([float("-inf"), size + 12], device=device)
    out, lse = attended_by_entry(q, k, v, lists, 128, grid, scale, sinks)
    assert_exact_logits(out, lse, q, k, v, lists, grid, scale, sinks, 1e-5)


def assert_exact_logits(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, lists: BlockPlan, grid: bs.Grid, scale: float,
    sinks: Tensor, rounding: float,
) -> None:  # fmt: skip
    """Require that results of `large_logits` err by at most `rounding`, and where there is a sink by its rounding to fp32."""
    want, want_lse = sparse_attention_reference(
        q.double(), k.double(), v.double(), lists, grid.positions, scale=scale, change=LogitChange(sinks=sinks)
    )
    part = (sinks.double()[:, None] - want_lse).exp()
    assert bool(((part > 0.15) & (part < 0.85)).any())
    torch.testing.assert_close(out[:, 0].double(), want[:, 0], rtol=0, atol=rounding)
    of_sink = float(sinks[1]) * 2**-23
    torch.testing.assert_close(out[:, 1].double(), want[:, 1], rtol=0, atol=rounding + of_sink)
    torch.testing.assert_close(lse, want_lse, rtol=5e-7, atol=0)


def of_four(device: str) -> tuple[SplitKV, list[int]]:
    """Of one tile, whose blocks four splits share; and their places."""
    counts = torch.full((1, 1, 1), 128, dtype=torch.int32, device=device)
    lists = BlockPlan(counts, counts * 0, torch.zeros(1, 1, 1, 512, dtype=torch.int16, device=device), 128, 128)
    splits = not_none(split_kv((1, 1), (1, 65536), 64, lists, 128))
    slots = [slot for slot in splits.work[2].tolist() if slot >= 0]
    assert len(slots) == 4
    return splits, slots


def test_queries_that_see_no_key(device: str) -> None:
    """In some splits, or in none of them; a NaN stays in its row."""
    splits, slots = of_four(device)
    lse = torch.randn(4, 128, dtype=torch.float64, device=device)
    parts = torch.randn(4, 128, 64, dtype=torch.float64, device=device)
    lse[0, ::3] = lse[2, ::4] = lse[:, 5] = float("-inf")
    parts[lse == float("-inf")] = 0.0
    parts[1, 7] = float("nan")
    reference = (lse / math.log(2)).floor().clamp_min(torch.finfo(torch.float32).min)
    splits.sums[slots] = torch.stack((reference, (lse / math.log(2) - reference).exp2()), 1).float()
    splits.out[slots] = parts.float()
    out, out_lse = torch.empty(1, 1, 128, 64, device=device), torch.empty(1, 1, 128, device=device)
    splits.combine(out, out_lse)
    want = torch.einsum("sq,sqd->qd", lse.softmax(0).nan_to_num(0.0), parts)
    torch.testing.assert_close(out[0, 0].double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(out_lse[0, 0].double(), lse.logsumexp(0), rtol=1e-5, atol=1e-5)
    assert not out[0, 0, 5].any()
    assert want.isnan().any(-1).nonzero().tolist() == [[7]]


@pytest.mark.parametrize("size", [1e4, 1e6, 1e9, 1e30])
def test_large_logits_lose_nothing(size: float, device: str) -> None:
    """Splits have equal weights, beside any reference, where a logarithm of their sums would round them away."""
    splits, slots = of_four(device)
    weights = torch.tensor([1.0, 2.3, 5.1, 0.7], device=device)
    splits.sums[slots, 0], splits.sums[slots, 1] = size, weights[:, None].expand(4, 128)
    splits.out[slots] = torch.arange(4.0, device=device)[:, None, None].expand(4, 128, 64)
    out, lse = torch.empty(1, 1, 128, 64, device=device), torch.empty(1, 1, 128, device=device)
    splits.combine(out, lse)
    want = float(weights @ torch.arange(4.0, device=device) / weights.sum())
    torch.testing.assert_close(out, torch.full_like(out, want), rtol=1e-6, atol=0)
    splits.combine(out, lse, torch.full((1,), float("-inf"), device=device))
    torch.testing.assert_close(out, torch.full_like(out, want), rtol=1e-6, atol=0)
    splits.combine(out, lse, torch.full((1,), size * math.log(2), device=device))
    assert bool(out.isfinite().all())


def test_the_longest_lists_come_first_and_none_is_long(device: str) -> None:
    q, k, _ = make_qkv(B=2, Hq=4, Hkv=2, N=N, M=M, D=8, dtype=torch.float32, device=device)
    lists, _ = lists_of_any_length(q, k, bs.GlobalPermutation(), q_block=128, k_block=128, causal=True)
    splits = not_none(split_kv((2, q.shape[1]), (2, N), 8, lists, 128))
    items, coords, slots = splits.work.tolist()
    existing = items.index(-1)
    blocks = [(item >> 24 & 0xFFFFF) + (item >> 44) for item in items[:existing]]
    kept = lists.full_count + lists.partial_count
    assert sum(blocks) == kept.sum()
    assert max(blocks) <= splits.sizes.longest < kept.max()
    taken = [slot for slot in slots if slot >= 0]
    assert len(set(taken)) == len(taken)
    assert max(taken) < splits.entries
    # The first entry of a list comes before that of each list with fewer splits.
    coords = coords[:existing]
    first = {tile: coords.index(tile) for tile in coords}
    assert len(first) == splits.sizes.tiles
    number = [coords.count(tile) for tile in sorted(first, key=lambda tile: first[tile])]
    assert number == sorted(number, reverse=True)
    assert number[0] > number[-1]


@pytest.mark.parametrize(
    ("keys", "queries", "heads", "Dv", "most"),
    [
        (65535, 200, 4, 64, 0),  # few keys
        (65536, 8193, 4, 64, 0),  # many queries
        (131072, 2048, 32, 128, 8),
        (131072, 2048, 8, 128, 32),
        (131072, 2048, 32, 256, 4),
        (131072, 200, 1, 128, 32),
        (1 << 20, 16384, 32, 64, 0),  # more tiles than entries
        (1 << 20, 8192, 32, 64, 2),
    ],
)
def test_how_many_splits(keys: int, queries: int, heads: int, Dv: int, most: int) -> None:
    """Few enough for what the work list and the results may take; none where other work is enough."""
    rows, cols = -(-queries // 128), -(-keys // 128)
    counts = torch.zeros(1, 1, 1, dtype=torch.int32).expand(1, heads, rows)
    lists = BlockPlan(counts, counts, counts[..., None].expand(-1, -1, -1, cols), 128, 128)
    sizes = module._sizes((1, heads), (heads, keys), lists.index.shape[1:], 128, 128, 128, Dv)
    assert (0 if sizes is None else sizes.most) == most
    if sizes is not None:
        assert sizes.tiles * most <= 4096
        assert sizes.tiles * most * 128 * Dv * 4 <= 2**28
        assert sizes.longest * most >= cols


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "D", "Dv", "q_block", "k_block", "causal", "heads", "ordered"),
    [
        (M, 128, 128, 128, 128, True, 1, True),
        (1, 128, 128, 128, 128, True, 1, False),
        (170, 64, 64, 128, 64, True, 2, False),  # a chunk that starts inside a block
        (190, 128, 128, 64, 64, True, 1, False),
        (150, 96, 40, 256, 128, False, 1, True),
        (170, 192, 128, 128, 128, True, 1, True),
        (100, 256, 256, 128, 128, True, 2, False),
        (200, 256, 72, 64, 64, True, 1, True),
    ],
)
def test_attention_over_splits(
    queries: int, D: int, Dv: int, q_block: int, k_block: int, causal: bool, heads: int, ordered: bool, dtype: torch.dtype
) -> None:  # fmt: skip
    q, k, v = make_qkv(B=2, Hq=2, Hkv=1, N=N, M=queries, D=D, Dv=Dv, dtype=dtype, device="cuda")
    permutation = bs.GlobalPermutation() if ordered else random_keys(k, segment=256)
    k, v = permutation.gather_keys(k), permutation.gather_keys(v)
    lists, grid = lists_of_any_length(
        q, k, permutation, q_block=q_block, k_block=k_block, causal=causal, heads=heads
    )
    lists = first_of_batch(lists) if ordered else lists
    tiles = tuned(q, k, v, q_block, k_block)
    assert isinstance(tiles, HopperTiles)
    assert split_kv((2, q.shape[1]), (1, N), Dv, lists, 64 * tiles.consumers) is not None
    heavy = torch.tensor([0.5, 11.0], device="cuda")  # the second weighs as much as thousands of keys
    for sinks in (None, heavy):
        change = LogitChange(sinks=sinks)
        out, lse = sparse_attention(q, k, v, lists, grid.positions, tiles, scale=0.1, change=change)
        want, want_lse = sparse_attention_reference(
            q.double(), k.double(), v.double(), lists, grid.positions, scale=0.1, change=change
        )
        yardstick, _ = sparse_attention_reference(q, k, v, lists, grid.positions, scale=0.1, change=change)
        assert_within_budget(out, want, yardstick)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
        again, _ = sparse_attention(q, k, v, lists, grid.positions, tiles, scale=0.1, change=change)
        assert torch.equal(again, out)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e4, 1e5, 1e6])
@pytest.mark.parametrize(
    ("D", "Dv", "q_block", "k_block"),
    [(128, 128, 128, 128), (64, 64, 128, 128), (128, 128, 64, 64), (192, 128, 128, 64), (256, 256, 128, 128)],
)
def test_attention_to_large_logits_over_splits(
    D: int, Dv: int, q_block: int, k_block: int, size: float, dtype: torch.dtype
) -> None:
    """Weights and outputs are each rounded to their dtype once, by half of its `eps` at most."""
    q, k, v, scale = large_logits(size, M, D, Dv, dtype, "cuda")
    lists, grid = lists_of_any_length(q, k, bs.GlobalPermutation(), q_block=q_block, k_block=k_block, causal=True)
    tiles = tuned(q, k, v, q_block, k_block)
    assert isinstance(tiles, HopperTiles)
    assert split_kv((2, q.shape[1]), (1, N), Dv, lists, 64 * tiles.consumers) is not None
    sinks = torch.tensor([float("-inf"), size + 12], device="cuda")
    change = LogitChange(sinks=sinks)
    out, lse = sparse_attention(q, k, v, lists, grid.positions, tiles, scale=scale, change=change)
    assert_exact_logits(out, lse, q, k, v, lists, grid, scale, sinks, torch.finfo(dtype).eps)
