"""Groups of heads, schedules of layers, and choices that serve several steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from blocksparse import Identity, MeanPoolScorer, Pipeline, ReferenceExecutor, SegmentKeySort, Sink, TopCdf, TopK
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace, HeadGroups
from blocksparse.layers.reused_mask import MaskCache, ReusedMask, shared
from blocksparse.layers.schedule import Schedule
from blocksparse.testing import make_qkv, masked_attention
from blocksparse.values import Trace
from tests.machine import needs_gpu
from tests.meaning import assert_same_bits

A: AnyPipeline = Pipeline(Identity(), MeanPoolScorer(16), TopK(2), ReferenceExecutor())
B: AnyPipeline = Pipeline(
    SegmentKeySort(32, last_q=16), MeanPoolScorer(16), TopCdf(0.5) | Sink(), ReferenceExecutor()
)
SIZES: dict[str, Any] = {"B": 2, "Hq": 8, "Hkv": 4, "N": 129, "D": 16, "Dv": 24, "dtype": torch.float64}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    M, N = q.shape[2], k.shape[2]
    pairs = torch.ones(M, N, dtype=torch.bool, device=q.device)
    return masked_attention(q, k, v, pairs.tril(N - M) if causal else pairs, q.shape[-1] ** -0.5)


# ---- groups of heads


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("M", [129, 60, 1])
def test_heads_of_a_group_attend_by_its_pipeline_and_stay_in_place(M: int, causal: bool, device: str) -> None:
    """Neither the order of the groups nor that of the heads in them shows."""
    q, k, v = make_qkv(**SIZES, M=M, device=device)
    trace = HeadGroups({(3, 0): A, (2,): None, (1,): B}).trace(q, k, v, causal=causal)
    a, b = A.trace(q, k, v, causal=causal), B.trace(q, k, v, causal=causal)
    exact = dense(q, k, v, causal=causal)
    for kv_head, (out, density) in enumerate(
        [(a.output.out, a.density()), (b.output.out, b.density()), (exact, None), (a.output.out, a.density())]
    ):
        heads = slice(2 * kv_head, 2 * kv_head + 2)
        torch.testing.assert_close(trace.output.out[:, heads], out[:, heads], rtol=1e-9, atol=1e-12)
        expected = torch.ones_like(a.density()[:, :2]) if density is None else density[:, heads]
        assert torch.equal(trace.density()[:, heads], expected)


def test_measures_of_a_trace_are_those_of_its_groups() -> None:
    q, k, v = make_qkv(**SIZES)
    trace = HeadGroups({(0, 2): A, (1, 3): None}).trace(q, k, v)
    alone, of_a, of_dense = A.trace(q, k, v), [0, 1, 4, 5], [2, 3, 6, 7]
    for measure, when_dense in (("density", 1.0), ("covered_mass", 1.0), ("error", 0.0)):
        got, expected = getattr(trace, measure)(), getattr(alone, measure)()
        torch.testing.assert_close(got[:, of_a], expected[:, of_a])
        assert bool((got[:, of_dense] == when_dense).all())
        assert bool((expected[:, of_a] != when_dense).all())
    assert isinstance(trace.traces[0, 2], Trace)
    assert trace.traces[1, 3] is None
    assert trace.output.lse is None  # dense attention gives none


def test_lse_is_put_back_like_the_output() -> None:
    q, k, v = make_qkv(**SIZES)
    assert_same_bits(HeadGroups({(1, 3): A, (2, 0): A}).trace(q, k, v).output, A.trace(q, k, v).output)


def test_a_value_per_query_head_is_of_the_group_in_its_order() -> None:
    q, k, v = make_qkv(**SIZES)
    whole, outer, inner = (
        Pipeline(Identity(), MeanPoolScorer(16), TopCdf([x / 10 for x in by_head]), ReferenceExecutor())
        for by_head in (range(1, 9), (7, 8, 1, 2), (3, 4, 5, 6))
    )
    trace, expected = HeadGroups({(3, 0): outer, (1, 2): inner}).trace(q, k, v), whole.trace(q, k, v)
    assert torch.equal(trace.density(), expected.density())
    torch.testing.assert_close(trace.output.out, expected.output.out, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@needs_gpu
def test_the_host_does_not_wait_to_take_heads() -> None:
    q, k, v = make_qkv(Hq=8, Hkv=4, N=256, D=64, dtype=torch.bfloat16, device="cuda")
    groups = HeadGroups({(3, 0): None, (1, 2): None})
    expected = groups(q, k, v)
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = groups(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, expected)


def test_dense_where() -> None:
    assert HeadGroups.dense_where([False, True, True, False], A).groups == {(1, 2): None, (0, 3): A}
    assert HeadGroups.dense_where([True, True], A).groups == {(0, 1): None}
    assert HeadGroups.dense_where((torch.tensor([0.2, 0.9]) > 0.5).tolist(), A).groups == {(1,): None, (0,): A}


def test_groups_are_of_all_heads_of_the_inputs() -> None:
    q, k, v = make_qkv(**SIZES)
    with pytest.raises(ValueError, match=r"each of the 4 KV heads; missing: 1, 3; not there: 4, 9$"):
        HeadGroups({(9, 0): A, (2, 4): None})(q, k, v)
    with pytest.raises(ValueError, match=r"each of the 4 KV heads; missing: 3$"):
        HeadGroups({(0, 1, 2): A})(q, k, v)
    with pytest.raises(ValueError, match="causal attention needs at least as many keys as queries"):
        HeadGroups({(0, 1, 2, 3): None})(q, k[:, :, :50], v[:, :, :50])


# ---- layers of a model


def test_layers_resolve_from_both_ends() -> None:
    assert Schedule(A).resolve(3) == (A, A, A)
    assert Schedule(None).resolve(2) == (None, None)
    assert Schedule(A, dense=(0, 1, -1)).resolve(5) == (None, None, A, A, None)
    assert Schedule(A, dense=range(2)).resolve(3) == (None, None, A)
    groups = HeadGroups({(0,): A})
    mixed = Schedule(A, layers={-2: B, 1: None, 2: groups}, dense=[0])
    assert mixed.resolve(6) == (None, None, groups, A, B, A)
    assert Schedule(None, layers={1: B}).resolve(2) == (None, B)
    assert Schedule(A, layers={0: B}).resolve(0 + 1) == (B,)


@pytest.mark.parametrize("layer", [4, -5])
def test_layers_that_are_not_there(layer: int) -> None:
    for schedule in (Schedule(A, dense=[layer]), Schedule(A, layers={layer: B})):
        with pytest.raises(ValueError, match=f"there is no layer {layer}: the model has 4, 0 to 3"):
            schedule.resolve(4)


def test_a_layer_is_named_once() -> None:
    with pytest.raises(ValueError, match="but name these more than once: 1"):
        Schedule(A, layers={1: B, 2: B}, dense=(0, 1))
    with pytest.raises(ValueError, match="but name these more than once: 0"):
        Schedule(A, dense=(0, 0))
    schedule = Schedule(A, layers={3: B}, dense=(0, -1))
    with pytest.raises(ValueError, match=r"these of the 4 layers are named twice, .*: 3"):
        schedule.resolve(4)
    assert schedule.resolve(5) == (None, A, A, B, None)


def test_layers_that_take_the_choice_of_another() -> None:
    schedule = Schedule(A, layers={3: B}, dense=(0,), same_choice=[[1, 2], (-2, -1)])
    assert schedule == Schedule(A, layers={3: B}, dense=(0,), same_choice=((1, 2), (-2, -1)))
    assert schedule != Schedule(A, layers={3: B}, dense=(0,))
    assert schedule.choosers(6) == (0, 1, 1, 3, 4, 4)
    for groups, sentence in (
        (((1,),), r"a group of 'same_choice' must have at least 2 layers: \(1,\)"),
        (((1, 2), (2, 3)), "but names these more than once: 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Schedule(A, same_choice=groups)
    for group, sentence in (
        ((2, 6), "there is no layer 6: the model has 6, 0 to 5"),
        ((2, 1), r"must name layers in the order in which they run: \(2, 1\)"),
        ((1, -5), "must name layers in the order in which they run"),
        ((0, 1), r"the layers \(0, 1\) of 'same_choice' must have one pipeline, and layer 0 has None"),
        ((2, 3), r"must have one pipeline, and layer 3 has Pipeline"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Schedule(A, layers={3: B}, dense=(0,), same_choice=(group,)).choosers(6)
    with pytest.raises(ValueError, match="layer 5 is in two groups of 'same_choice'"):
        Schedule(A, same_choice=((4, 5), (2, -1))).choosers(6)


PIPELINE = bs.mean_pooling(0.4, block=16, executor=bs.ReferenceExecutor())


def traced(
    cache: MaskCache, layer: int, pipeline: AnyPipeline, *qkv: Tensor, chooser: int | None = None, **asked: Any
) -> AnyTrace:
    return ReusedMask(pipeline, layer, layer if chooser is None else chooser, cache).trace(*qkv, **asked)


def test_a_kept_choice_is_attended_to_exactly() -> None:
    cache, (q, k, v) = MaskCache(2), make_qkv(N=100, D=16)
    first = traced(cache, 0, PIPELINE, q, k, v, causal=False)
    assert first.age == 0
    assert torch.equal(first.output.out, PIPELINE(q, k, v, causal=False))
    cache.begin(1)
    other = [x.flip(2) for x in (q, k, v)]
    second = traced(cache, 0, PIPELINE, other[0], other[1], other[2], causal=False)
    assert (second.mask, second.age) == (first.mask, 1)
    choice = PIPELINE.choose(q, k, causal=False)
    assert torch.equal(second.output.out, PIPELINE.attend(other[0], other[1], other[2], choice).out)
    cache.begin(2)
    third = traced(cache, 0, PIPELINE, other[0], other[1], other[2], causal=False)
    assert third.age == 0
    assert torch.equal(third.output.out, PIPELINE(other[0], other[1], other[2], causal=False))


def test_calls_are_told_apart() -> None:
    """By layer, turn in a step, sizes and what is asked; a run that begins anew has forgotten all."""
    cache, (q, k, v) = MaskCache(9), make_qkv(N=100, D=16)
    for step in (0, 1):
        cache.begin(step)
        ages = [traced(cache, layer, PIPELINE, q, k, v, causal=False).age for layer in (0, 1, 0)]
        ages.append(traced(cache, 0, PIPELINE, q, k, v, causal=True).age)
        ages.append(traced(cache, 0, PIPELINE, q[:, :, :50], k, v, causal=False).age)
        assert ages == 5 * [step]
    cache.begin(0)
    assert traced(cache, 0, PIPELINE, q, k, v, causal=False).age == 0


def test_a_run_takes_no_choice_of_another() -> None:
    """Nor after one that was stopped in its first step, or before it came as near to the picture."""
    cache = MaskCache(12)
    for first in (0, 0, 1, 4):
        (q, k, v), prompt = make_qkv(N=100, D=16, seed=first), torch.zeros(3)
        for step, age in ((first, 0), (first + 1, 1)):
            cache.begin(step, prompt)
            kept = traced(cache, 0, PIPELINE, q, k, v, causal=False)
            assert kept.age == age
            assert torch.equal(kept.output.out, PIPELINE(q, k, v, causal=False))
        del prompt
    assert len(cache._kept) == 1  # what is gone is not kept


def test_both_halves_of_guidance_keep_theirs() -> None:
    """Also where a cache skips one of them in a step, and without prompts if each is called in each step."""
    cache, halves = MaskCache(3), [make_qkv(N=100, D=16, seed=seed) for seed in (0, 1)]
    prompts = torch.zeros(3), torch.zeros(3)
    for told in (prompts, (None, None)):
        for step, called in enumerate(((0, 1), (0, 1), (1,) if told is prompts else (0, 1), (0, 1))):
            for half in called:
                q, k, v = halves[half]
                cache.begin(step, told[half])
                kept = traced(cache, 0, PIPELINE, q, k, v, causal=False)
                assert kept.age == step % 3
                assert torch.equal(kept.output.out, PIPELINE(q, k, v, causal=False))


def test_layers_share_what_one_chose() -> None:
    """Each with a scale, a softcap and sinks of its own; the steps in which it is chosen are the same for all."""
    cache = MaskCache(2)
    inputs = [make_qkv(N=100, D=16, seed=seed) for seed in range(3)]
    asked: list[dict[str, Any]] = [{}, {"scale": -0.5, "sinks": 1.0}, {"softcap": 2.0, "sinks": 2.0}]
    for step in range(3):
        cache.begin(step)
        kept = [
            traced(cache, layer, PIPELINE, *qkv, chooser=0, **asked[layer]) for layer, qkv in enumerate(inputs)
        ]
        assert [each.age for each in kept] == 3 * [step % 2]
        assert all(each.mask is kept[0].mask for each in kept)
        choice = PIPELINE.choose(*inputs[0][:2])
        for layer, (each, (q, k, v)) in enumerate(zip(kept, inputs, strict=True)):
            own = evolve(choice, spec=evolve(choice.spec, **asked[layer]))
            assert torch.equal(each.output.out, PIPELINE.attend(q, k, v, own).out)
    cache.forget(0, 0)
    assert [traced(cache, i, PIPELINE, *qkv, chooser=0).age for i, qkv in enumerate(inputs)] == [0, 0, 0]


@pytest.mark.parametrize("other", [{"Hq": 8}, {"Hkv": 4}, {"D": 32}, {"window": 30}], ids=str)
def test_layers_that_cannot_share_a_choice_are_refused(other: dict[str, Any]) -> None:
    cache, sizes = MaskCache(1), {"D": 16, "window": 200, **other}
    traced(cache, 0, PIPELINE, *make_qkv(N=100, D=16), chooser=0)
    window = sizes.pop("window")
    message = r"are \(4, 2, 16, None\) in layer 0 and \(\d+, \d, \d+, \w+\) in layer 1\. Group them apart"
    with pytest.raises(ValueError, match=message):
        traced(cache, 1, PIPELINE, *make_qkv(N=100, **sizes), chooser=0, window=window)


def test_scales_and_pipelines_have_choices_of_their_own() -> None:
    cache, (q, k, v) = MaskCache(9), make_qkv(N=100, D=16)
    wider = bs.mean_pooling(0.8, block=16, executor=bs.ReferenceExecutor())
    calls = [(pipeline, scale) for pipeline in (PIPELINE, wider) for scale in (0.125, -0.125, 0.0, 1.0)]
    for step, (pipeline, scale) in enumerate(calls):
        cache.begin(step)
        kept = traced(cache, 0, pipeline, q, k, v, scale=scale)
        assert torch.equal(kept.output.out, pipeline(q, k, v, scale=scale))
    cache.begin(8)
    equal = bs.mean_pooling(0.8, block=16, executor=bs.ReferenceExecutor())
    assert traced(cache, 0, equal, q, k, v, scale=1.0).age == 1


def test_what_is_kept_is_bounded() -> None:
    """A layer that is called more often in one step chooses anew beyond some calls."""
    cache, (q, k, v) = MaskCache(9), make_qkv(N=50, D=16)
    for step in (0, 1):
        cache.begin(step)
        ages = [traced(cache, 0, PIPELINE, q, k, v, causal=False).age for _ in range(12)]
        assert ages == [step] * 8 + [0] * 4
    assert len(cache._kept) == 8


def test_dense_calls_have_no_choice() -> None:
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopCdf(1.0), bs.AutoExecutor())
    q, k, v = make_qkv(N=50, D=16)
    cache = MaskCache(2)
    kept = traced(cache, 0, pipeline, q, k, v, causal=False)
    assert (kept.dense_because, kept.age, len(cache._kept)) == ("every block is kept", None, 0)
    assert torch.equal(ReusedMask(pipeline, 0, 0, cache)(q, k, v, causal=False), kept.output.out)
    assert torch.equal(kept.output.out, pipeline(q, k, v, causal=False))
    with pytest.raises(ValueError, match="'steps' must be a whole number, at least 1: 0"):
        MaskCache(0)


def test_the_layer_that_chooses_never_takes_what_a_later_one_would_choose() -> None:
    """One that takes its choices finds, in the middle of a step, that they cover too little."""
    cache, first, second = MaskCache(12), make_qkv(N=100, D=16, seed=0), make_qkv(N=100, D=16, seed=1)
    cache.begin(0)
    kept = traced(cache, 0, PIPELINE, *first, chooser=0, causal=False)
    cache.forget(1, 0)
    assert traced(cache, 1, PIPELINE, *second, chooser=0, causal=False).mask is kept.mask
    cache.begin(1)
    again = traced(cache, 0, PIPELINE, *first, chooser=0, causal=False)
    assert again.age == 0
    assert torch.equal(again.output.out, PIPELINE(*first, causal=False))


def test_layers_share_the_choice_of_every_prompt_of_a_batch() -> None:
    cache, prompts = MaskCache(1), [make_qkv(N=100, D=16, seed=seed) for seed in range(10)]
    cache.begin(1)
    first, second = ([traced(cache, layer, PIPELINE, *x, chooser=0).mask for x in prompts] for layer in (0, 1))
    assert all(one is other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("every", [1, 2])
def test_choices_that_are_too_old_are_not_kept(every: int) -> None:
    """Prompts of ever other lengths, as a server has them: their masks would stay."""
    cache, masks = MaskCache(every), []
    for step in range(6):
        cache.begin(step)
        masks.append(ref(traced(cache, 0, PIPELINE, *make_qkv(N=100 + step, D=16)).mask))
    gc.collect()
    assert sum(mask() is not None for mask in masks) <= every


def test_a_choice_that_covers_too_little_is_made_anew_once() -> None:
    cache, (q, k, v), found = MaskCache(9), make_qkv(N=100, D=16), [0]
    attention = ReusedMask(PIPELINE, 0, 0, cache, lambda: found[0])
    ages = []
    for step, found[0] in enumerate((0, 0, 1, 1, 3)):
        cache.begin(step)
        ages.append(attention.trace(q, k, v).age)
    assert ages == [0, 1, 0, 1, 0]


def test_threads_that_run_one_model_have_choices_of_their_own() -> None:
    first, second = shared(bs.Schedule(PIPELINE, same_choice=((0, 1),)), 2)
    assert isinstance(first, ReusedMask)
    assert isinstance(second, ReusedMask)
    here, there = make_qkv(N=100, D=16, seed=0), make_qkv(N=100, D=16, seed=1)
    masks: list[tuple[bs.BlockMask, bs.BlockMask]] = []

    def call(qkv: tuple[Tensor, Tensor, Tensor], between: Callable[[], None] = lambda: None) -> None:
        first.begin()
        one = first.trace(*qkv)
        between()
        second.begin()
        masks.append((one.mask, second.trace(*qkv).mask))

    def elsewhere() -> None:
        thread = Thread(target=call, args=(there,))
        thread.start()
        thread.join()

    call(here, elsewhere)
    assert len(masks) == 2
    assert all(one is other for one, other in masks)
    assert len({id(one) for one, _ in masks}) == 2
