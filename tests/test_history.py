"""Chunks: with a history the same bits, from new keys alone; with what remains known, the choice of one call."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import blocksparse as bs
from blocksparse.inputs import UnsupportedError
from blocksparse.kernels.score.block_mean import block_mean
from blocksparse.layers.reused_mask import MaskCache, ReusedMask
from blocksparse.pipeline_core import PipelineCore, seen, tail_of
from blocksparse.select.selector import Selector
from blocksparse.testing import every_preset, make_qkv
from tests import stages
from tests.layouts import LAYOUTS
from tests.machine import GPU, needs_gpu
from tests.on_kernels import pretend_gpu
from tests.stages import ByReference

SCORERS: tuple[bs.Scorer[Any, Any], ...] = (
    bs.MeanPoolScorer(16),
    bs.MeanPoolScorer(32, k_block=16, padded_tail=True),
    bs.AntidiagonalScorer(8, block=16, pattern="sum"),
    bs.VerticalSlashScorer(16),
    bs.SimilarityGatedScorer(bs.MeanPoolScorer(32, k_block=16), 0.3),
    bs.ScorerByCausality(bs.MeanPoolScorer(16), bs.NoScorer(16)),
)
each_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=stages.name)
# The keys that are there after each chunk.
CHUNKS = {
    "64": range(64, 321, 64),
    "63": range(63, 316, 63),
    "whole": (300,),
    "uneven": (5, 16, 17, 48, 127, 128, 250, 300),
    "1": range(1, 70),
}
each_chunks = pytest.mark.parametrize("ends", CHUNKS.values(), ids=CHUNKS)
SIZES: dict[str, Any] = {"B": 2, "Hq": 4, "Hkv": 2, "D": 16}


def a_pipeline(
    scorer: bs.Scorer[Any, Any], executor: bs.Executor[Any, Any] | None = None
) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(bs.Identity(), scorer, bs.TopK(2), executor or bs.ReferenceExecutor())


def chunks(ends: Any, *, device: str, start: int = 0, **sizes: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The queries of each chunk of a prompt, with all keys and values up to its end."""
    q, k, v = make_qkv(N=max(ends), device=device, **SIZES | sizes)
    for end in ends:
        yield q[:, :, start:end], k[:, :, :end], v[:, :, :end]
        start = end


def test_another_layer_or_prompt_needs_its_own(device: str) -> None:
    """Its keys have the same shapes, so that only the chunk tells: the first layer has taken it already."""
    pipeline, history = a_pipeline(bs.MeanPoolScorer(16)), bs.KeyHistory()
    layers = [list(chunks((64, 65, 150), device=device, seed=seed)) for seed in (0, 1)]
    for (q, k, v), other in zip(*layers, strict=True):
        pipeline(q, k, v, history=history)
        with pytest.raises(ValueError, match="Each layer and each prompt needs its own KeyHistory"):
            pipeline(*other, history=history)
        with pytest.raises(ValueError, match=f"has seen {k.shape[2]} keys, and the queries of this call begin at"):
            pipeline.trace(*other, history=history)
        assert history.tokens == k.shape[2]
    history.rewind(0)  # and it takes another prompt, of any shape
    q, k, v = make_qkv(N=20, D=32, device=device)
    assert torch.equal(pipeline(q, k, v, history=history), pipeline(q, k, v))
    assert repr(history) == "<KeyHistory of 20 tokens>"


@pytest.mark.skipif(GPU, reason="on a GPU the host would wait for the keys")
def test_layers_that_swap_histories_are_found(device: str) -> None:
    """The chunk tells nothing, since both stand before the same one. One that was rewound forgets the key."""
    pipeline, histories = a_pipeline(bs.MeanPoolScorer(16)), [bs.KeyHistory(), bs.KeyHistory()]
    layers = [list(chunks((64, 150), device=device, seed=seed)) for seed in (0, 1)]
    for layer, history in zip(layers, histories, strict=True):
        layer[0][1][0, 0, 63] = float("nan")
        pipeline(*layer[0], history=history)
    for layer, history in zip(layers, reversed(histories), strict=True):
        with pytest.raises(ValueError, match=r"key 63 has changed since\. Each layer and each prompt"):
            pipeline(*layer[1], history=history)
    for layer, history in zip(layers, histories, strict=True):
        assert torch.equal(pipeline(*layer[1], history=history), pipeline(*layer[1]))
        history.rewind(64)
        layer[1][1][0, 0, 149] += 1
        assert torch.equal(pipeline(*layer[1], history=history), pipeline(*layer[1]))


def test_queries_that_see_everything_may_come_again(device: str) -> None:
    """Not causal, they are no chunk of the keys: another set of them asks the same keys."""
    pipeline, history = a_pipeline(bs.MeanPoolScorer(16)), bs.KeyHistory()
    for seed in (0, 1):
        q, (_, k, v) = make_qkv(M=90, N=70, D=16, seed=seed, device=device)[0], make_qkv(N=70, D=16, device=device)
        got = pipeline(q, k, v, causal=False, history=history)
        assert torch.equal(got, pipeline(q, k, v, causal=False))


def assert_same_trace(mine: Any, its: Any) -> None:
    visible = its.scores.grid.visible
    assert torch.equal(mine.scores.values.where(visible, 0), its.scores.values.where(visible, 0))
    if its.scores.forced is not None:
        assert torch.equal(mine.scores.forced, its.scores.forced)
    assert torch.equal(mine.mask.keep, its.mask.keep)
    assert torch.equal(mine.output.out, its.output.out)


@each_scorer
@each_chunks
def test_chunks_are_the_same_bits(scorer: bs.Scorer[Any, Any], ends: Any, device: str) -> None:
    pipeline, history = a_pipeline(scorer), bs.KeyHistory()
    for q, k, v in chunks(ends, device=device):
        assert_same_trace(pipeline.trace(q, k, v, history=history), pipeline.trace(q, k, v))
        assert history.tokens == k.shape[2]


@pytest.mark.parametrize("scorer", [bs.MeanPoolScorer(64), SCORERS[4]], ids=stages.name)
@pytest.mark.parametrize("D", [7, 16, 80])
def test_heads_may_lie_inside_of_tokens(scorer: bs.Scorer[Any, Any], D: int, device: str) -> None:
    """PyTorch adds up such tokens in an order that follows from how many blocks there are."""
    pipeline, history = a_pipeline(scorer), bs.KeyHistory()
    sizes: dict[str, Any] = {"Hq": 8, "Hkv": 8, "D": D}
    for x in chunks((64, 136, 236, 300, 512), device=device, **sizes):
        q, k, v = map(LAYOUTS["tokens before heads"], x)
        assert_same_trace(pipeline.trace(q, k, v, history=history), pipeline.trace(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("scorer", SCORERS[:2], ids=stages.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels_for_gpus(
    scorer: bs.Scorer[Any, Any], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, history = a_pipeline(scorer, bs.TritonExecutor()), bs.KeyHistory()
    pretend_gpu(monkeypatch)
    for q, k, v in chunks((40, 64, 101), device=device, dtype=dtype):
        assert_same_trace(pipeline.trace(q, k, v, history=history), pipeline.trace(q, k, v))


@needs_gpu
@pytest.mark.parametrize("chunk", [512, 2048, 3000])
@pytest.mark.parametrize("name", ["mean_pooling", "flex_prefill", "minference", "sparge"])
def test_presets_on_a_gpu(name: str, chunk: int) -> None:
    ends = [*range(chunk, 16384, chunk), 16384]
    sizes: dict[str, Any] = {"B": 1, "Hq": 8, "D": 128, "dtype": torch.bfloat16}
    pipeline, history = every_preset[name](executor=bs.TritonExecutor()), bs.KeyHistory()
    for q, k, v in chunks(ends, device="cuda", **sizes):
        out = pipeline(q, k, v, history=history)
        assert torch.equal(out, pipeline(q, k, v))
    assert history.tokens == 16384


@pytest.mark.parametrize("scorer", [SCORERS[0], SCORERS[1], SCORERS[4]], ids=stages.name)
def test_old_keys_are_not_looked_at(scorer: Any, device: str) -> None:
    """Keys in blocks that were whole turn to NaN, and no score changes. The block at the end is read again."""
    history, order = bs.KeyHistory(), bs.GlobalPermutation()
    for q, k, _ in chunks((70, 133, 200), device=device):
        spoiled = k.clone()
        spoiled[:, :, : history.tokens // 16 * 16] = float("nan")
        mine = scorer(q, spoiled, order, bs.AttentionSpec(scale=0.3), history)
        its = scorer(q, k, order, bs.AttentionSpec(scale=0.3))
        assert torch.equal(mine.values.where(its.grid.visible, 0), its.values.where(its.grid.visible, 0))


@each_scorer
@pytest.mark.parametrize("back", [0, 7, 64, 100, 133])
def test_rewind_and_replay(scorer: bs.Scorer[Any, Any], back: int, device: str) -> None:
    """Other keys from some token on, as after rejected drafts: it is as one that never saw the old ones."""
    pipeline, history = a_pipeline(scorer), bs.KeyHistory()
    for q, k, v in chunks((64, 133), device=device):
        pipeline(q, k, v, history=history)
    history.rewind(back)
    assert history.tokens == back
    history.rewind(500)
    assert history.tokens == back
    (q, new, v), *_ = chunks((150,), device=device, seed=1)
    k = torch.cat((k[:, :, :back], new[:, :, back:]), dim=2)
    assert_same_trace(pipeline.trace(q[:, :, back:], k, v, history=history), pipeline.trace(q[:, :, back:], k, v))
    history.rewind(149)
    again = q[:, :, -1:], k, v
    assert_same_trace(pipeline.trace(*again, history=history), pipeline.trace(*again))


@pytest.mark.parametrize("fork", [copy.copy, copy.deepcopy])
def test_branches_of_a_prompt(fork: Any, device: str) -> None:
    pipeline, history = a_pipeline(SCORERS[4]), bs.KeyHistory()
    q, k, v = make_qkv(N=200, device=device, **SIZES)
    pipeline(q[:, :, :70], k[:, :, :70], v[:, :, :70], history=history)
    branch = fork(history)
    other = torch.cat((k[:, :, :70], -k[:, :, 70:]), dim=2)
    for keys, mine in ((k, history), (other, branch), (k, history)):
        mine.rewind(70)
        x = q[:, :, 70:], keys, v
        assert_same_trace(pipeline.trace(*x, history=mine), pipeline.trace(*x))
    branch.rewind(0)
    assert history.tokens == 200


def test_a_call_that_fails_leaves_it_as_new(device: str) -> None:
    def fails(_: Tensor) -> Tensor:
        raise MemoryError

    history, order, (_, k, _) = bs.KeyHistory(), bs.GlobalPermutation(), make_qkv(N=40, D=16, device=device)
    with pytest.raises(MemoryError):
        history.blocks("mean", k, order, 16, fails)
    found = history.blocks("mean", k.double(), order, 16, lambda x: block_mean(x, 16))
    assert torch.equal(found, block_mean(k.double(), 16))


def test_each_sequence_has_its_own(device: str) -> None:
    """Chunks of two requests in one step, and a step that has none of the first."""
    pipeline, histories = a_pipeline(bs.MeanPoolScorer(16)), [bs.KeyHistory(), bs.KeyHistory()]
    of_requests = [make_qkv(Hq=4, Hkv=2, N=99, D=16, device=device, seed=seed)[1] for seed in (0, 1)]
    for queries, keys in (((40, 30), (40, 30)), ((0, 50), (0, 80)), ((37, 3), (77, 83))):
        sequences = bs.Sequences.packed(queries, keys)
        q = make_qkv(Hq=4, Hkv=2, M=sum(queries), N=sum(keys), D=16, device=device, seed=sum(keys))[0]
        # Each key is that of its place in its request.
        k = v = torch.cat([x[:, :, :n] for x, n in zip(of_requests, keys, strict=True)], 2)
        out = pipeline(q, k, v, sequences=sequences, history=list(map(copy.copy, histories)))
        assert torch.equal(out, pipeline(q, k, v, sequences=sequences))
        remembered = pipeline.trace(q, k, v, sequences=sequences, history=histories)
        traces = zip(remembered, pipeline.trace(q, k, v, sequences=sequences), strict=True)
        for mine, its in traces:
            assert (mine is None) == (its is None)
            if its is not None:
                assert_same_trace(mine, its)
    assert [history.tokens for history in histories] == [77, 83]


def test_a_dense_call_leaves_it_as_it_is(device: str) -> None:
    class Dense(ByReference):
        def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: bs.AttentionSpec) -> str | None:
            return "short"

        def __call__(self, *args: Any, **named: Any) -> bs.AttentionOutput:
            raise AssertionError

    history = bs.KeyHistory()
    a_pipeline(bs.MeanPoolScorer(16), Dense())(*make_qkv(N=40, D=16, device=device), history=history)
    assert history.tokens == 0


KEEPING = ("auto", "mean_pooling", "flex_prefill", "minference", "sparge", "flash_prefill", "prism")


@pytest.mark.parametrize("name", every_preset)
def test_presets_say_whether_they_keep_one(name: str, device: str) -> None:
    """Where `keeps_history` is false, a history is refused in words."""
    pipeline = every_preset[name](executor=bs.ReferenceExecutor())
    q, k, v = make_qkv(N=600, M=90, Hq=2, Hkv=1, D=16, device=device)
    assert pipeline.keeps_history == (name in KEEPING)
    history = bs.KeyHistory()
    if pipeline.keeps_history:
        assert torch.equal(pipeline(q, k, v, history=history), pipeline(q, k, v))
        assert history.tokens == 600
        return
    with pytest.raises(ValueError, match=r"moves keys, so that blocks change|remembers nothing of keys"):
        pipeline(q, k, v, history=history)
    assert history.tokens == 0


def test_queries_may_be_sorted(device: str) -> None:
    pipeline, history = bs.Pipeline(bs.SegmentQuerySort(32, block=16), *STAGES), bs.KeyHistory()
    assert pipeline.keeps_history
    for q, k, v in chunks((64, 150, 200), device=device):
        assert_same_trace(pipeline.trace(q, k, v, history=history), pipeline.trace(q, k, v))
    moved = bs.Pipeline(bs.SegmentQuerySort(32, block=16, keys=bs.SegmentKeySort(32)), *STAGES)
    assert not moved.keeps_history


STAGES: Any = (bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())


def test_what_is_refused(device: str) -> None:
    q, k, v = make_qkv(N=120, M=20, Hq=2, Hkv=1, D=16, device=device)
    history, pipeline = bs.KeyHistory(), bs.Pipeline(bs.Identity(), *STAGES)
    pipeline(q, k[:, :, :100], v[:, :, :100], history=history)

    def refused(kind: type[Exception], words: str, call: Any, **changed: Any) -> None:
        with pytest.raises(kind, match=re.escape(words)):
            call(**{"q": q, "k": k, "v": v, "history": history} | changed)
        assert history.tokens == 100

    shorter = {"k": k[:, :, :90], "v": v[:, :, :90]}
    refused(ValueError, "has seen 100 keys, and the queries of this call begin at key 70", pipeline, **shorter)
    refused(ValueError, "'history' is of other keys", pipeline, q=q.double(), k=k.double(), v=v.double())
    wider = {"k": k.expand(1, 2, -1, -1), "v": v.expand(1, 2, -1, -1)}
    refused(ValueError, "Each layer and each prompt needs its own KeyHistory", pipeline, **wider)
    refused(ValueError, "SegmentKeySort moves keys", bs.Pipeline(bs.SegmentKeySort(32), *STAGES))
    forgetful = a_pipeline(bs.AntidiagonalScorer(4, block=16))
    refused(UnsupportedError, "AntidiagonalScorer remembers nothing of keys", forgetful)
    refused(TypeError, "'history' must be a KeyHistory or None: True", pipeline, history=True)
    one = bs.Sequences.packed([20], [120])
    refused(TypeError, "one for each sequence, or None", pipeline, sequences=one)
    refused(ValueError, "'history' must have an entry per sequence (1): 0", pipeline, sequences=one, history=[])
    two = bs.Sequences.packed([10, 10], [60, 60])
    refused(ValueError, "two are the same", pipeline, sequences=two, history=[history, history])
    both: dict[str, Any] = {"sequences": two, "remaining": 5, "history": None}
    refused(ValueError, "'remaining' must be 0 with 'sequences': 5. Give", pipeline, **both)
    moved = bs.SegmentKeySort(32)(q, k, bs.AttentionSpec(scale=0.3))
    with pytest.raises(ValueError, match="this permutation moves them"):
        bs.MeanPoolScorer(16)(q, k, moved, bs.AttentionSpec(scale=0.3), history)
    with pytest.raises(ValueError, match=r"has seen 100 keys, and there are 90 now. Call rewind\(tokens\)"):
        bs.MeanPoolScorer(16)(q, k[:, :, :90], bs.GlobalPermutation(), bs.AttentionSpec(scale=0.3), history)


def test_graphs_take_none(device: str) -> None:
    q, k, v = make_qkv(N=100, D=16, device=device)
    pipeline, history = bs.Pipeline(bs.Identity(), *STAGES), bs.KeyHistory()
    with pytest.raises(ValueError, match="but not 'history'"):
        torch.compile(lambda *x: pipeline(*x, history=history), fullgraph=False, backend="eager")(q, k, v)
    if not GPU:
        return
    q, k, v = make_qkv(N=256, D=64, dtype=torch.float16, device=device)
    pipeline = a_pipeline(bs.MeanPoolScorer(64), bs.TritonExecutor())
    pipeline(q, k, v, history=bs.KeyHistory())

    def under_capture() -> None:
        torch.zeros(1, device=device)  # an empty graph makes a warning, here an error that leaves the capture open
        pipeline(q, k, v, history=history)

    with pytest.raises(ValueError, match="a CUDA graph repeats one"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        under_capture()


# What remains of the prompt


N, BLOCK = 320, 16
WHOLE: dict[str, Any] = {"Hq": 4, "Hkv": 2, "N": N, "D": 16}


@frozen(eq=False)
class OddEnd(bs.PositionSelector):
    """A user's rule, which asks for the very end of the prompt."""

    def where(self, grid: bs.Grid) -> Tensor:
        return (grid.q_last + grid.prompt_end) % 3 == 0


# Other rules: test_a_chunk_is_part_of_its_prompt.
RULES: dict[str, Selector[Any, Any]] = {
    "by scores as well": bs.TopCdf(0.3) | (bs.Band(20) | bs.LastQueries(40)),
    "of the whole prompt": bs.LastQueries(10**30) & bs.TopK(3),
    "a user's": OddEnd(),
}


def pipeline(selector: Selector[Any, Any], **options: Any) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(BLOCK), selector, bs.CpuExecutor(), **options)


def parts(q: Tensor, k: Tensor, v: Tensor, size: int) -> Any:
    """The begin and the end of each chunk, its queries, the keys and values so far, and what remains."""
    for start in range(0, N, size):
        end = min(start + size, N)
        yield start, end, (q[:, :, start:end], k[:, :, :end], v[:, :, :end]), N - end


@pytest.mark.parametrize(("size", "window"), [(16, None), (48, None), (96, None), (256, None), (48, 50)])
@pytest.mark.parametrize("name", RULES)
def test_chunks_choose_what_the_whole_prompt_chooses(name: str, size: int, window: int | None) -> None:
    q, k, v = make_qkv(**WHOLE)
    rule = pipeline(RULES[name])
    whole, history = rule.trace(q, k, v, window=window), bs.KeyHistory()
    block = whole.mask.grid.q_block
    for start, end, part, remaining in parts(q, k, v, size):
        mask = rule.choose(*part, window=window, remaining=remaining).mask
        rows = slice(start // block, end // block)
        assert torch.equal(mask.keep, whole.mask.keep[:, :, rows, : mask.keep.shape[3]])
        assert not bool(whole.mask.keep[:, :, rows, mask.keep.shape[3] :].any())
        out = rule(*part, window=window, remaining=remaining, history=history)
        torch.testing.assert_close(out, whole.output.out[:, :, start:end])


@pytest.mark.parametrize("quality", ["careful", "balanced", "fast"])
def test_auto_does(quality: bs.Quality) -> None:
    for tokens, sizes in ((16384 + 777, (2048, 8192)), (1100, (256, 512, 1024))):
        q, k, _ = make_qkv(Hq=4, Hkv=2, N=tokens, D=32)
        whole = bs.auto(quality).choose(q, k)
        for size in sizes:
            start = 0
            for end in (*range(size, tokens, size), tokens):
                part = q[:, :, start:end], k[:, :, :end]
                mine = bs.auto(quality).choose(*part, remaining=tokens - end).mask.keep
                assert torch.equal(mine, whole.mask.keep[:, :, start // 128 : -(-end // 128), : mine.shape[3]])
                start = end
    # The last 128 queries are those from 972 on, in the rows of 896 and 1024.
    assert torch.equal(whole.mask.keep[:, :, 7:], whole.mask.grid.visible.expand_as(whole.mask.keep)[:, :, 7:])
    assert not torch.equal(whole.mask.keep[:, :, 6], whole.mask.grid.visible.expand_as(whole.mask.keep)[:, :, 6])


def test_the_call_ends_the_prompt_unless_it_says_otherwise() -> None:
    q, k, v = make_qkv(**WHOLE)
    rule = pipeline(bs.LastQueries(40))
    assert torch.equal(rule(q, k, v), rule(q, k, v, remaining=0))
    dense, sparse = (rule.trace(q, k, v, remaining=more).density().mean() for more in (0, 40))
    assert sparse < dense
    ends = [int(rule.choose(q, k, remaining=more).mask.keep.sum()) for more in (0, 10, 25, 40)]
    assert ends == sorted(set(ends), reverse=True)


@pytest.mark.parametrize("name", ["by scores as well", "a user's"])
@pytest.mark.parametrize("window", [None, 30])
def test_each_of_several_sequences_has_its_own(name: str, window: int | None) -> None:
    rule = pipeline(RULES[name])
    lengths, remaining = [100, 64, 90], [0, 30, 500]
    q, k, v = make_qkv(**WHOLE | {"N": sum(lengths)})
    sequences = bs.Sequences.packed(lengths, remaining=remaining)
    alone = [
        rule(*(x.split(lengths, 2)[i] for x in (q, k, v)), window=window, remaining=more)
        for i, more in enumerate(remaining)
    ]
    assert torch.equal(rule(q, k, v, window=window, sequences=sequences), torch.cat(alone, 2))
    traces = rule.trace(q, k, v, sequences=sequences)
    assert [trace.spec.remaining for trace in traces if trace is not None] == remaining
    groups = bs.HeadGroups({(0,): rule, (1,): None})
    one = groups(*(x.split(lengths, 2)[1] for x in (q, k, v)), remaining=30)
    assert torch.equal(groups(q, k, v, sequences=sequences)[:, :, 100:164], one)
    assert groups.trace(q, k, v, sequences=sequences)[2].traces[0,].spec.remaining == 500  # type: ignore[union-attr]


@pytest.mark.parametrize("window", [None, 30])
def test_padded_prompts_and_those_in_pages(window: int | None) -> None:
    rule = pipeline(RULES["by scores as well"])
    q, k, v = make_qkv(B=2, Hq=4, Hkv=2, N=64, D=16)
    mask = torch.ones(2, 64, dtype=torch.int64)
    mask[0, :20] = 0
    sequences = bs.Sequences.padded(mask, remaining=torch.tensor([7, 300]))
    got = rule(q, k, v, window=window, sequences=sequences)
    first = rule(q[:1, :, 20:], k[:1, :, 20:], v[:1, :, 20:], window=window, remaining=7)
    second = rule(q[1:], k[1:], v[1:], window=window, remaining=300)
    assert torch.equal(got[:1, :, 20:], first)
    assert torch.equal(got[1:], second)
    pages = bs.PageTable(torch.arange(8).view(2, 4), [64, 64], page_size=16)
    assert pages.sequences([10, 20], remaining=[5, 0]).remaining == (5, 0)
    ends = bs.Sequences.from_cu_seqlens([0, 10, 30], [0, 64, 128], remaining=[5, 0])
    assert ends.remaining == (5, 0)


def test_head_groups_and_reused_masks_pass_it_on() -> None:
    q, k, v = make_qkv(**WHOLE)
    rule = pipeline(RULES["by scores as well"])
    part = q[:, :, :96], k[:, :, :96], v[:, :, :96]
    groups = bs.HeadGroups({(0, 1): rule})
    assert torch.equal(groups(*part, remaining=20), rule(*part, remaining=20))
    assert groups.trace(*part, remaining=20).traces[0, 1].spec.remaining == 20  # type: ignore[union-attr]
    cache = MaskCache(steps=9)
    for step, remaining in enumerate((20, 0, 20)):
        cache.begin(step)
        kept = ReusedMask(rule, 0, 0, cache).trace(*part, remaining=remaining)
        assert torch.equal(kept.output.out, rule(*part, remaining=remaining))
        assert kept.age == (2 if step == 2 else 0)
    choice = rule.choose(*part, remaining=20)
    assert torch.equal(rule.attend(*part, choice).out, rule(*part, remaining=20))


@pytest.mark.usefixtures("compiled_anew")
def test_a_compiled_call_takes_any_number() -> None:
    q, k, v = make_qkv(**WHOLE)
    rule, graphs = pipeline(RULES["by scores as well"]), CompileCounter()
    call = torch.compile(lambda q, k, v, more: rule(q, k, v, remaining=more) * 1, backend=graphs, fullgraph=True)
    for more in (300, 200, 100, 20, 7):
        assert torch.equal(call(q, k, v, more), rule(q, k, v, remaining=more))
    assert graphs.frame_count <= 2  # for one number, and for any
    with pytest.raises(ValueError, match="'remaining' must be a whole number, at least 0"):
        rule(q, k, v, remaining=-1)


def test_what_is_out_of_sight_is_one_call() -> None:
    """So launches that are repeated are not learned anew for each number of tokens that remain."""
    selector = bs.TopCdf(0.3) | (bs.Band(20) | bs.LastQueries(40)) | bs.LastKeys(50)
    stages = PipelineCore.of(bs.Identity(), bs.MeanPoolScorer(BLOCK), selector, bs.CpuExecutor(), True)
    spec = bs.AttentionSpec(scale=0.25)
    specs = [seen(spec.with_remaining(more), stages.tail) for more in (50, 51, 1000, 10**30)]
    assert stages.tail == 50
    assert specs == [specs[0]] * 4
    assert seen(spec.with_remaining(49), stages.tail).remaining == 49
    assert tail_of(bs.Identity(), bs.NoScorer(BLOCK), bs.TopCdf(0.5)) == 0
    assert tail_of(bs.Identity(), bs.NoScorer(BLOCK), bs.Ranked(bs.TopCdf(0.5), first=bs.LastQueries(9))) == 9
    for exact in (bs.DecayingTopK(), bs.TopK(1) | bs.DecayingTopK(), OddEnd(), bs.TopK(2) | OddEnd()):
        assert tail_of(bs.Identity(), bs.NoScorer(BLOCK), exact) is None
        assert seen(spec.with_remaining(10**6), None).remaining == 10**6
    parts = bs.auto()
    assert tail_of(parts.permuter, parts.scorer, parts.selector, parts.executor) == 128


def test_sizes_alone_say_dense_for_the_end_only() -> None:
    q, k, v = make_qkv(**WHOLE | {"M": 30})
    rule = evolve(pipeline(bs.TopK(1) | bs.LastQueries(30)), executor=bs.AutoExecutor())
    spec = bs.AttentionSpec(scale=0.25)
    assert rule.dense_because(q, k, v, spec) is not None
    for more in (1, 29, 30, 10**6):
        assert rule.dense_because(q, k, v, spec.with_remaining(more)) is None
        assert rule.trace(q, k, v, remaining=more).dense_because is None
    always = evolve(rule, selector=bs.TopK(1) | bs.Band(N))
    assert always.dense_because(q, k, v, spec.with_remaining(1000)) is not None
