"""Several prompts in one call: each is what it is alone, and keys in pages are what they are in one piece."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import blocksparse as bs
from blocksparse import presets
from blocksparse.custom_op import OpaqueCall, _attend, _attend_each, attend, call_op
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import HeadGroupsTrace
from blocksparse.spec import AttentionOptions
from blocksparse.testing import make_qkv
from tests import drawn
from tests.drawn import Case, cases
from tests.machine import needs_gpu
from tests.meaning import same
from tests.specs import asked
from tests.stages import DenseBelow
from tests.test_generated_laws import assert_same_call, law

# A grid order is made for one number of tokens.
MANY = cases(permuters=tuple(p for p in drawn.PERMUTERS[:-1] if p is not bs.GridOrder), sizes={"B": 1})
LENGTHS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), min_size=1, max_size=4)
SPARSE = bs.Pipeline(bs.SegmentKeySort(S=32), bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())


def packed(case: Case, lengths: list[tuple[int, int]], device: str) -> tuple[bs.Sequences, list[Tensor]]:
    """Prompts of drawn queries and earlier keys behind one another; not causal, every other has fewer keys."""
    queries = [M for M, _ in lengths]
    keys = [M + more if case.causal or i % 2 else more for i, (M, more) in enumerate(lengths)]
    queries, keys = [*queries, 1], [*keys, 1]  # no tensor is empty
    case = evolve(case, sizes=case.sizes | {"M": sum(queries), "N": sum(keys)})
    return bs.Sequences.packed(queries, keys), list(case.qkv(device))


@law(12, 100, MANY, LENGTHS)
def test_packed_prompts_are_one_by_one(device: str, case: Case, lengths: list[tuple[int, int]]) -> None:
    sequences, (q, k, v) = packed(case, lengths, device)
    out = case.pipeline(q, k, v, sequences=sequences, **case.call)
    traces = case.pipeline.trace(q, k, v, sequences=sequences, **case.call)
    assert len(traces) == len(sequences.spans)
    for span, trace in zip(sequences.spans, traces, strict=True):
        rows, keys = span.rows(out), span.columns(k).contiguous()
        if trace is None:
            assert 0 in (span.queries, span.keys)
            assert not rows.any()
            continue
        values, queries = span.columns(v).contiguous(), span.rows(q).contiguous()
        alone = case.pipeline.trace(queries, keys, values, **case.call)
        assert_same_call(trace, alone)
        assert same(rows, alone.output.out)


@law(10, 75, MANY, LENGTHS, st.data())
def test_what_is_not_finite_stays_in_its_prompt(
    device: str, case: Case, lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    sequences, (q, k, v) = packed(case, lengths, device)
    expected = case.pipeline(q, k, v, sequences=sequences, **case.call)
    span = data.draw(st.sampled_from(sequences.spans))
    spoiled = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    for x, bad, of in zip((q, k, v), spoiled, (span.rows, span.columns, span.columns), strict=True):
        of(bad).copy_(of(x))
    q, k, v = spoiled
    out = case.pipeline(q, k, v, sequences=sequences, **case.call)
    assert same(span.rows(out), span.rows(expected))


PADDING = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=3)


@law(10, 75, MANY, PADDING, st.integers(0, 99), st.sampled_from(["int64", "bool"]))
def test_a_padded_batch_is_packed_prompts(
    device: str, case: Case, rows: list[tuple[int, int, int]], share: int, dtype: str
) -> None:
    """Tokens and padding on both sides of each entry; the queries are all tokens or the last ones."""
    N = max(sum(row) for row in rows) + 1
    M = N - share * (N - 1) // 100
    case = evolve(case, sizes=case.sizes | {"B": len(rows), "M": M, "N": N})
    q, k, v = (x.clone() for x in case.qkv(device))
    mask = torch.zeros(len(rows), N, dtype=getattr(torch, dtype), device=device)
    for entry, (tokens, left, _) in enumerate(rows):
        mask[entry, left : left + tokens] = 1
    padding = (mask == 0)[:, None, :, None]
    k, v = k.masked_fill(padding, float("nan")), v.masked_fill(padding, float("nan"))
    q = q.masked_fill(padding[:, :, N - M :], float("nan"))
    out = case.pipeline(q, k, v, sequences=bs.Sequences.padded(mask, queries=M), **case.call)
    assert not out.where(padding[:, :, N - M :], 0.0).any()
    real = mask.bool()
    queries = [int(entry[N - M :].sum()) for entry in real]
    keys = [int(entry.sum()) if M else 0 for entry, M in zip(real, queries, strict=True)]
    if sum(queries):
        q, out = (torch.cat([x[b, :, real[b, N - M :]] for b in range(len(rows))], 1)[None] for x in (q, out))
        k, v = (torch.cat([x[b, :, real[b]][:, : keys[b]] for b in range(len(rows))], 1)[None] for x in (k, v))
        assert same(out, case.pipeline(q, k, v, sequences=bs.Sequences.packed(queries, keys), **case.call))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("groups", [False, True], ids=["pipeline", "head groups"])
@pytest.mark.parametrize("heads_inside", [False, True])
def test_a_graph_takes_any_sequences(groups: bool, heads_inside: bool, device: str) -> None:
    """It is compiled once, whatever the lengths, and as many as there are; and again for a call without any."""
    attention: Any = bs.HeadGroups({(1,): SPARSE, (0,): None}) if groups else SPARSE
    q, k, v = (x.to(device) for x in make_qkv(Hq=4, Hkv=2, N=120, D=16))
    if heads_inside:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    graphs = CompileCounter()
    compiled = torch.compile(lambda *x: attention(*x[:3], sequences=x[3]) + 1, backend=graphs, fullgraph=True)
    for more in range(12):
        sequences = bs.Sequences.packed([120 - 3 * more, *(more * [3])])
        out = compiled(q, k, v, sequences)
        assert same(out, attention(q, k, v, sequences=sequences) + 1)
        assert out.stride() == q.stride()
    assert graphs.frame_count == 1
    assert same(compiled(q, k, v, None), attention(q, k, v) + 1)
    with pytest.raises(ValueError, match="must sum to the tokens of q and k"):
        compiled(q, k, v, bs.Sequences.packed([119]))


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_what_ends_a_call_is_given_all_of_it_and_may_write(in_a_graph: bool, device: str) -> None:
    """Once, when the last prompt is attended; it is a part of the node of a graph, which nothing looks into."""
    ended: list[Any] = []

    def ends(out: Tensor, *rest: Any) -> None:
        ended.append([out.clone(), *rest])
        out[:, :, -1] = 7

    call, asked = OpaqueCall(dense_attention, ends=ends), AttentionOptions(window=9)
    q, k, v = (x.to(device) for x in make_qkv(Hq=4, Hkv=2, N=60, D=16))
    sequences = bs.Sequences(((0, 0, 20, 0, 20), (0, 20, 35, 20, 35)), batch=1, queries=60, keys=60)
    expected = attend(OpaqueCall(dense_attention), q, k, v, asked, sequences)
    if in_a_graph:
        out = call_op(call, q, k, v, 0.25, asked, sequences)
    else:
        out = attend(call, q, k, v, asked, sequences)
    [[attended, *inputs, spec, of]] = ended
    assert same(attended, expected)
    assert not attended[:, :, 55:].any()
    assert all(same(one, other) for one, other in zip(inputs, (q, k, v), strict=True))
    assert (spec.window, of) == (9, sequences)
    assert same(out, expected.index_fill(2, torch.tensor([59], device=q.device), 7))
    attend(call, q, k, v, asked)
    assert len(ended) == 1  # a call of one prompt has no such end


@pytest.mark.parametrize("op", [_attend, _attend_each], ids=str)
@pytest.mark.parametrize("tokens_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_ops_keep_the_rules_of_ops(op: Any, tokens_first: bool, device: str) -> None:
    q, k, v = (x.to(device) for x in make_qkv(Hq=4, Hkv=2, N=60, D=16, Dv=8))
    if tokens_first:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # the schema's own test takes no opaque objects
    several = () if op is _attend else (bs.Sequences.packed([40, 20]),)
    given = (q, k, v, SPARSE._call, *several, [1.0, 0.125, 0.0, 0.0], None, 0)
    torch.library.opcheck(op, given, test_utils=checks)
    assert op(*given).transpose(1, 2).is_contiguous() == tokens_first
    assert several or torch.equal(op(*given), SPARSE(q, k, v, scale=0.125))


def test_each_prompt_has_the_executor_that_it_has_alone(device: str) -> None:
    pipeline = evolve(SPARSE, executor=DenseBelow(60))
    q, k, v = (x.to(device) for x in make_qkv(N=150, D=16))
    short, long = pipeline.trace(q, k, v, sequences=bs.Sequences.packed([50, 100]))
    assert short is not None
    assert long is not None
    assert bool((short.visited.keep == short.visited.grid.visible).all())
    assert not bool((long.visited.keep == long.visited.grid.visible).all())


EXECUTORS = (bs.TritonExecutor(), bs.AutoExecutor(dense_below=0), bs.CpuExecutor(), bs.ReferenceExecutor())


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("permuter", [bs.SegmentKeySort(S=32), bs.SegmentQuerySort(S=32, block=32)], ids=repr)
@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda executor: type(executor).__name__)
def test_an_executor_writes_its_rows_and_no_others(
    executor: Any, permuter: Any, tokens_first: bool, device: str
) -> None:
    """Bit for bit what the call gives, in the part of a tensor that a pipeline names, whatever its strides."""
    if isinstance(executor, bs.CpuExecutor) and device != "cpu":
        pytest.skip("it takes CPU tensors")
    q, k, v = make_qkv(N=150, M=90, D=32, dtype=torch.float16, device=device)
    permutation = permuter(q, k, bs.AttentionSpec(scale=0.2))
    mask = bs.TopK(3)(bs.MeanPoolScorer(32)(q, k, permutation, bs.AttentionSpec(scale=0.2)))
    everything = torch.full((1, 200, q.shape[1], 32) if tokens_first else (1, q.shape[1], 200, 32), 7.0).to(q)
    everything = everything.transpose(1, 2) if tokens_first else everything
    executor(q, k, v, mask, asked(mask, 0.2), everything[:, :, 41:131])
    assert torch.equal(everything[:, :, 41:131], executor(q, k, v, mask, asked(mask, 0.2)).out)
    assert bool((everything[:, :, :41] == 7).all())
    assert bool((everything[:, :, 131:] == 7).all())


@pytest.mark.parametrize("executor", [*EXECUTORS[1:], bs.MeanCorrectionExecutor(bs.CpuExecutor())], ids=repr)
def test_an_executor_refuses_what_cannot_hold_its_output(executor: Any, device: str) -> None:
    q, k, v = make_qkv(N=64, M=40, D=16, Hq=2, Hkv=1, device="cpu")
    permutation = bs.Identity()(q, k, bs.AttentionSpec(scale=0.2))
    mask = bs.Everything()(bs.NoScorer(32)(q, k, permutation, bs.AttentionSpec(scale=0.2)))
    for error, out in (
        (TypeError, torch.zeros(1, 2, 40, 16, dtype=torch.float64)),
        (ValueError, torch.zeros(1, 2, 39, 16)),
        (ValueError, torch.zeros(2, 2, 40, 16)),
        (ValueError, torch.zeros(1, 2, 16, 40).mT),
        (ValueError, torch.zeros(1, 1, 40, 16).expand(1, 2, 40, 16)),
    ):
        with pytest.raises(error, match="'out' must have"):
            executor(q, k, v, mask, asked(mask, 0.2), out)


def test_a_history_is_freed_with_its_call() -> None:
    """Without the collector of cycles, which may leave a GPU's memory waiting for long."""
    q, k, v = make_qkv(N=64, D=16)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())
    history = bs.KeyHistory()
    freed = weakref.ref(history)
    gc.collect()
    gc.disable()
    try:
        pipeline(q, k, v, history=history)
        del history
        assert freed() is None
    finally:
        gc.enable()


def test_head_groups_trace_each_prompt() -> None:
    groups, (q, k, v) = bs.HeadGroups({(1,): SPARSE, (0,): None}), make_qkv(N=150, D=16)
    none, trace = groups.trace(q, k, v, sequences=bs.Sequences.packed([0, 150]))
    assert none is None
    assert isinstance(trace, HeadGroupsTrace)
    assert same(trace.output.out, groups(q, k, v))


def test_sequences_are_made_of_what_callers_have(device: str) -> None:
    expected = bs.Sequences([(0, 0, 3, 0, 5), (0, 3, 0, 5, 2), (0, 3, 2, 7, 2)], batch=1, queries=5, keys=9)
    ends_q, ends_k = [0, 3, 3, 5], [0, 5, 7, 9]
    for dtype in (torch.int32, torch.int64):
        tensors = [torch.tensor(x, dtype=dtype, device=device) for x in (ends_q, ends_k)]
        assert repr(bs.Sequences.from_cu_seqlens(*tensors)) == repr(expected)
        assert repr(bs.Sequences.packed(*(x.diff() for x in tensors))) == repr(expected)
    assert repr(bs.Sequences.from_cu_seqlens(ends_q, ends_k)) == repr(expected)
    assert repr(eval(repr(expected), vars(bs).copy())) == repr(expected)
    assert bs.Sequences.packed([3, 4]).keys == 7


def test_rows_of_no_prompt_are_zeros() -> None:
    """And prompts may share keys."""
    q, k, v = make_qkv(N=60, D=16)
    shared = bs.Sequences([(0, 5, 20, 0, 40), (0, 30, 30, 0, 60)], batch=1, queries=60, keys=60)
    out = SPARSE(q, k, v, sequences=shared)
    assert same(out[:, :, 5:25], SPARSE(q[:, :, 5:25], k[:, :, :40], v[:, :, :40]))
    assert same(out[:, :, 30:], SPARSE(q[:, :, 30:], k, v))
    assert not out[:, :, :5].any()
    assert not out[:, :, 25:30].any()


S: Any = bs.Sequences


CANNOT_BE: list[tuple[Any, type[Exception], str]] = [
    (lambda: S.packed([3, -1]), ValueError, r"'lengths' must not be below 0: \[3, -1\]"),
    (lambda: S.packed([3], [4, 5]), ValueError, r"'key_lengths' must have an entry per sequence \(1\): 2"),
    (lambda: S.packed([3.0]), TypeError, r"'lengths' must be a sequence of whole numbers.*: \[3.0\]"),
    (lambda: S.packed(3), TypeError, "'lengths' must be a sequence of whole numbers"),
    (lambda: S.packed(torch.ones(2)), TypeError, "'lengths' must be whole numbers along one axis"),
    (lambda: S.packed([3], torch.ones(1, 1).long()), TypeError, "'key_lengths' must be whole numbers along"),
    (lambda: S.from_cu_seqlens([0, 4, 3]), ValueError, r"'cu_seqlens_q' must begin with 0 and never fall"),
    (lambda: S.from_cu_seqlens([0, 4], [1, 4]), ValueError, "'cu_seqlens_k' must begin with 0"),
    (lambda: S.from_cu_seqlens([]), ValueError, "'cu_seqlens_q' must begin with 0"),
    (lambda: S.padded(torch.ones(2, 3)), TypeError, "'attention_mask' must be a tensor of whole numbers"),
    (lambda: S.padded(torch.ones(3).bool()), ValueError, r"'attention_mask' must have the shape \[B, N\]"),
    (lambda: S.padded(torch.tensor([[1, 0, 1]])), ValueError, "entry 0 has some inside. Its prompt lies"),
    (lambda: S.padded(torch.ones(1, 3).int(), queries=4), ValueError, r"'queries' must be at most .*\(3\): 4"),
    (lambda: S.padded(torch.ones(1, 3).int(), queries=0.5), TypeError, "'queries' must be a whole number"),
    (lambda: S([(0, 0, 1, 0)], batch=1, queries=2, keys=2), TypeError, "'spans' must have five whole numbers"),
    (lambda: S([(1, 0, 1, 0, 1)], batch=1, queries=2, keys=2), ValueError, "must lie in one of 1 entries"),
    (lambda: S([(0, 0, 1, 1, 2)], batch=1, queries=2, keys=2), ValueError, "must lie in 2 queries and 2 keys"),
    (
        lambda: S([(0, 1, 1, 0, 2), (0, 0, 2, 0, 2)], batch=1, queries=2, keys=2),
        ValueError,
        "'spans' must not share queries",
    ),
    (
        lambda: S.packed([3, 4], remaining=[1]),
        ValueError,
        r"'remaining' .* an entry per sequence \(2\): 1",
    ),
    (lambda: S.packed([3], remaining=[-1]), ValueError, "'remaining' must not be below 0"),
    (lambda: S.packed([3], remaining=[0.5]), TypeError, "'remaining' must be a sequence of whole"),
    (lambda: called(S.packed([100])), ValueError, "must sum to the tokens of q and k"),
    (
        lambda: called(S.packed([20, 30], [20, 30])),
        ValueError,
        "with 50 queries and 50 keys, but q and k have",
    ),
    (lambda: called(S.padded(torch.ones(2, 16).int())), ValueError, "lie in 2 entries of a batch"),
    (lambda: called(S.packed([10, 6], [9, 7])), ValueError, "sequence 0 has 10 queries and 9 keys"),
    (lambda: called([10, 6]), TypeError, r"'sequences' must be a Sequences or None: list. Sequences.packed"),
]


def called(sequences: Any) -> None:
    q, k, v = make_qkv(N=16, D=16)
    for run in (SPARSE, SPARSE.trace, bs.HeadGroups({(0, 1): SPARSE}), bs.HeadGroups({(0, 1): None}).trace):
        with pytest.raises((TypeError, ValueError)) as error:
            run(q, k, v, sequences=sequences)
    raise error.value


# Pages


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


@law(12, 125, PAGED, REQUESTS, st.data())
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


CANNOT_BE += [
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
]


@pytest.mark.parametrize(("make", "error", "said"), CANNOT_BE)
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
