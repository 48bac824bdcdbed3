"""Calls that read pages where they lie: the bits of gathered keys, and no other number of the cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.executor import PagedExecutor
from blocksparse.kernels.score.block_mean import block_means
from blocksparse.testing import make_qkv
from tests.machine import needs_gpu
from tests.on_kernels import pretend_gpu

Cache = tuple[Tensor, Tensor]


def heads_first(pages: int, heads: int, page_size: int, D: int, like: Tensor) -> Cache:
    """Keys and values of a token side by side, a page's heads one behind another."""
    return halves(like.new_empty(pages, heads, page_size, 2 * D))


def tokens_first(pages: int, heads: int, page_size: int, D: int, like: Tensor) -> Cache:
    """The same with a page's tokens one behind another."""
    return halves(like.new_empty(pages, page_size, heads, 2 * D).transpose(1, 2))


def apart(pages: int, heads: int, page_size: int, D: int, like: Tensor) -> Cache:
    """Keys and values in tensors of their own."""
    return like.new_empty(pages, heads, page_size, D), like.new_empty(pages, heads, page_size, D)


def halves(cache: Tensor) -> Cache:
    keys, values = cache.chunk(2, dim=-1)
    return keys, values


LAYOUTS: dict[str, Callable[..., Cache]] = {
    "heads first": heads_first, "tokens first": tokens_first, "apart": apart,
}  # fmt: skip
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
PIPELINES: dict[str, bs.Pipeline[Any, Any, Any]] = {
    "mean_pooling": bs.mean_pooling(0.8, block=32),
    "sparge": bs.sparge(0.8, 0.3, block=32, k_block=16),
    "sums": bs.xattention(0.8, stride=8, block=32, pattern="sum"),
    "flash_prefill": bs.flash_prefill(block=32),
    "streaming": bs.a_shape(local=64, block=32),
}


def paged(k: Tensor, v: Tensor, page_size: int, layout: Callable[..., Cache]) -> tuple[bs.PageTable, Cache]:
    """A table with the request `k`, `v` `[1, Hkv, N, D]` in scattered pages of a cache of NaN."""
    _, heads, N, D = k.shape
    count = -(-N // page_size)
    keys, values = layout(2 * count + 1, heads, page_size, D, k)
    for x in (keys, values):
        x.fill_(float("nan"))
    order = torch.randperm(2 * count + 1, generator=torch.Generator().manual_seed(N))[:count].to(torch.int32)
    for i, page in enumerate(order.tolist()):
        n = min(page_size, N - i * page_size)
        for cache, x in ((keys, k), (values, v)):
            cache[page, :, :n] = x[0, :, i * page_size : i * page_size + n]
    return bs.PageTable(order[None].to(k.device), [N], page_size=page_size), (keys, values)


def with_executor(pipeline: bs.Pipeline[Any, Any, Any], executor: Any) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(pipeline.permuter, pipeline.scorer, pipeline.selector, executor)


@pytest.mark.parametrize("page_sizes", [(48,), pytest.param((16, 256), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_bits_as_gathered(
    name: str, page_sizes: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = with_executor(PIPELINES[name], bs.TritonExecutor())
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=137, D=16, dtype=torch.float16, device=device)
    pretend_gpu(monkeypatch)
    gathered = {M: pipeline(q[:, :, -M:], k, v) for M in (137, 70)}
    for page_size in page_sizes:
        for layout, lay_out in LAYOUTS.items():
            table, cache = paged(k, v, page_size, lay_out)
            for M, want in gathered.items():
                out = bs.PagedPipeline(pipeline)(q[:, :, -M:], table.in_place(0, *cache))
                assert torch.equal(out, want), (page_size, layout, M)


def test_what_the_layer_asks_for_and_where_it_is_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = with_executor(PIPELINES["mean_pooling"], bs.TritonExecutor())
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=130, D=16, dtype=torch.float32, device=device)
    table, cache = paged(k, v, 16, tokens_first)
    pretend_gpu(monkeypatch)
    asked: dict[str, Any] = {"scale": 0.2, "window": 50, "softcap": 5.0, "sinks": 0.5}
    out = torch.full_like(q, float("nan"))
    assert bs.PagedPipeline(pipeline)(q, table.in_place(0, *cache), out=out, **asked) is out
    assert torch.equal(out, pipeline(q, k, v, **asked))


def test_layers_share_what_is_worked_out_of_a_table(device: str) -> None:
    _, k, v = make_qkv(B=1, Hkv=2, N=40, D=16, device=device)
    table, cache = paged(k, v, 16, tokens_first)
    first, second = table.in_place(0, *cache), table.in_place(0, *cache)
    assert first.slots is second.slots
    assert first.run == 16
    assert torch.equal(first.keys[0, :, first.slots[0, 0]], k[0])
    assert torch.equal(first.values[0, :, first.slots[0, 0]], v[0])
    assert (first.k.shape, first.v.shape) == (k.shape, v.shape)


@pytest.mark.parametrize(
    ("pipeline", "because"),
    [
        (bs.pbs_attn(), "SegmentKeySort moves keys"),
        (bs.minference(), "VerticalSlashScorer needs the keys themselves"),
        (bs.mean_pooling(), "AutoExecutor reads pages by the kernel for Hopper alone"),
        (bs.mean_pooling(executor=bs.ReferenceExecutor()), "ReferenceExecutor reads no pages"),
    ],
)
def test_who_needs_gathered_keys_says_so(pipeline: Any, because: str) -> None:
    q, k, v = make_qkv(B=1, N=40, D=16)
    table, cache = paged(k, v, 16, apart)
    assert str(bs.PagedPipeline(pipeline).gathers_because(q.device)).startswith(because)
    with pytest.raises(bs.UnsupportedError, match=f"{because}.*gather the keys and values first"):
        bs.PagedPipeline(pipeline)(q, table.in_place(0, *cache))


def test_caches_that_no_row_of_slots_runs_through(device: str) -> None:
    _, k, v = make_qkv(B=1, Hkv=2, N=40, D=16, device=device)
    table, (keys, values) = paged(k, v, 16, apart)
    turned = keys.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="pages whole numbers of tokens apart"):
        table.in_place(0, turned, values)
    other = values.new_empty(len(values), 2, 16, 32)[..., :16]
    with pytest.raises(ValueError, match=r"'values' must have pages as many tokens apart as the keys have \(32\)"):
        table.in_place(0, keys, values.new_empty(len(values), 3, 16, 16)[:, :2])
    assert table.in_place(0, keys, other).run == 16
    with pytest.raises(ValueError, match="'request' must be a row of the table with a token, below 1: 1"):
        table.in_place(1, keys, values)


@needs_gpu
@each_layout
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize(
    ("name", "D", "N"),
    [("sparge", 128, 8191), ("sparge", 64, 8192), ("mean_pooling", 128, 70001), ("auto", 256, 5000)],
)
def test_the_kernel_for_hopper(name: str, D: int, N: int, page_size: int, layout: Callable[..., Cache]) -> None:
    """At 70001 keys lists are cut into shares; pages of 48 tokens are read in runs of 16."""
    presets = {"sparge": bs.sparge(share=0.1), "mean_pooling": bs.mean_pooling(0.9, block=64), "auto": bs.auto()}
    pipeline = with_executor(presets[name], bs.TritonExecutor())
    q, k, v = make_qkv(B=1, Hq=8, Hkv=2, N=N, D=D, dtype=torch.bfloat16, device="cuda")
    table, cache = paged(k, v, page_size, layout)
    for M in (2048, 777):
        expected = pipeline(q[:, :, -M:], k, v)
        for _ in range(3):  # as it is, recorded, and repeated
            assert torch.equal(bs.PagedPipeline(pipeline)(q[:, :, -M:], table.in_place(0, *cache)), expected)


@each_layout
def test_a_cpu_reads_no_row_beside_the_pages(layout: Callable[..., Cache]) -> None:
    """The means that a CPU's compiled kernel takes are those of the request, and not of the cache."""
    q, k, v = make_qkv(Hq=4, Hkv=2, N=77, D=16, dtype=torch.float32)
    table, cache = paged(k, v, 16, layout)
    kv = table.in_place(0, *cache)
    _, given = block_means(q, kv.keys, 32, 32, k_index=kv.key_slots)
    assert given.equal(block_means(q, k, 32, 32)[1])
    if os.environ.get("TRITON_INTERPRET") != "1":  # A GPU's Triton refuses tensors of a CPU.
        return
    pipeline = with_executor(PIPELINES["mean_pooling"], bs.TritonExecutor())
    assert bs.PagedPipeline(pipeline)(q, kv).equal(pipeline(q, k, v))


def test_a_pair_reads_pages_where_both_of_it_remember_keys() -> None:
    means = bs.MeanPoolScorer(32)
    assert bs.ScorerPair(means, means).takes_paged_keys
    assert not bs.ScorerPair(bs.NoScorer(32), means).takes_paged_keys


def test_a_history_of_pages_is_of_no_other_keys() -> None:
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=70, D=16, dtype=torch.float32)
    table, cache = paged(k, v, 16, tokens_first)
    kv = table.in_place(0, *cache)
    others = "'history' is of keys in the pages of a cache, and this call has others"
    for pipeline in (PIPELINES["mean_pooling"], PIPELINES["sums"], bs.prism(block=32)):
        with pytest.raises(ValueError, match=others):
            pipeline.choose(q, k, history=bs.KeyHistory(kv))
        with pytest.raises(ValueError, match=others):
            pipeline.choose(q[:, :, :60], kv.k[:, :, :60], history=bs.KeyHistory(kv))


def test_attention_reads_no_stand_ins() -> None:
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=70, D=16, dtype=torch.float32)
    table, cache = paged(k, v, 16, tokens_first)
    kv, pipeline = table.in_place(0, *cache), PIPELINES["mean_pooling"]
    chosen = pipeline.choose(q, kv.k, history=bs.KeyHistory(kv))
    assert chosen.mask.keep.equal(pipeline.choose(q, k).mask.keep)
    one, refused = bs.Sequences.packed([70]), "is of keys in the pages of a cache: call PagedPipeline"
    with pytest.raises(ValueError, match=refused):
        pipeline(q, kv.k, kv.v, history=bs.KeyHistory(kv))
    with pytest.raises(ValueError, match=refused):
        pipeline(q, kv.k, kv.v, sequences=one, history=[bs.KeyHistory(kv)])
    with pytest.raises(ValueError, match=refused):
        pipeline.trace(q, kv.k, kv.v, history=bs.KeyHistory(kv))


@final
@frozen
class Bare(PagedExecutor[bs.Permutation, bs.BlockMask]):
    """Gives the tensor itself."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> bs.AttentionOutput:
        raise NotImplementedError

    def attend_paged(self, q: Tensor, *_: Any) -> Any:
        return q


def test_an_executor_that_breaks_its_promise_is_named() -> None:
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=70, D=16, dtype=torch.float32)
    table, cache = paged(k, v, 16, tokens_first)
    pipeline = bs.PagedPipeline(with_executor(PIPELINES["mean_pooling"], Bare()))
    with pytest.raises(TypeError, match="Bare must give an AttentionOutput, and gave a Tensor"):
        pipeline(q, table.in_place(0, *cache))


def test_equal_pipelines_read_pages_equally() -> None:
    assert bs.PagedPipeline(bs.sparge(0.8, 0.3)) == bs.PagedPipeline(bs.sparge(0.8, 0.3))
    assert {bs.PagedPipeline(bs.auto()), bs.PagedPipeline(bs.auto())} == {bs.PagedPipeline(bs.auto())}
    with pytest.raises(TypeError, match="'pipeline' must be a Pipeline: None"):
        bs.PagedPipeline(None)  # type: ignore[arg-type]


@each_layout
def test_a_scorer_that_reads_keys_itself_refuses_a_stand_in(layout: Callable[..., Cache], device: str) -> None:
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=100, D=16, device=device)
    table, cache = paged(k, v, 16, layout)
    kv = table.in_place(0, *cache)
    with pytest.raises(bs.UnsupportedError, match="VerticalSlashScorer needs the keys themselves"):
        bs.flex_prefill(0.5, block=16, min_budget=16).choose(q, kv.k, history=bs.KeyHistory(kv))
    bs.mean_pooling(0.5, block=16).choose(q, kv.k, history=bs.KeyHistory(kv))


def test_a_history_of_pages_is_of_causal_calls() -> None:
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=96, D=16, dtype=torch.float32)
    table, cache = paged(k, v, 16, tokens_first)
    kv = table.in_place(0, *cache)
    for pipeline in (bs.auto(), PIPELINES["mean_pooling"]):
        with pytest.raises(bs.UnsupportedError, match="are those of a causal call: give causal=True"):
            pipeline.choose(q, kv.k, causal=False, history=bs.KeyHistory(kv))
