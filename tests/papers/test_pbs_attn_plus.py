"""PBS-Attn+ and the key-aware query order: no code was released, so the paper's text and known answers."""

from __future__ import annotations

import pytest
import torch
from tests.specs import not_none
from torch import Tensor

import blocksparse as bs
from blocksparse.order.content_orders import SegmentQuerySort
from blocksparse.presets.text import pbs_attn_plus
from blocksparse.testing import make_qkv, masked_attention

REFERENCE = bs.ReferenceExecutor()


def test_own_segment_and_first_token_come_on_top_of_the_threshold() -> None:
    q, k, v = make_qkv(N=300, M=290, D=16)
    trace = pbs_attn_plus(0.5, stride=4, block=16, S=32, executor=REFERENCE).trace(q, k, v)
    grid, values, keep = trace.mask.grid, trace.scores.values, trace.mask.keep
    own = grid.own_segment(32).expand_as(keep)
    assert bool((own <= keep).all())
    assert bool((grid.holding_first(1).expand_as(keep) <= keep).all())
    assert float(values.masked_fill(~own, 0.0).abs().max()) == 0.0
    # All the mass lies outside the own segment, one per query cell, none in the first segment; a cell is short.
    cells = torch.tensor([0, 0, *[4] * 16, 3]).float()
    torch.testing.assert_close(values.sum(-1), cells.expand(values.shape[:3]), rtol=1e-5, atol=1e-5)
    selected = bs.TopCdf(0.5)(trace.scores).keep & ~own
    share = (values * selected).sum(-1)[:, :, 2:] / cells[2:]
    assert float(share.min()) >= 0.5 - 1e-6
    lightest = values.where(selected, float("inf")).amin(-1)[:, :, 2:] / cells[2:]
    assert float((share - lightest).max()) < 0.5 + 1e-6


def directions(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows)[None, None]


EAST, NORTH = (1.0, 0.0), (0.0, 1.0)


def test_query_sort_by_hand() -> None:
    """Queries of the second segment go to blocks of the first: to the east, then to the north."""
    k = directions(EAST, EAST, NORTH, NORTH, *[(-1.0, -1.0)] * 6)
    q = directions(*[NORTH] * 4, (0.1, 1.0), (5.0, 2.0), NORTH, (1.0, 0.0), *[EAST] * 2)
    order = SegmentQuerySort(4, block=2)(q, k, bs.AttentionSpec(scale=1.0))
    assert order.k_index is None
    assert order.q_index is not None
    # First segment in place; 7 and 5 go east, the closer first; 6 and 4 north; the tail in place.
    assert order.q_index.flatten().tolist() == [0, 1, 2, 3, 7, 5, 6, 4, 8, 9]
    assert order.q_index.dtype == torch.int32


def test_query_sort_ties_keep_their_order() -> None:
    k = directions(*[EAST] * 8)
    q = directions(*[EAST] * 4, EAST, (2.0, 0.0), EAST, (4.0, 0.0))  # a cosine sees no lengths
    order = not_none(SegmentQuerySort(4, block=2)(q, k, bs.AttentionSpec(scale=1.0)).q_index)
    assert order.flatten().tolist() == list(range(8))


def test_query_sort_sees_all_keys_when_not_causal() -> None:
    k = directions(EAST, EAST, EAST, NORTH, NORTH)  # three blocks, the last one short
    q = directions(NORTH, (1.0, 1.0), EAST, NORTH, EAST)
    order = not_none(SegmentQuerySort(4, block=2)(q, k, bs.AttentionSpec(scale=1.0, causal=False)).q_index)
    assert order.flatten().tolist() == [2, 1, 0, 3, 4]


SORTS = (
    SegmentQuerySort(32, block=16),
    SegmentQuerySort(48, block=8),
    SegmentQuerySort(32, block=16, keys=bs.SegmentKeySort(32, last_q=8)),
    SegmentQuerySort(32, block=16, keys=bs.SegmentKeySort(32, last_q=8, per_query_head=True)),
)


@pytest.mark.parametrize("M", [129, 128, 100, 65, 33, 1])
@pytest.mark.parametrize("sort", SORTS, ids=repr)
def test_queries_stay_in_their_segments(sort: SegmentQuerySort, M: int) -> None:
    q, k, v = make_qkv(B=2, N=129, M=M, D=16)
    for causal in (True, False):
        order = sort(q, k, bs.AttentionSpec(scale=0.25, causal=causal))
        offset = 129 - M if causal else 0
        place = torch.arange(M) + offset
        index = torch.arange(M).expand(2, 4, M) if order.q_index is None else order.q_index.long()
        assert torch.equal(index.sort(-1).values, torch.arange(M).expand_as(index))
        assert torch.equal((index + offset) // sort.S, (place // sort.S).expand_as(index))
        fixed = place >= (offset + M) // sort.S * sort.S
        assert torch.equal(index[..., fixed], torch.arange(M)[fixed].expand(2, 4, -1))
        torch.testing.assert_close(order.restore(order.gather_queries(q)), q, rtol=0, atol=0)
        want = sort.keys(q, k, bs.AttentionSpec(scale=0.25, causal=causal)).k_index
        assert (want is None and order.k_index is None) or torch.equal(order.k_index, want)  # type: ignore[arg-type]
    pipeline = bs.Pipeline(sort, bs.MeanPoolScorer(16), bs.TopCdf(1.0), REFERENCE)
    dense = masked_attention(q, k, v, torch.ones(M, 129, dtype=torch.bool).tril(129 - M), 0.25)
    torch.testing.assert_close(pipeline(q, k, v), dense)


@pytest.mark.parametrize("start", [32, 40, 64, 95, 96, 120])
def test_query_sort_does_not_depend_on_chunks(start: int) -> None:
    """Where a chunk holds whole segments they are sorted alike: the order looks at earlier segments alone."""
    q, k, _ = make_qkv(N=160, D=16)
    sort = SegmentQuerySort(32, block=8)
    whole = sort(q, k, bs.AttentionSpec(scale=0.25)).q_index
    chunk = sort(q[:, :, start:], k, bs.AttentionSpec(scale=0.25)).q_index
    first = sort(q[:, :, :start], k[:, :, :start], bs.AttentionSpec(scale=0.25)).q_index
    assert whole is not None
    assert chunk is not None
    assert not torch.equal(whole, torch.arange(160).int().expand_as(whole))
    above, below = -(-start // 32) * 32, start // 32 * 32
    assert torch.equal(chunk[:, :, above - start :] + start, whole[:, :, above:])
    if first is not None:
        assert torch.equal(first[:, :, :below], whole[:, :, :below])


def test_query_sort_refuses() -> None:
    q, k, _ = make_qkv(N=129, D=16)
    twice = SegmentQuerySort(32, block=16, keys=SegmentQuerySort(32, block=16))
    with pytest.raises(ValueError, match="'keys' must leave queries in place: SegmentQuerySort"):
        twice(q, k, bs.AttentionSpec(scale=0.25))
