"""Calls that know how much of their prompt follows choose what one call for the whole prompt chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.masks.grid import AlwaysKept
from blocksparse.layers.reused_mask import MaskCache, ReusedMask
from blocksparse.pipeline_core import PipelineCore, seen, tail_of
from blocksparse.select.selector import Selector
from blocksparse.testing import make_qkv

N, BLOCK = 320, 16
WRONG: Any = [0.5]  # no number of tokens
SIZES: dict[str, Any] = {"Hq": 4, "Hkv": 2, "N": N, "D": 16}


@frozen(eq=False)
class OddEnd(bs.PositionSelector):
    """A user's rule, which asks for the very end of the prompt."""

    def where(self, grid: bs.Grid) -> Tensor:
        return (grid.q_last + grid.prompt_end) % 3 == 0


RULES: dict[str, Selector[Any, Any]] = {
    "last queries": bs.LastQueries(40),
    "by scores as well": bs.TopCdf(0.3) | (bs.Band(20) | bs.LastQueries(40)),
    "last keys": bs.LastKeys(40),
    "decaying": bs.DecayingTopK(8),
    "by causality": bs.SelectorByCausality(bs.TopK(1) | bs.LastQueries(70), bs.TopK(1)),
    "on tiles": bs.OnTiles(bs.LastQueries(20), 2),
    "shared": bs.SharedByGroup(bs.TopK(2) | bs.LastQueries(40)),
    "longer than the prompt": bs.LastQueries(N),
    "of the whole prompt": bs.LastQueries(10**30) & bs.TopK(3),
    "a user's": OddEnd(),
}


def pipeline(selector: Selector[Any, Any], **options: Any) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(BLOCK), selector, bs.CpuExecutor(), **options)


def chunks(q: Tensor, k: Tensor, v: Tensor, size: int) -> Any:
    """The begin and the end of each chunk, its queries, the keys and values so far, and what remains."""
    for start in range(0, N, size):
        end = min(start + size, N)
        yield start, end, (q[:, :, start:end], k[:, :, :end], v[:, :, :end]), N - end


@pytest.mark.parametrize("size", [16, 48, 96, 256])
@pytest.mark.parametrize("name", RULES)
def test_chunks_choose_what_the_whole_prompt_chooses(name: str, size: int) -> None:
    q, k, v = make_qkv(**SIZES)
    rule = pipeline(RULES[name])
    whole, history = rule.trace(q, k, v), bs.KeyHistory()
    block = whole.mask.grid.q_block
    for start, end, part, remaining in chunks(q, k, v, size):
        mask = rule.choose(*part, remaining=remaining).mask
        rows = slice(start // block, end // block)
        assert torch.equal(mask.keep, whole.mask.keep[:, :, rows, : mask.keep.shape[3]])
        assert not bool(whole.mask.keep[:, :, rows, mask.keep.shape[3] :].any())
        out = rule(*part, remaining=remaining, history=history)
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
    q, k, v = make_qkv(**SIZES)
    rule = pipeline(bs.LastQueries(40))
    assert torch.equal(rule(q, k, v), rule(q, k, v, remaining=0))
    dense, sparse = (rule.trace(q, k, v, remaining=more).density().mean() for more in (0, 40))
    assert sparse < dense
    ends = [int(rule.choose(q, k, remaining=more).mask.keep.sum()) for more in (0, 10, 25, 40)]
    assert ends == sorted(set(ends), reverse=True)


@pytest.mark.parametrize("name", ["by scores as well", "a user's"])
def test_each_of_several_sequences_has_its_own(name: str) -> None:
    rule = pipeline(RULES[name])
    lengths, remaining = [100, 64, 90], [0, 30, 500]
    q, k, v = make_qkv(**SIZES | {"N": sum(lengths)})
    sequences = bs.Sequences.packed(lengths, remaining=remaining)
    alone = [
        rule(*(x.split(lengths, 2)[i] for x in (q, k, v)), remaining=more) for i, more in enumerate(remaining)
    ]
    assert torch.equal(rule(q, k, v, sequences=sequences), torch.cat(alone, 2))
    traces = rule.trace(q, k, v, sequences=sequences)
    assert [trace.spec.remaining for trace in traces if trace is not None] == remaining
    groups = bs.HeadGroups({(0,): rule, (1,): None})
    one = groups(*(x.split(lengths, 2)[1] for x in (q, k, v)), remaining=30)
    assert torch.equal(groups(q, k, v, sequences=sequences)[:, :, 100:164], one)
    assert groups.trace(q, k, v, sequences=sequences)[2].traces[0,].spec.remaining == 500  # type: ignore[union-attr]


def test_padded_prompts_and_those_in_pages() -> None:
    rule = pipeline(RULES["by scores as well"])
    q, k, v = make_qkv(B=2, Hq=4, Hkv=2, N=64, D=16)
    mask = torch.ones(2, 64, dtype=torch.int64)
    mask[0, :20] = 0
    got = rule(q, k, v, sequences=bs.Sequences.padded(mask, remaining=torch.tensor([7, 300])))
    first = rule(q[:1, :, 20:], k[:1, :, 20:], v[:1, :, 20:], remaining=7)
    second = rule(q[1:], k[1:], v[1:], remaining=300)
    assert torch.equal(got[:1, :, 20:], first)
    assert torch.equal(got[1:], second)
    pages = bs.PageTable(torch.arange(8).view(2, 4), [64, 64], page_size=16)
    assert pages.sequences([10, 20], remaining=[5, 0]).remaining == (5, 0)
    ends = bs.Sequences.from_cu_seqlens([0, 10, 30], [0, 64, 128], remaining=[5, 0])
    assert ends.remaining == (5, 0)


def test_head_groups_and_reused_masks_pass_it_on() -> None:
    q, k, v = make_qkv(**SIZES)
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


def test_a_compiled_call_takes_any_number() -> None:
    q, k, v = make_qkv(**SIZES)
    rule, graphs = pipeline(RULES["by scores as well"]), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    call = torch.compile(lambda q, k, v, more: rule(q, k, v, remaining=more) * 1, backend=backend, fullgraph=True)
    for more in (300, 200, 100, 20, 7):
        assert torch.equal(call(q, k, v, more), rule(q, k, v, remaining=more))
    assert len(graphs) <= 2  # for one number, and for any
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
    q, k, v = make_qkv(**SIZES | {"M": 30})
    rule = evolve(pipeline(bs.TopK(1) | bs.LastQueries(30)), executor=bs.AutoExecutor())
    spec = bs.AttentionSpec(scale=0.25)
    assert rule.dense_because(q, k, v, spec) is not None
    for more in (1, 29, 30, 10**6):
        assert rule.dense_because(q, k, v, spec.with_remaining(more)) is None
        assert rule.trace(q, k, v, remaining=more).dense_because is None
    always = evolve(rule, selector=bs.TopK(1) | bs.Band(N))
    assert always.dense_because(q, k, v, spec.with_remaining(1000)) is not None


def test_the_union_of_auto_is_one_launch() -> None:
    causal = bs.auto().selector.causal  # type: ignore[attr-defined]
    assert isinstance(causal.second, bs.PositionSelector)
    assert causal.second.parts() == (AlwaysKept(near=128, last=128), ())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: bs.Sequences.packed([3, 4], remaining=[1]), ValueError, r"an entry per sequence \(2\): 1"),
        (lambda: bs.Sequences.packed([3], remaining=[-1]), ValueError, "'remaining' must not be below 0"),
        (lambda: bs.Sequences.packed([3], remaining=WRONG), TypeError, "'remaining' must be a sequence of whole"),
    ],
)
def test_wrong_numbers_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_one_number_for_several_sequences_is_refused() -> None:
    q, k, v = make_qkv(**SIZES)
    with pytest.raises(ValueError, match=r"'remaining' must be 0 with 'sequences': 5. Give"):
        pipeline(bs.TopK(1))(q, k, v, sequences=bs.Sequences.packed([N]), remaining=5)
