"""Lists cut into shares: the work for them, and what is joined; the kernels are interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.machine import needs_hopper
from torch import Tensor

import blocksparse as bs
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.testing import assert_within_budget, make_qkv

pytest.importorskip("triton")
from blocksparse.executors.tiles import HopperTiles, tuned
from blocksparse.kernels.attention.hopper.shares import Shares, shares_of
from blocksparse.kernels.attention.sparse_attention import sparse_attention, sparse_attention_reference

N, M = 65768, 232  # a chunk that begins at a block; lists are cut from 65536 keys on


def lists_of_any_length(
    q: Tensor, k: Tensor, *, q_block: int, k_block: int, causal: bool, heads: int = 1
) -> tuple[BlockPlan, bs.Grid]:
    """A mask whose rows keep nothing, few, or nearly all of their blocks."""
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(), q_block=q_block, k_block=k_block, causal=causal)
    generator = torch.Generator().manual_seed(1)
    density = torch.tensor([0.0, 0.01, 0.1, 0.3, 0.9])
    shape = q.shape[0], q.shape[1] // heads, grid.rows
    density = density[torch.randint(0, 5, shape, generator=generator)]
    keep = torch.rand(*shape, grid.cols, generator=generator) < density[..., None]
    keep = keep.repeat_interleave(heads, 1).to(q.device) & grid.reachable
    mask = bs.BlockMask(keep, grid)
    return BlockPlan.of(mask.share_heads() if heads > 1 else mask), grid


def attend_by_entry(
    shares: Shares, q: Tensor, k: Tensor, v: Tensor, grid: bs.Grid, out: Tensor, lse: Tensor
) -> None:
    """What the attention kernel does with the list of work, in plain torch, with a scale of 0.2."""
    lists, tile = shares.lists, shares.tile
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2] if grid.causal else k.shape[2]
    for word, place, target in shares.work.T.tolist():
        if word < 0:  # the last entry was before this one
            assert (place, target) == (0, -1)
            continue
        first, full, partial = word & 0xFFFFFF, word >> 24 & 0xFFFFF, word >> 44
        b, h, h_key, row = place >> 48, place >> 32 & 0xFFFF, place >> 16 & 0xFFFF, place & 0xFFFF
        assert h_key == h // group
        of_row = lists.index[b, h * lists.index.shape[1] // q.shape[1], row * tile // lists.q_block]
        blocks = of_row[first : first + full + partial].long()
        query = torch.arange(row * tile, min((row + 1) * tile, q.shape[2]), device=q.device)
        key = (blocks[:, None] * lists.k_block + torch.arange(lists.k_block, device=q.device)).flatten()
        unmasked = torch.arange(len(key), device=q.device) < full * lists.k_block
        sees = unmasked | ((key <= query[:, None] + offset) & (key < k.shape[2]))
        key = key.clamp(max=k.shape[2] - 1)
        logits = (q[b, h, query] @ k[b, h_key, key].mT * 0.2).masked_fill(~sees, float("-inf"))
        result = logits.softmax(-1).nan_to_num(0.0) @ v[b, h_key, key]
        if target < 0:
            out[b, h, query], lse[b, h, query] = result, logits.logsumexp(-1)
        else:
            shares.out[target, : len(query), : v.shape[3]] = result
            shares.lse[target, : len(query)] = logits.logsumexp(-1)


@pytest.mark.parametrize(
    ("q_block", "k_block", "tile", "causal", "heads"),
    [(128, 128, 128, True, 1), (64, 64, 64, True, 2), (256, 128, 128, False, 1)],
)
def test_joined_shares_are_the_whole(
    q_block: int, k_block: int, tile: int, causal: bool, heads: int, device: str
) -> None:
    q, k, v = make_qkv(B=2, Hq=2, Hkv=1, N=N, M=M, D=8, Dv=24, dtype=torch.float32, device=device)
    lists, grid = lists_of_any_length(q, k, q_block=q_block, k_block=k_block, causal=causal, heads=heads)
    shares = shares_of(q.shape, (1, N), 24, lists, tile)
    assert shares is not None
    out, lse = q.new_full((2, 2, M, 24), 7.0), q.new_full((2, 2, M), 7.0)
    attend_by_entry(shares, q, k, v, grid, out, lse)
    shares.join(out, lse)
    in_float64 = sparse_attention_reference(q.double(), k.double(), v.double(), lists, grid.positions, scale=0.2)
    torch.testing.assert_close(out, in_float64[0].float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, in_float64[1], rtol=1e-4, atol=1e-5)


def test_the_longest_lists_come_first_and_none_is_long(device: str) -> None:
    q, k, _ = make_qkv(B=2, Hq=4, Hkv=2, N=N, M=M, D=8, dtype=torch.float32, device=device)
    lists, _ = lists_of_any_length(q, k, q_block=128, k_block=128, causal=True)
    shares = shares_of(q.shape, (2, N), 8, lists, 128)
    assert shares is not None
    words, _, targets = shares.work.tolist()
    blocks = [(word >> 24 & 0xFFFFF) + (word >> 44) for word in words if word >= 0]
    kept = lists.full_count + lists.partial_count
    assert sum(blocks) == kept.sum()
    assert max(blocks) <= shares.sizes.longest < kept.max()
    taken = [target for target in targets if target >= 0]
    assert taken == sorted(set(taken))  # numbered from the last shares on, which only the longest lists have
    assert taken[-1] < shares.entries


@pytest.mark.parametrize(("keys", "queries"), [(65535, 200), (65536, 8320)])
def test_few_keys_or_many_queries_are_not_cut(keys: int, queries: int, device: str) -> None:
    counts = torch.zeros(1, 4, -(-queries // 128), dtype=torch.int32, device=device)
    lists = BlockPlan(counts, counts, counts, 128, 128)
    assert shares_of(torch.Size((1, 4, queries, 64)), (2, keys), 64, lists, 128) is None


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "D", "Dv", "q_block", "k_block", "causal", "heads"),
    [
        (M, 128, 128, 128, 128, True, 1),
        (1, 128, 128, 128, 128, True, 1),
        (170, 64, 64, 128, 64, True, 2),  # a chunk that starts inside a block
        (190, 128, 128, 64, 64, True, 1),
        (150, 96, 40, 256, 128, False, 1),
        (170, 192, 128, 128, 128, True, 1),
        (100, 256, 256, 128, 128, True, 2),
        (200, 256, 72, 64, 64, True, 1),
    ],
)
def test_attention_over_shares(
    queries: int, D: int, Dv: int, q_block: int, k_block: int, causal: bool, heads: int, dtype: torch.dtype
) -> None:
    """Against float64, with the tiles that a pipeline takes."""
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=N, M=queries, D=D, Dv=Dv, dtype=dtype, device="cuda")
    lists, grid = lists_of_any_length(q, k, q_block=q_block, k_block=k_block, causal=causal, heads=heads)
    tiles = tuned(q, k, v, q_block, k_block)
    assert isinstance(tiles, HopperTiles)
    assert shares_of(q.shape, (2, N), Dv, lists, 64 * tiles.consumers) is not None
    out, lse = sparse_attention(q, k, v, lists, grid.positions, tiles, scale=0.1)
    want, want_lse = sparse_attention_reference(
        q.double(), k.double(), v.double(), lists, grid.positions, scale=0.1
    )
    yardstick, _ = sparse_attention_reference(q, k, v, lists, grid.positions, scale=0.1)
    assert_within_budget(out, want, yardstick)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    again, _ = sparse_attention(q, k, v, lists, grid.positions, tiles, scale=0.1)
    assert torch.equal(again, out)
