"""What of the vLLM backend needs no vLLM: configurations, how a batch is split, and attention over pages.

The backend itself runs inside of vLLM in `tests_vllm`.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tests.machine import GPU
from tests.on_kernels import pretend_gpu, small_preset
from tests.specs import not_none
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.hosts.serving.layer import PagedAttention, Workspace, record_dense
from blocksparse.hosts.serving.runs import Prefills, Runs, Split
from blocksparse.hosts.serving.settings import Served
from blocksparse.hosts.serving.warm import pays_from, sizes, warm
from blocksparse.hosts.serving.worth import Kinds, Worth
from blocksparse.hosts.vllm import ConfigurationError, DensityRecorder, Settings, register
from blocksparse.hosts.vllm.batch import SplitMetadata, dense_because, part_of
from blocksparse.hosts.vllm.engine import HOST, Engine, RecordReader, is_configured, layer_of
from blocksparse.hosts.vllm.requests import Requests, watch
from blocksparse.launch import replay
from blocksparse.launch.replay import GraphCache
from blocksparse.observe import Audit
from blocksparse.observe.metrics import AuditGauges
from blocksparse.spec import AttentionSpec
from blocksparse.testing import make_qkv

SERVED = Served("llama", layers=4, heads=8, kv_heads=2)


@dataclass
class Common:
    """Fields of vLLM's CommonAttentionMetadata: those with an entry per request or token, and some others."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    block_table_tensor: Tensor
    slot_mapping: Tensor
    req_idx: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    positions: Tensor | None = None
    causal: bool = True
    _num_computed_tokens_cache: Tensor | None = None
    _token_to_req_indices_cache: Tensor | None = None

    def replace(self, **changed: Any) -> Common:
        return replace(self, **changed)


def batch_of(queries: list[int], keys: list[int], page_size: int = 16) -> Common:
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    pages = -(-max(keys) // page_size)
    table = torch.randperm(pages * len(keys), dtype=torch.int32).view(len(keys), pages)
    lengths, tokens = torch.tensor(keys, dtype=torch.int32), sum(queries)
    both = starts, starts.clone(), lengths, lengths.clone()
    return Common(*both, table, torch.arange(tokens), np.arange(len(keys)), len(keys), tokens, max(queries))


def split(queries: list[int], keys: list[int], **options: Any) -> Split:
    starts = [0, *np.cumsum(queries).tolist()]
    return Split.of(starts, keys, **{"min_tokens": 100, "min_queries": 16} | options)


def test_runs() -> None:
    runs = Runs.of([0, 1, 4, 6, 7])
    assert runs.ranges == ((0, 2), (4, 5), (6, 8))
    assert len(runs) == 5
    assert [*runs] == [0, 1, 4, 6, 7]
    assert str(runs) == "0-1, 4, 6-7"
    x = torch.arange(8)
    assert runs.take(x).tolist() == runs.take(x.numpy()).tolist() == [*runs]
    assert Runs.of([2, 3]).take(x).data_ptr() == x[2:].data_ptr()  # no copy of what lies together
    assert Runs().take(x).shape == Runs().take(x.numpy()).shape == (0,)
    assert runs.of_tokens([0, 3, 3, 5, 6, 9, 9, 11, 12]).ranges == ((0, 3), (6, 9), (9, 12))
    y = torch.zeros(8, dtype=torch.int64)
    runs.put(y, runs.take(x))
    assert y.tolist() == [0, 1, 0, 0, 4, 0, 6, 7]


def test_a_batch_of_decodes_and_prefills_is_split() -> None:
    found = split([1, 1, 3, 200, 20, 30, 16], [500, 1, 300, 200, 60, 430, 100])
    assert [*found.sparse] == [3, 5, 6]
    assert [*found.rest] == [0, 1, 2, 4]
    assert found.reasons == Counter({"decode": 2, "fewer than min_queries": 1, "fewer than min_tokens": 1})


def test_whole_batches_and_single_requests_stay_dense() -> None:
    everything = split([200, 1], [200, 90], dense="not causal")
    assert not everything.sparse.ranges
    assert everything.reasons == Counter({"not causal": 1, "decode": 1})
    pictures = split([200, 200], [200, 200], own={1: "mask"})
    assert [*pictures.sparse] == [0]
    assert pictures.reasons == Counter({"mask": 1})


def test_requests_without_queries_and_trial_runs() -> None:
    """They pad a batch; and a trial run may have requests with fewer tokens than queries."""
    found = split([200, 0, 0], [200, 0, 0])
    assert ([*found.sparse], [*found.rest], found.reasons) == ([0], [1, 2], Counter())
    assert split([200], [1]).reasons == Counter({"fewer than min_tokens": 1})


def test_the_rest_is_a_batch_of_its_own() -> None:
    common = batch_of([1, 150, 3, 200, 5], [40, 150, 33, 260, 70])
    common.mm_req_doc_ranges = {2: [(1, 3)], 3: [(5, 9)]}
    common.positions = torch.arange(359)
    rest = part_of(common, Runs.of([0, 2, 4]), Runs(((0, 1), (151, 154), (354, 359))))
    tokens = [0, 151, 152, 153, *range(354, 359)]
    assert rest.query_start_loc.tolist() == rest.query_start_loc_cpu.tolist() == [0, 1, 4, 9]
    assert rest.query_start_loc.dtype == torch.int32
    assert (rest.num_reqs, rest.num_actual_tokens, rest.max_query_len) == (3, 9, 5)
    assert rest.seq_lens.tolist() == rest.seq_lens_cpu_upper_bound.tolist() == [40, 33, 70]
    assert rest.slot_mapping.tolist() == rest.positions.tolist() == tokens
    assert torch.equal(rest.block_table_tensor, common.block_table_tensor[[0, 2, 4]])
    assert rest.req_idx.tolist() == [0, 2, 4]
    assert rest.mm_req_doc_ranges == {1: [(1, 3)]}


def paged(common: Common, page_size: int, heads: int, D: int) -> Tensor:
    """A cache `[pages, Hkv, page_size, 2D]` with tokens before heads in memory."""
    pages = int(common.block_table_tensor.max()) + 1
    return torch.randn(pages, page_size, heads, 2 * D).transpose(1, 2)


def keys_of(common: Common, cache: Tensor, request: int) -> Tensor:
    """Keys and values of a request, `[1, Hkv, N, 2D]`."""
    rows = cache[common.block_table_tensor[request].long()]  # [pages, Hkv, page_size, 2D]
    return rows.transpose(1, 2).flatten(0, 1)[: int(common.seq_lens[request])].transpose(0, 1)[None]


def of_one_prompt(attend: PagedAttention, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attention of `q` `[1, Hq, M, D]` to k and v that lie in pages of 16 tokens: `[1, Hq, M, D]`."""
    M, N = q.shape[2], k.shape[2]
    keys, values = (x[0].unflatten(1, (-1, 16)).transpose(0, 1) for x in (k, v))  # [pages, Hkv, 16, D]
    pages = torch.arange(len(keys), dtype=torch.int32)[None]
    prefills = Prefills.of(Runs.of([0]), pages, starts=[0, M], keys=[N], page_size=16)
    query, out = q[0].transpose(0, 1), torch.empty(M, q.shape[1], q.shape[3])
    attend(query, keys, values, out, prefills, scale=scale)
    return out.transpose(0, 1)[None]


@pytest.mark.parametrize("queries", [[1, 1, 120, 64], [130, 1, 70]], ids=["rest first", "rest between"])
def test_sparse_prompts_attend_to_their_pages(queries: list[int]) -> None:
    """What stands behind a prompt in its last page is not read."""
    keys, D = [n + 31 for n in queries], 16
    common = batch_of(queries, keys)
    cache, query = paged(common, 16, 2, D), torch.randn(sum(queries), 8, D)
    for request, tokens in enumerate(keys):
        cache[int(common.block_table_tensor[request, tokens // 16]), :, tokens % 16 :] = float("nan")
    found, asked = split(queries, keys, min_tokens=1), []
    batch = SplitMetadata.of(common, found, keys, page_size=16, build=lambda rest: asked.append(rest))
    assert batch.prefills is not None
    assert [rest.max_query_len for rest in asked] == [1]  # what decodes keeps the fastest kernels for that
    out, recorder = torch.full((sum(queries), 8, D), 7.0), DensityRecorder()
    pipeline = bs.mean_pooling(0.5, block=16)
    attend = PagedAttention(pipeline, 3, recorder, Workspace(max(keys)))
    keys_of_all, values_of_all = cache.split(D, dim=-1)
    attend(query, keys_of_all, values_of_all, out, batch.prefills, scale=0.3)
    assert attend.workspace.nbytes > 0
    start = 0
    for request, count in enumerate(queries):
        rows = slice(start, start + count)
        if count > 1:
            k, v = keys_of(common, cache, request).split(D, dim=-1)
            alone = pipeline(query[rows].transpose(0, 1)[None], k, v, scale=0.3)
            torch.testing.assert_close(out[rows].transpose(0, 1)[None], alone, rtol=0, atol=2e-6)
        else:
            assert (out[rows] == 7).all()  # of the stock backend
        start += count
    record_dense(recorder, 3, batch.reasons, batch.prefills, None)
    record_dense(recorder, 0, batch.reasons, batch.prefills, "softcap")
    decodes = queries.count(1)
    assert recorder.sparse_calls() == {3: 2}
    assert recorder.dense_calls() == {3: Counter(decode=decodes), 0: Counter(decode=decodes, softcap=2)}
    assert 0 < recorder.density()[3].mean() < 1


def test_an_audit_tells_what_sparse_prompts_lose(caplog: pytest.LogCaptureFixture) -> None:
    """Outputs are those without it; one call in `every` is compared with dense attention."""
    settings = Settings.of(
        {"blocksparse": {"preset": "a_shape", "audit": {"every": 3, "rows": 16, "max_error": 1e-6}}}, SERVED, HOST
    )
    pytest.importorskip("prometheus_client")
    pipeline, gauges = bs.a_shape(sink=16, local=32, block=16), AuditGauges(not_none(settings.audit))
    q, k, v = make_qkv(Hq=4, Hkv=2, N=160, D=16)
    audited, plain = (PagedAttention(pipeline, 2, None, Workspace(160), its) for its in (gauges, None))
    expected = of_one_prompt(plain, q, k, v, scale=0.25)
    for _ in range(9):
        torch.testing.assert_close(of_one_prompt(audited, q, k, v, scale=0.25), expected, rtol=0, atol=2e-6)
    (found,) = gauges.audit.layers()
    assert (found.layer, found.calls, found.audited, found.crossed, found.dense) == (2, 9, 3, 3, False)
    assert not_none(found.error).value > 0.01
    assert caplog.text.count("an audit crossed its bound in layer 2") == 3


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="pretends a GPU, with tensors on the CPU")
@pytest.mark.parametrize(("name", "whole"), [("mean_pooling", True), ("auto", False)])
def test_all_layers_of_a_step_give_what_they_give_alone(
    name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, with other pages in each: where later layers repeat the launches of the first, too."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(replay, "GRAPHS", GraphCache(most_graphs=1024, most_seen=4096))
    pipeline, D, queries, workspace = small_preset(name), 16, [40, 24], Workspace(130)
    for keys, remaining in (([40, 60], [40, 200]), ([80, 84], [0, 176])):
        common = batch_of(queries, keys)
        found = split(queries, keys, min_tokens=1)
        batch = SplitMetadata.of(common, found, keys, page_size=16, build=lambda _: None, remaining=remaining)
        for layer in range(4):
            cache, query = paged(common, 16, 2, D), torch.randn(sum(queries), 8, D)
            k, v = (cache, None) if whole else cache.split(D, dim=-1)
            out, scratch = torch.full_like(query, float("nan")), not_none(workspace.scratch(query)).zero_()
            PagedAttention(pipeline, layer, None, workspace)(query, k, v, out, not_none(batch.prefills), scale=0.3)
            assert bool(scratch.any()) is (layer > 1)  # of what is replayed
            alone = [
                evolve(pipeline, replay=False)(
                    q.transpose(0, 1)[None],
                    *keys_of(common, cache, request).split(D, dim=-1),
                    scale=0.3,
                    remaining=remaining[request],
                )[0].transpose(0, 1)
                for request, q in enumerate(query.split(queries))
            ]
            assert torch.equal(out, torch.cat(alone))


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    "own",
    [{}, {"softcap": 3.0}, {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, float("-inf")])}],
    ids=len,
)
def test_a_layer_has_its_softcap_and_sinks(
    dense: bool, own: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its executor cannot run: each call is recorded as dense, and the reason is said once."""
    q, k, v = make_qkv(Hq=4, Hkv=2, N=160, D=16)
    pipeline, recorder = bs.a_shape(sink=16, local=32, block=16), DensityRecorder()
    expected = dense_attention(q, k, v, AttentionSpec(scale=0.3, **own))
    if dense:
        pipeline = evolve(pipeline, executor=bs.Int8Executor())
    else:
        expected = pipeline(q, k, v, scale=0.3, **own)
    layer = 7 + len(own)
    attend = PagedAttention(pipeline, layer, recorder, Workspace(160), **own)
    for _ in range(2):
        torch.testing.assert_close(of_one_prompt(attend, q, k, v, scale=0.3), expected)
    reasons = [(reason.split(":")[0], times) for reason, times in recorder.dense_calls().get(layer, {}).items()]
    assert reasons == ([("Int8Executor", 2)] if dense else [])
    assert caplog.text.count(f"prompts are dense in layer {layer}: ") == dense


def test_a_batch_without_sparse_prompts_asks_for_nothing() -> None:
    common = batch_of([1, 3], [40, 30])
    found = split([1, 3], [40, 30])
    batch = SplitMetadata.of(
        common, found, [40, 30], page_size=16, build=lambda _: pytest.fail("nothing to build")
    )
    assert batch.prefills is None
    assert batch.reasons == Counter({"decode": 1, "fewer than min_queries": 1})


@pytest.mark.parametrize("dense_below", [None, 0, 1e6])
def test_whether_a_request_pays_follows_from_its_sizes(dense_below: float | None) -> None:
    worth = Worth.of(dense_below, torch.empty(()), heads=8, kv_heads=2, head_dim=16)
    some, everything = bs.a_shape(sink=16, local=32, block=16), bs.a_shape(sink=16, local=512, block=16)
    assert worth.dense_because(some, 16, 64) == ("little work" if dense_below == 1e6 else None)
    assert worth.dense_because(some, 500, 500) is None
    assert worth.dense_because(everything, 500, 500) == "every block is kept"
    assert worth.dense_because(bs.HeadGroups({(0,): everything, (1,): None}), 500, 500) == "every block is kept"
    assert worth.dense_because(bs.HeadGroups({(0,): everything, (1,): some}), 500, 500) is None
    if dense_below != 1e6:  # which keeps every block, and leaves out tiles of them
        assert worth.dense_because(bs.skip_softmax(), 500, 500) is None


@pytest.mark.parametrize(
    ("gpu", "dtype", "given", "dense_below"),
    [
        (True, torch.bfloat16, None, 1.5e11),
        (True, torch.bfloat16, 0, 0),
        (True, torch.float32, None, 6e10),
        (False, torch.bfloat16, None, None),
    ],
)
def test_less_work_pays_in_an_engine(
    gpu: bool, dtype: torch.dtype, given: float | None, dense_below: float | None
) -> None:
    like: Any = SimpleNamespace(is_cuda=gpu, dtype=dtype, new_empty=torch.empty)
    assert Worth.of(given, like, heads=8, kv_heads=2, head_dim=16).executor.dense_below == dense_below


def test_layers_of_equal_pipelines_are_split_alike() -> None:
    """A plan makes a pipeline for each layer; a batch is split once for all that are equal."""
    pipelines = bs.a_shape(local=64), None, evolve(bs.a_shape(local=64)), bs.a_shape(local=512)
    settings = Settings(pipelines, min_tokens=1, min_queries=2)
    worth = Worth.of(None, torch.empty(()), heads=4, kv_heads=2, head_dim=16)
    kinds = Kinds.of(filter(None, settings.layers), settings, worth)
    assert [kinds.index(p) for p in settings.layers if p is not None] == [0, 0, 1]
    narrow, wide = kinds.splits([0, 1, 301, 1501], [50, 300, 1200])
    assert ([*narrow.sparse], [*wide.sparse]) == ([1, 2], [2])
    assert wide.reasons == Counter({"decode": 1, "every block is kept": 1})


def test_sizes_to_warm_with() -> None:
    found = list(sizes(2048, 9000, 131072))
    assert found[0] == (2048, 131072)  # by which memory is measured
    assert found[-1] == (2048, 9000)
    assert len(set(found)) == len(found) < 300
    assert all(1 < M <= min(2048, N) and 9000 <= N <= 131072 for M, N in found)
    settings = Settings((), min_tokens=512, min_queries=64)
    worth = Worth.of(1e9, torch.empty(()), heads=8, kv_heads=2, head_dim=128)
    least = not_none(pays_from(bs.mean_pooling(), worth, settings, queries=512, tokens=4096))
    assert worth.dense_because(bs.mean_pooling(), 512, least) is None
    assert worth.dense_because(bs.mean_pooling(), 512, least - 1) == "little work"
    assert pays_from(bs.mean_pooling(), worth, settings, queries=32, tokens=4096) is None
    assert pays_from(bs.mean_pooling(), worth, settings, queries=512, tokens=least - 1) is None
    # A step that takes the longest prompt also takes shorter ones, each as a whole.
    least = not_none(pays_from(bs.mean_pooling(), worth, settings, queries=4096, tokens=4096))
    assert 512 < least < 2048
    assert worth.dense_because(bs.mean_pooling(), least, least) is None
    assert worth.dense_because(bs.mean_pooling(), least - 1, least - 1) == "little work"
    found = list(sizes(4096, least, 4096))
    assert {(N, N) for _, N in found} <= {*found}


def test_an_engine_is_warm_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace is there, and calls in it take no other; a pipeline that cannot run stops the engine.

    An audited call finds its kernels compiled, too.
    """
    settings = Settings((), min_tokens=1, min_queries=2)
    worth = Worth.of(0, torch.empty(()), heads=4, kv_heads=2, head_dim=16)
    query, out = torch.randn(64, 4, 16), torch.full((64, 4, 16), float("nan"))
    workspace = Workspace(300)
    attention = PagedAttention(bs.mean_pooling(block=16), 0, None, workspace)
    assert warm(attention, worth, settings, query, out, tokens=300, page_size=16) > 0
    assert workspace.nbytes == 300 * 2 * 2 * 16 * 4
    assert (out[:64] == 0).all()  # of values that are 0
    eight = PagedAttention(bs.sparge(executor=bs.Int8Executor()), 5, None, Workspace(300))
    with pytest.raises(ConfigurationError, match=r"of layer 5 cannot run here: Int8Executor: "):
        warm(eight, worth, settings, query, out, tokens=300, page_size=16)
    traced: list[tuple[int, ...]] = []
    monkeypatch.setattr(bs.Pipeline, "trace", lambda _, q, *__, **___: traced.append(q.shape))
    for gauges in (None, AuditGauges(Audit())):
        attention = PagedAttention(bs.mean_pooling(block=16), 0, None, Workspace(300), gauges)
        warm(attention, worth, settings, query, query.clone(), tokens=300, page_size=16)
    assert traced == [(1, 4, 64, 16)]


def test_settings() -> None:
    given = {"preset": "pbs_attn", "settings": {"mass": 0.8}, "dense": [0, -1], "min_tokens": 4096, "record": True}
    settings = Settings.of({"blocksparse": given, "other": 1}, SERVED, HOST)
    first, second, third, last = settings.layers
    assert first is last is None
    # The engine decides what is dense, so that what a pipeline gets runs its stages.
    assert second == third == bs.pbs_attn(0.8, executor=bs.AutoExecutor(dense_below=0))
    assert (settings.min_tokens, settings.min_queries, settings.record) == (4096, 64, True)
    assert settings.dense_below is None


@pytest.mark.parametrize(
    ("given", "pipeline"),
    [
        ({"quality": "careful"}, bs.auto("careful")),
        ({"preset": "auto", "quality": "fast", "dense_below": 1e12}, bs.auto("fast")),
        ({"preset": "sparge", "executor": "int8"}, bs.sparge(executor=bs.Int8Executor())),
        ({"preset": "sparge", "executor": "triton"}, bs.sparge(executor=bs.TritonExecutor())),
    ],
)
def test_settings_of_a_preset(given: dict[str, Any], pipeline: bs.Pipeline[Any, Any, Any]) -> None:
    settings = Settings.of({"blocksparse": given}, SERVED, HOST)
    executor = pipeline.executor
    expected = (
        evolve(pipeline, executor=bs.AutoExecutor(dense_below=0))
        if isinstance(executor, bs.AutoExecutor)
        else pipeline
    )
    assert settings.layers == (expected,) * 4
    assert settings.dense_below == given.get("dense_below")


def mine(k: int) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(32), bs.TopK(k), bs.AutoExecutor())


def test_a_pipeline_of_ones_own() -> None:
    """A function in a module that the engine can import is named as a preset is, and takes what presets take."""
    given = {"preset": f"{__name__}:mine", "settings": {"k": 5}, "band": 256, "sink": 64, "dense": [0]}
    first, *others = Settings.of({"blocksparse": given}, SERVED, HOST).layers
    selector = bs.TopK(5) | (bs.Band(256) | bs.Sink(64))
    expected = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(32), selector, bs.AutoExecutor(dense_below=0))
    assert (first, *others) == (None, expected, expected, expected)


def numbers_of(heads: int) -> bs.Pipeline[Any, Any, Any]:
    return bs.mean_pooling([0.9] * heads)


def test_numbers_per_head_of_ones_own_pipeline_are_for_this_model() -> None:
    """Each GPU would take numbers for as many heads as it has for its own, whichever these are."""

    def settings(heads: int, ranks: int) -> Settings:
        given = {"preset": f"{__name__}:numbers_of", "settings": {"heads": heads}}
        return Settings.of({"blocksparse": given}, evolve(SERVED, ranks=ranks), HOST)

    assert settings(8, 1).layers[0]
    for ranks in (1, 2):
        with pytest.raises(ConfigurationError, match="'mass' has 4 entries for 8 query heads"):
            settings(4, ranks)
    with pytest.raises(ConfigurationError, match="must have one number for all heads, because each of 2 GPUs"):
        settings(8, 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (7, "it must be an object with some of preset, quality, settings, band, sink, executor, plan, dense, "),
        ({"preset": "pbs_attn", "tau": 1}, "there is no 'tau'. There are preset, quality, settings, band, "),
        (
            {"preset": "sparge", "quality": "fast"},
            "'quality' is an argument of the preset 'auto', and must be given ",
        ),
        ({"quality": "good"}, "'quality' must be 'careful', 'balanced' or 'fast': 'good'"),
        ({"quality": "fast", "plan": "x"}, "it must have one of 'preset' and 'plan': {"),
        ({"preset": "auto", "band": -1}, "'tokens' must be a whole number, at least 0: -1"),
        (
            {"preset": "auto", "executor": "int4"},
            "there is no executor 'int4'. There are auto, triton, int8, flex",
        ),
        ({"preset": "auto", "dense_below": -1}, "'dense_below' must be a number of floating-point operations"),
        ({"plan": "no-plan.json", "sink": 1}, "a plan says what each layer does, so 'sink' must be left out"),
        ({}, "it must have one of 'preset' and 'plan': {}"),
        ({"preset": "s2o", "plan": "x"}, "it must have one of 'preset' and 'plan': {"),
        ({"preset": "pbs"}, "there is no preset 'pbs'. There are auto, pbs_attn, "),
        ({"preset": ["s2o"]}, "there is no preset ['s2o']. There are "),
        ({"preset": "no_such:f"}, "there is no preset 'no_such:f': No module named 'no_such'. Add the folder "),
        ({"preset": "xattention", "settings": 0.9}, "'settings' must be a Mapping: 0.9"),
        ({"preset": "xattention", "settings": {"mass": 2}}, "'mass' must be "),
        (
            {"preset": "xattention", "settings": {"mass": [0.5]}},
            "'mass' must have a number per query head (8): [0.5]",
        ),
        ({"preset": "xattention", "settings": {"masses": 0.5}}, "unexpected keyword argument 'masses'"),
        ({"preset": "xattention", "dense": [9]}, "there is no layer 9: the model has 4, 0 to 3"),
        ({"preset": "xattention", "dense": 1}, "'dense' must be a sequence of whole numbers: 1"),
        ({"preset": "xattention", "min_tokens": 0}, "'min_tokens' must be a whole number, at least 1: 0"),
        ({"preset": "xattention", "min_tokens": "1k"}, "'min_tokens' must be a whole number, at least 1: '1k'"),
        ({"preset": "xattention", "min_queries": 1}, "'min_queries' must be above 1, the most "),
        ({"preset": "xattention", "record": 1}, "'record' must be True or False: 1"),
        ({"preset": "auto", "audit": {"fall_back": True}}, "'audit' must be an object with some of rows, every, "),
        ({"preset": "auto", "audit": {"every": 0}}, "'every' must be a whole number, at least 1: 0"),
        ({"plan": 3}, "'plan' must be the path of a file: 3"),
        ({"plan": "no-plan.json", "dense": [1]}, "a plan says what each layer does, so 'dense' must be left out"),
        ({"plan": "no-plan.json"}, "the plan cannot be read: no-plan.json"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(given: object, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Settings.of({"blocksparse": given}, SERVED, HOST)
    assert str(error.value).startswith("'blocksparse' in --additional-config cannot be used: ")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def refused(sentence: str, additional: object, served: Served = SERVED) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Settings.of(additional, served, HOST)


@pytest.mark.parametrize("additional", [{}, {"other": 1}, None, {"blocksparse": None}])
def test_no_configuration_is_one_sentence(additional: object) -> None:
    refused(r"^the attention backend BLOCKSPARSE needs to know what to run\. ", additional)


def test_what_does_not_go_with_several_gpus_or_drafts() -> None:
    given = {"blocksparse": {"preset": "pbs_attn", "settings": {"mass": [0.9] * 8}}}
    Settings.of(given, SERVED, HOST)
    spread, drafting = Served("llama", 4, 8, 2, ranks=2), Served("llama", 4, 8, 2, draft_tokens=40)
    refused("'mass' must be one number for all heads, because each of 2 GPUs ", given, spread)
    refused(
        "'min_queries' must be above 81, the most queries that a ", {"blocksparse": {"preset": "s2o"}}, drafting
    )


def plan_file(folder: Path, heads: tuple[int, ...] | None) -> str:
    pytest.importorskip("cattrs")
    pytest.importorskip("scipy")
    from tests.tune.tiny import evidence

    from blocksparse.presets.named import Candidate
    from blocksparse.presets.plan import Fingerprint, Part, Plan

    chosen = Candidate("pbs_attn", {"mass": 0.8})
    parts = [Part(0, heads, chosen, 0.3, 0.0, 0.0, 1.0), Part(1, None, None, 1.0, 0.0, 0.0, 1.0)]
    if heads is not None:
        parts.append(Part(0, (1,), None, 1.0, 0.0, 0.0, 1.0))
    plan = Plan(Fingerprint("tiny", "llama", 2, 8, 2, "0" * 32), tuple(parts), evidence())
    plan.save(folder / "plan.json")
    return str(folder / "plan.json")


def test_a_plan_says_what_each_layer_does(tmp_path: Path) -> None:
    given = {"blocksparse": {"plan": plan_file(tmp_path, None), "min_tokens": 2048}}
    settings = Settings.of(given, Served("llama", 2, 8, 2, ranks=2), HOST)
    assert isinstance(settings.layers[0], bs.Pipeline)
    assert settings.layers[1] is None
    refused(r"made for another model, tiny \(it differs in layers: 2 and 4\)", given)


def test_a_plan_for_single_heads_needs_all_heads(tmp_path: Path) -> None:
    given = {"blocksparse": {"plan": plan_file(tmp_path, (0,))}}
    layer = Settings.of(given, Served("llama", 2, 8, 2), HOST).layers[0]
    assert isinstance(layer, bs.HeadGroups)
    assert [part and part.executor for part in layer.groups.values()] == [bs.AutoExecutor(dense_below=0), None]
    sentence = "the plan chooses for single heads in layer 0, but each of 2 GPUs"
    refused(sentence, given, Served("llama", 2, 8, 2, ranks=2))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"attn_type": "encoder_only"}, "not causal"),
        ({"attn_type": "encoder"}, "not causal"),
        ({"attn_type": "encoder_decoder"}, "cross attention"),
        ({"kv_cache_dtype": "bfloat16"}, None),
        ({"kv_cache_dtype": "float16"}, "KV cache in float16"),
        ({"dtype": torch.float32, "kv_cache_dtype": "bfloat16"}, "KV cache in bfloat16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache in fp8_e4m3"),
        ({"head_size": 512}, "head dim above 256"),
        ({"options": {"sliding_window": 128}}, "sliding window"),
        ({"options": {"alibi_slopes": [0.5]}}, "position bias"),
        ({"options": {"logits_soft_cap": 30.0, "sinks": torch.zeros(4)}}, None),
        ({"options": {"sinks": None, "alibi_slopes": [0.5]}}, "position bias"),
        ({"options": {"something_new": 1}}, "something_new"),
    ],
)
def test_layers_that_cannot_go_sparse(changed: dict[str, Any], reason: str | None) -> None:
    plain: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "attn_type": "decoder", "options": {},
    }  # fmt: skip
    assert dense_because(**plain | changed) == reason


def config_of(additional: object, *impls: object) -> Any:
    text = SimpleNamespace(model_type="llama", num_hidden_layers=2, num_attention_heads=4)
    layers = {f"model.layers.{i}.attn": SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    return SimpleNamespace(
        additional_config=additional,
        model_config=SimpleNamespace(hf_text_config=text, max_model_len=1024),
        speculative_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        cache_config=SimpleNamespace(block_size=32),
    )


def test_all_layers_of_an_engine_share_its_record() -> None:
    given = {"blocksparse": {"preset": "pbs_attn", "dense": [1], "record": True}}
    assert is_configured(config_of(given))
    assert not is_configured(config_of({}))
    first = Engine.of(config_of(given, SimpleNamespace()))
    assert first.page_size == 32
    assert Engine.of(config_of(given, SimpleNamespace(), SimpleNamespace(engine=first))) is first
    attention = first.attention(0)
    assert isinstance(attention, PagedAttention)
    assert attention.recorder is first.recorder is not None
    assert first.attention(1) == "no pipeline for this layer"
    assert first.attention(2) == "no layer of the model"

    reader = RecordReader()
    reader.vllm_config = config_of(given, SimpleNamespace(engine=first))
    first.recorder.saw_dense(0, "decode")
    assert "1 x decode" in reader.blocksparse_table()
    reader.blocksparse_clear()
    assert "decode" not in reader.blocksparse_table()
    some, none = split([1, 120, 20], [50, 120, 20]), split([1, 120, 20], [50, 120, 20], pays=lambda *_: "no")
    assert Split.sparsest([none, some]) is some
    first.counters.saw(some.prompts, some.queries)
    assert (
        reader.blocksparse_counters() == "prompts: 1 x fewer than min_tokens (20 tokens), 1 x sparse (120 tokens)"
    )
    assert reader.blocksparse_audit().startswith("nothing is audited: ")
    silent = config_of({"blocksparse": {"preset": "pbs_attn", "audit": {}}})
    reader.vllm_config = silent
    assert reader.blocksparse_table().startswith("no layer has a pipeline: ")
    reader.vllm_config = config_of({}, SimpleNamespace(engine=Engine.of(silent)))
    assert reader.blocksparse_table().startswith("nothing is recorded: ")
    reader.blocksparse_clear()
    assert reader.blocksparse_audit().split()[:3] == ["layer", "calls", "audited"]


class Worker:
    """A worker of vLLM, whose step asks what it knows of its requests."""

    def __init__(self, runner: Any, places: Any = None) -> None:
        self.model_runner, self.places = runner, places

    def execute_model(self, scheduled: Any) -> Any:
        running = not_none(Requests.running.get())
        return running.of_rows(scheduled.rows, self.places)


def step(rows: int, finished: set[str] = frozenset(), **new: Any) -> Any:  # type: ignore[assignment]
    """A SchedulerOutput with new requests, by the word in their `extra_args`; None if they have none."""
    requests = [
        SimpleNamespace(req_id=name, sampling_params=None if word is None else SimpleNamespace(extra_args=word))
        for name, word in new.items()
    ]
    return SimpleNamespace(rows=rows, finished_req_ids=finished, scheduled_new_reqs=requests)


def test_what_a_worker_knows_of_its_requests() -> None:
    batch = SimpleNamespace(req_ids=["a", "b"], num_reqs=2, num_tokens_no_spec=np.array([700, 90, 0]))
    states = SimpleNamespace(
        index_to_req_id={5: "a", 2: "b"}, prefill_len=SimpleNamespace(np=np.array([0, 0, 90, 0, 0, 700]))
    )
    for runner, places in (
        (SimpleNamespace(input_batch=batch), None),
        (SimpleNamespace(req_states=states), np.array([5, 2])),
    ):
        watch(Worker)
        watch(Worker)
        worker = Worker(runner, places)
        off = {"another": 1, "blocksparse": False}
        assert worker.execute_model(step(2, a=off, b=None)) == [(700, True), (90, False)]
        assert worker.execute_model(step(3)) == [(700, True), (90, False), (0, False)]  # the last one pads
        assert worker.execute_model(step(2, finished={"a"}, b={"blocksparse": 0})) == [(700, False), (90, True)]
        assert worker.execute_model(step(2, b={})) == [(700, False), (90, False)]
        assert Requests.running.get() is None
    assert Worker(SimpleNamespace(input_batch=batch)).execute_model(step(1)) is None  # a part of the batch
    assert Worker(SimpleNamespace(req_states=states)).execute_model(step(2)) is None


def test_versions_that_tell_nothing_and_words_that_mean_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch(Worker)
    assert Worker(SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a"]))).execute_model(step(1)) is None
    assert "vLLM does not tell here how long prompts are" in caplog.text
    batch = SimpleNamespace(req_ids=["a"], num_reqs=1, num_tokens_no_spec=np.array([70]))
    worker = Worker(SimpleNamespace(input_batch=batch))
    assert worker.execute_model(step(1, a={"blocksparse": "off"})) == [(70, False)]
    assert not vars(worker)["blocksparse_requests"].some_turned_off
    worker.execute_model(step(1, a={"blocksparse": False}))
    assert vars(worker)["blocksparse_requests"].some_turned_off
    assert "must be false or true, and is ignored: 'off'" in caplog.text


def test_names_of_layers() -> None:
    assert layer_of("model.layers.13.self_attn.attn") == 13
    assert layer_of("attn") == 0


def test_vllm_finds_the_plugin() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "blocksparse": f"{register.__module__}:{register.__name__}"
    }
