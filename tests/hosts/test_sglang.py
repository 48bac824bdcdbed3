"""What of the SGLang backend needs no SGLang: attention to a batch over a cache of single slots.

The backend itself runs inside of SGLang in `tests_sglang`.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse import LastQueries, Pipeline, a_shape
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.hosts.serving.layer import PagedAttention, Workspace
from blocksparse.hosts.serving.settings import ConfigurationError, Host, Served, Settings
from blocksparse.hosts.serving.worth import Kinds, Worth
from blocksparse.hosts.sglang import DensityRecorder, _note_prompts
from blocksparse.hosts.sglang.batch import PROMPTS, Batch, SparseExtend
from blocksparse.spec import AttentionSpec

HQ, HKV, D = 4, 2, 16


class Cache:
    """As much of SGLang's pool of keys and values as is used, with a slot per token."""

    def __init__(self, slots: int) -> None:
        self.keys, self.values = (torch.full((slots, HKV, D), float("nan")) for _ in range(2))

    def set_kv_buffer(self, layer: Any, loc: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[loc], self.values[loc] = k, v

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.values


class Stock:
    """A stock backend in plain torch, as SGLang's own: it reads a ForwardBatch, and what the cache holds."""

    def __init__(self, cache: Cache, slots: Tensor) -> None:
        self.cache, self.slots = cache, slots
        self.prepared: list[Any] = []

    def init_forward_metadata(self, batch: Any) -> None:
        self.prepared.append(batch)

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> Tensor:
        if save_kv_cache:
            self.cache.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        return attended(dense, q, self.cache, self.slots, batch, layer.scaling)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return dense_attention(q, k, v, AttentionSpec(scale=scale))


def attended(attend: Any, q: Tensor, cache: Cache, slots: Tensor, batch: Any, scale: float) -> Tensor:
    """Each request by itself. The output is `[tokens, Hq * D]`."""
    rows, start = [], 0
    for request, queries, total in zip(batch.req_pool_indices, batch.extend_seq_lens, batch.seq_lens, strict=True):
        own = slots[request, : int(total)]
        query = q.view(-1, HQ, D)[start : start + int(queries)]
        q1, k, v = (x.transpose(0, 1)[None] for x in (query, cache.keys[own], cache.values[own]))
        rows.append(attend(q1, k, v, scale)[0].transpose(0, 1).flatten(1))
        start += int(queries)
    return torch.cat(rows)


UNSET = (
    "req_pool_indices_cpu", "orig_seq_lens", "out_cache_loc_virtual", "extend_logprob_start_lens_cpu", "lora_ids",
    "rids", "mm_inputs", "encoder_lens", "cross_attention_custom_mask", "multi_item_delimiter_indices",
    "_attn_output",
)  # fmt: skip


def forward_batch(queries: list[int], contexts: list[int], slots: Tensor, **changed: Any) -> Any:
    requests = list(range(len(queries)))[::-1]
    keys = [context + count for context, count in zip(contexts, queries, strict=True)]
    loc = torch.cat([slots[r, c:n] for r, c, n in zip(requests, contexts, keys, strict=True)])
    fields = {
        "forward_mode": SimpleNamespace(name="EXTEND"),
        "batch_size": len(queries),
        "input_ids": torch.arange(sum(queries)),
        "positions": torch.arange(sum(queries)),
        "req_pool_indices": torch.tensor(requests),
        "seq_lens": torch.tensor(keys),
        "seq_lens_cpu": torch.tensor(keys),
        "out_cache_loc": loc,
        "extend_seq_lens": torch.tensor(queries, dtype=torch.int32),
        "extend_prefix_lens": torch.tensor(contexts, dtype=torch.int32),
        "extend_start_loc": torch.zeros(len(queries), dtype=torch.int32),
        "extend_seq_lens_cpu": queries,
        "extend_prefix_lens_cpu": contexts,
    }
    return SimpleNamespace(**dict.fromkeys(UNSET) | fields | changed)


class Engine:
    """One layer, whose keys and values of earlier steps are in the cache."""

    def __init__(self, pipeline: Pipeline[Any, Any, Any], queries: list[int], contexts: list[int]) -> None:
        room = 400
        self.slots = torch.randperm(room * len(queries)).view(len(queries), room)
        self.cache = Cache(room * len(queries))
        self.batch = forward_batch(queries, contexts, self.slots)
        for request, context in zip(self.batch.req_pool_indices, contexts, strict=True):
            own = self.slots[request, :context]
            self.cache.set_kv_buffer(None, own, *torch.randn(2, context, HKV, D))
        self.q = torch.randn(sum(queries), HQ * D)
        self.k, self.v = torch.randn(2, sum(queries), HKV, D)
        self.layer = SimpleNamespace(layer_id=3, tp_q_head_num=HQ, qk_head_dim=D, v_head_dim=D, scaling=0.3)
        self.recorder, self.pipeline = DensityRecorder(), pipeline
        self.stock, self.rest = Stock(self.cache, self.slots), Stock(self.cache, self.slots)
        settings = Settings((), min_tokens=100, min_queries=16, dense_below=0)
        worth = Worth.of(0, torch.empty(()), heads=HQ, kv_heads=HKV, head_dim=D)
        made: Any = {"stock": self.stock.forward_extend, "rests": [self.rest], "recorder": self.recorder}
        made |= {"slots": self.slots, "cache": self.cache, "write_loc": lambda batch, layer: batch.out_cache_loc}
        self.prefill = SparseExtend(layers={}, kinds=Kinds.of([pipeline], settings, worth), **made)

    def __call__(self, attention: PagedAttention | str | None = None, **options: Any) -> Tensor:
        # A module of SGLang can be a key, a SimpleNamespace cannot.
        self.prefill.layers = Always(attention or PagedAttention(self.pipeline, 3, self.recorder, Workspace(400)))
        out: Tensor = self.prefill(self.q, self.k, self.v, self.layer, self.batch, **options)
        return out

    def alone(self, attend: Any) -> Tensor:
        return attended(attend, self.q, self.cache, self.slots, self.batch, 0.3)


class Always(dict[Any, Any]):
    """One value for every key."""

    def __init__(self, value: object) -> None:
        self.value = value

    def get(self, key: object, default: object = None) -> Any:
        return self.value


@pytest.mark.parametrize("queries", [[1, 120, 1, 64], [130, 1, 70], [150, 90]], ids=["first", "between", "none"])
def test_sparse_prompts_and_the_rest(queries: list[int]) -> None:
    """Each request sees its own slots, cached ones too, and the stock backend a batch of the others."""
    contexts = [30 + 7 * i for i in range(len(queries))]
    engine = Engine(a_shape(sink=16, local=32, block=16), queries, contexts)
    out = engine()

    def either(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        sparse = q.shape[2] > 1
        return engine.pipeline(q, k, v, scale=scale) if sparse else dense(q, k, v, scale)

    torch.testing.assert_close(out, engine.alone(either), rtol=0, atol=2e-6)
    assert not torch.allclose(out, engine.alone(dense), atol=1e-3)
    decodes, sparse = queries.count(1), len(queries) - queries.count(1)
    assert [batch.batch_size for batch in engine.rest.prepared] == ([decodes] if decodes else [])
    assert engine.recorder.sparse_calls() == {3: sparse}
    assert engine.recorder.dense_calls() == ({3: Counter(decode=decodes)} if decodes else {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sinks": torch.ones(HQ)}, "attention sinks"),
        ({"score_mod": len}, "score_mod"),
        ({"return_lse": True}, "return_lse"),
    ],
)
def test_calls_that_mean_something_else_are_stock(options: dict[str, Any], reason: str) -> None:
    engine = Engine(a_shape(sink=16, local=32, block=16), [120, 1], [30, 30])
    out = engine(**options)
    torch.testing.assert_close(out, engine.alone(dense))
    assert engine.recorder.dense_calls() == {3: Counter({"decode": 1, reason: 1})}
    engine(sinks=None, score_mod=None, return_lse=False)
    assert engine.recorder.sparse_calls() == {3: 1}


def test_dense_layers() -> None:
    engine = Engine(a_shape(sink=16, local=32, block=16), [120], [30])
    torch.testing.assert_close(engine("softcap"), engine.alone(dense))
    assert engine.recorder.dense_calls() == {3: Counter(softcap=1)}


@pytest.mark.parametrize("shared", [False, True], ids=["written by the model's kernel", "of another layer"])
def test_keys_that_are_in_the_cache_already(shared: bool) -> None:
    """Of qwen3_moe and others, which say so; and of layers that share keys, which bring none."""
    engine = Engine(a_shape(sink=16, local=32, block=16), [120, 1, 64], [30, 7, 60])
    expected = engine().clone()
    if shared:
        engine.k = engine.v = None
    else:
        engine.k, engine.v = (torch.full_like(x, float("nan")) for x in (engine.k, engine.v))
    torch.testing.assert_close(engine(save_kv_cache=False), expected, rtol=0, atol=0)
    assert engine.recorder.sparse_calls() == {3: 4}


def test_pictures_stay_dense() -> None:
    engine = Engine(a_shape(sink=16, local=32, block=16), [120, 130], [30, 30])
    engine.batch.mm_inputs = [None, object()]
    engine()
    assert engine.recorder.sparse_calls() == {3: 1}
    assert engine.recorder.dense_calls() == {3: Counter(mask=1)}


def test_a_chunk_knows_what_remains_of_its_prompt() -> None:
    """Of batches that SGLang makes in other ways it is not known, and each chunk ends its prompt."""
    pipeline = a_shape(1, 16, block=16) | LastQueries(40)
    engine = Engine(pipeline, [100, 60], [0, 100])
    reqs = [SimpleNamespace(full_untruncated_fill_ids=[0] * n) for n in (300, 160)]
    output = _note_prompts(engine.batch, object, SimpleNamespace(reqs=reqs))
    assert output is engine.batch
    assert getattr(output, PROMPTS) == [300, 160]
    for prompts, remaining in (([300, 160], (200, 0)), ([300], (0, 0)), (None, (0, 0))):
        setattr(engine.batch, PROMPTS, prompts)
        found = Batch.of_kinds(engine.batch, tokens=160, slots=engine.slots, kinds=engine.prefill.kinds)[0]
        assert found.prefills is not None
        assert found.prefills.remaining == remaining


def test_the_same_batch_again_is_read_again() -> None:
    """SGLang may fill one ForwardBatch anew. A layer that comes again is the sign of it."""
    engine = Engine(a_shape(sink=16, local=32, block=16), [120], [30])
    engine()
    other = Engine(engine.pipeline, [110], [45])
    for name, value in vars(other.batch).items():
        setattr(engine.batch, name, value)
    engine.slots.copy_(other.slots)
    engine.cache.keys, engine.cache.values = other.cache.keys, other.cache.values
    engine.q, engine.k, engine.v = other.q, other.k, other.v
    torch.testing.assert_close(engine(), other(), rtol=0, atol=0)


def test_room_that_sglang_gives_for_the_output() -> None:
    engine = Engine(a_shape(sink=16, local=32, block=16), [120, 1], [30, 30])
    engine.batch._attn_output = given = torch.full((121, HQ * D), 7.0)
    assert engine() is given
    assert not (given == 7).any()


def test_sentences_name_the_option_of_sglang() -> None:
    host = Host("blocksparse", "--json-model-override-args")
    served = Served("llama", layers=4, heads=8, kv_heads=2)
    with pytest.raises(ConfigurationError, match=r"^the attention backend blocksparse needs .*. Add --json-"):
        Settings.of({}, served, host)
    with pytest.raises(ConfigurationError, match=r"^'blocksparse' in --json-model-.* cannot be used: "):
        Settings.of({"blocksparse": {"preset": "pbs"}}, served, host)
