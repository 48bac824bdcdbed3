"""Keys and values in pages: read from wherever they lie, they are what they are in one piece."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import blocksparse as bs
from blocksparse import presets
from blocksparse.testing import make_qkv
from tests import drawn
from tests.drawn import Case, cases
from tests.machine import needs_gpu
from tests.meaning import same
from tests.test_generated_laws import assert_same_call, law

PAGED = cases(permuters=tuple(p for p in drawn.PERMUTERS[:-1] if p is not bs.GridOrder), layouts=3 * ("plain",))
REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=3)
LAYOUTS = ("heads first", "joined", "tokens first", "odd", "strided dims")


def cache(pages: int, heads: int, page: int, dims: tuple[int, int], dtype: Any, how: str) -> tuple[Tensor, Tensor]:
    """Views of keys and values `[pages, heads, page, D]` into memory of NaN."""
    D, Dv = dims

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    if how == "joined":  # as vLLM has it
        keys, values = memory(pages, heads, page, D + Dv).split([D, Dv], dim=-1)
        return keys, values
    if how == "tokens first":
        return tuple(memory(pages, page, heads, d).transpose(1, 2) for d in dims)  # type: ignore[return-value]
    if how == "odd":  # pages do not stand whole slots apart
        parts = (memory(pages, heads * page * d + 1)[:, :-1] for d in dims)
        return tuple(x.view(pages, heads, page, d) for x, d in zip(parts, dims, strict=True))  # type: ignore[return-value]
    if how == "strided dims":
        return tuple(memory(pages, heads, page, 2 * d)[..., ::2] for d in dims)  # type: ignore[return-value]
    return memory(pages, heads, page, D), memory(pages, heads, page, Dv)


@law(25, 125, PAGED, REQUESTS, st.data())
def test_pages_are_what_they_hold(
    device: str, case: Case, requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Pages in any order, with holes between them and behind them; in every layout, for every composition."""
    requests = [*requests, (1, 3)]  # no tensor is empty
    page, how = data.draw(st.sampled_from([1, 3, 16, 64])), data.draw(st.sampled_from(LAYOUTS))
    rng = random.Random(data.draw(st.integers(0, 99)))
    queries = [M for M, _ in requests]
    lengths = [M + more if case.causal else more for M, more in requests]
    sizes: dict[str, Any] = {**case.sizes, "B": 1, "M": None, "N": max(sum(lengths), sum(queries))}
    q, k, v = make_qkv(**sizes, dtype=getattr(torch, case.dtype))
    q, k, v = q[:, :, : sum(queries)], k[:, :, : sum(lengths)], v[:, :, : sum(lengths)]
    columns = max(-(-length // page) for length in lengths) + 1
    pages = list(range(len(lengths) * columns + 2))
    rng.shuffle(pages)
    keys, values = cache(len(pages), k.shape[1], page, (k.shape[3], v.shape[3]), k.dtype, how)
    table, begin = torch.full((len(lengths), columns), -1, dtype=torch.int32), 0
    for request, length in enumerate(lengths):
        for column, start in enumerate(range(0, length, page)):
            table[request, column] = where = pages.pop()
            tokens = min(page, length - start)
            keys[where, :, :tokens] = k[0, :, begin + start : begin + start + tokens]
            values[where, :, :tokens] = v[0, :, begin + start : begin + start + tokens]
        begin += length
    q, k, v, keys, values, table = (x.to(device) for x in (q, k, v, keys, values, table))
    paged = bs.PageTable(table, torch.tensor(lengths, dtype=torch.int32, device=device), page_size=page)
    found = paged.gather(keys, values)
    assert same(found[0], k)
    assert same(found[1], v)
    given: dict[str, Any] = {"sequences": paged.sequences(queries), **case.call}
    traces = case.pipeline.trace(q, *found, **given)
    for one, other in zip(traces, case.pipeline.trace(q, k, v, **given), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_same_call(one, other)


@pytest.mark.parametrize("how", LAYOUTS)
def test_requests_share_pages(how: str, device: str) -> None:
    """Of a prefix that both begin with."""
    _, k, v = make_qkv(N=48, D=16, Dv=8)
    keys, values = cache(3, 2, 16, (16, 8), k.dtype, how)
    for page, place in enumerate((2, 0, 1)):
        keys[place], values[place] = (x[0, :, 16 * page : 16 * page + 16] for x in (k, v))
    keys, values = keys.to(device), values.to(device)
    table = bs.PageTable(torch.tensor([[2, 0], [2, 1]], device=device), [32, 20], page_size=16)
    found = table.gather(keys, values)
    for x, whole in zip(found, (k.to(device), v.to(device)), strict=True):
        assert same(x, torch.cat((whole[:, :, :32], whole[:, :, :16], whole[:, :, 32:36]), 2))


@needs_gpu
@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize("name", ["mean_pooling", "pbs_attn", "s2o", "xattention"])
def test_requests_of_a_server_on_a_gpu(name: str, page: int) -> None:
    """Chunks of long and short prompts, in sizes and a dtype for which a GPU has its own kernels."""
    queries, lengths = [1, 700, 2048, 33], [1, 700, 5000, 3001]
    executor = bs.GatherExecutor(tau=0.01) if name == "s2o" else bs.TritonExecutor()
    pipeline = presets.every_preset[name](executor=executor)
    q, k, v = make_qkv(N=sum(lengths), Hq=8, Hkv=2, D=128, dtype=torch.bfloat16, device="cuda")
    q = q[:, :, : sum(queries)]
    columns = [-(-length // page) for length in lengths]
    pages = torch.randperm(sum(columns)).split(columns)
    table = torch.full((len(lengths), max(columns)), -1, dtype=torch.int32)
    for row, of_prompt in zip(table, pages, strict=True):
        row[: len(of_prompt)] = of_prompt
    cache = [torch.full((sum(columns), page, 2, 128), float("nan"), dtype=k.dtype, device="cuda") for _ in "kv"]
    for kept, x in zip(cache, (k, v), strict=True):
        for of_prompt, one in zip(pages, x[0].transpose(0, 1).split(lengths), strict=True):
            for place, tokens in zip(of_prompt.tolist(), one.split(page), strict=True):
                kept[place, : len(tokens)] = tokens
    paged = bs.PageTable(table.cuda(), lengths, page_size=page)
    found = paged.gather(*(x.transpose(1, 2) for x in cache))
    assert same(found[0], k)
    assert same(found[1], v)
    sequences = paged.sequences(queries)
    out = pipeline(q, *found, sequences=sequences)
    for span in sequences.spans:
        alone = pipeline(span.rows(q).contiguous(), span.columns(k).contiguous(), span.columns(v).contiguous())
        assert same(span.rows(out), alone)


def test_the_table_serves_every_layer() -> None:
    """Layers lie in one tensor, or have layouts of their own."""
    layers = torch.randn(3, 4, 2, 16, 40)  # [layers, pages, Hkv, page, 2D]
    table = bs.PageTable(torch.tensor([[3, 1]], dtype=torch.int32), [27], page_size=16)
    for cached in layers:
        k, v = table.gather(*cached.split(20, dim=-1))
        expected = torch.cat((cached[3], cached[1]), 1)[None, :, :27]
        assert torch.equal(k, expected[..., :20])
        assert torch.equal(v, expected[..., 20:])
        apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in cached.split(20, dim=-1)]
        assert all(map(torch.equal, table.gather(*apart), (k, v)))
    table.block_table.zero_()
    assert torch.equal(table.gather(*layers[2].split(20, dim=-1))[0], k)
    assert table.sequences([5]).spans == ((0, 0, 5, 0, 27),)
    assert bs.PageTable(torch.zeros(2, 0, dtype=torch.int32), [0, 0], page_size=16).gather(layers[0], layers[0])[
        0
    ].shape == (1, 2, 0, 40)


P: Any = bs.PageTable
TABLE = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
KEYS = torch.zeros(3, 2, 16, 8)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: P([[0]], [3], page_size=16), TypeError, "'block_table' must be a tensor of int32 or int64"),
        (lambda: P(TABLE.float(), [3, 3], page_size=16), TypeError, "'block_table' must be a tensor of int32"),
        (lambda: P(TABLE, [3], page_size=16), ValueError, "'block_table' must have a row for each of 1 lengths"),
        (lambda: P(TABLE[0], [3, 3], page_size=16), ValueError, "must have a row for each of 2 lengths"),
        (lambda: P(TABLE, [33, 3], page_size=16), ValueError, "'lengths' must be from 0 to 32.*request 0 has 33"),
        (lambda: P(TABLE, [3, -1], page_size=16), ValueError, "'lengths' must be from 0 to 32.*request 1 has -1"),
        (
            lambda: P(TABLE, [3, 17], page_size=16),
            ValueError,
            "must name pages from 0 on, below 2..31, for every token: -1",
        ),
        (
            lambda: P(TABLE.long() + 2**32, [3, 3], page_size=16),
            ValueError,
            "below 2..31, for every token: 4294967296",
        ),
        (lambda: P(TABLE, [3.5, 1], page_size=16), TypeError, "'lengths' must be a sequence of whole numbers"),
        (lambda: P(TABLE, [3, 1], page_size=0), ValueError, "'page_size' must be a whole number from 1"),
        (lambda: P(TABLE, [3, 1], page_size="x"), TypeError, "'page_size' must be a whole number from 1"),
        (lambda: good().gather(KEYS[:2], KEYS[:2]), ValueError, "must name pages of the cache, 0 to 1: 2"),
        (lambda: good().gather(KEYS[0], KEYS), ValueError, r"'keys' must have the shape \[pages, Hkv, 16, D\]"),
        (lambda: good().gather(KEYS.mT, KEYS.mT), ValueError, r"'keys' must have the shape \[pages, Hkv, 16, D\]"),
        (
            lambda: good().gather(KEYS, KEYS[:, :1]),
            ValueError,
            r"'values' must have the shape \[pages, Hkv, 16, D\]",
        ),
        (
            lambda: good().gather(KEYS, KEYS.double()),
            TypeError,
            "'values' must be a tensor of .*the same for keys",
        ),
        (
            lambda: good().gather(*2 * [KEYS.to(torch.float8_e4m3fn)]),
            TypeError,
            "'keys' must be a tensor of float16.*float8_e4m3fn.*Caches in 8 bits must be converted first",
        ),
        (lambda: gather_with_grad(), ValueError, "'keys' must not require grad"),
        (lambda: good().gather(KEYS.to("meta"), KEYS), ValueError, "must be on the device of the table"),
        (lambda: one(-1), ValueError, "'request' must be a whole number, at least 0: -1"),
        (lambda: one(2), ValueError, "'request' must be below 2, the rows of the table: 2"),
        (
            lambda: one(0, torch.empty(2000, device="meta")),
            ValueError,
            "'into' must be on the device of the cache",
        ),
        (lambda: one(0, KEYS), ValueError, "'into' must not share memory with the cache"),
        (lambda: one(0, torch.empty(2000, requires_grad=True)), ValueError, "'into' must not require grad"),
        (lambda: one(0, torch.empty(3)), ValueError, "'into' must be contiguous and have room for "),
        (lambda: good().sequences([3]), ValueError, r"'key_lengths' must have an entry per sequence \(1\): 2"),
    ],
)
def test_what_cannot_be_is_one_sentence(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def gather_with_grad() -> None:
    with torch.enable_grad():
        good().gather(KEYS.clone().requires_grad_(), KEYS)


def one(request: int, into: Tensor | None = None) -> None:
    with torch.enable_grad():
        good().gather_one(request, KEYS, KEYS, torch.empty(2000) if into is None else into)


def good() -> bs.PageTable:
    return bs.PageTable(TABLE, [20, 3], page_size=16)


def test_one_request_in_memory_that_is_there_already(device: str) -> None:
    """What a server reserves once, and each request of each layer uses in turn."""
    keys, values = (torch.randn(4, 2, 16, d, device=device) for d in (20, 8))
    table = bs.PageTable(torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device), [27, 16], page_size=16)
    room = torch.full((2 * 28 * 30,), float("nan"), device=device)
    k, v = table.gather(keys, values)
    for request, tokens in ((0, slice(0, 27)), (1, slice(27, 43))):
        found = table.gather_one(request, keys, values, room)
        assert torch.equal(found[0], k[:, :, tokens])
        assert torch.equal(found[1], v[:, :, tokens])
        assert {x.untyped_storage().data_ptr() for x in found} == {room.untyped_storage().data_ptr()}
    for wrong in (room[: 2 * 28 * 27 - 1], room.half(), room.view(2, -1).T):
        with pytest.raises(ValueError, match=r"'into' must be contiguous and have room for 1512 numbers of "):
            table.gather_one(0, keys, values, wrong)
