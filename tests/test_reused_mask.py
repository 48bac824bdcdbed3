"""Choices that serve several steps: attention to them is exact, and they are made anew when they are due."""

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
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace
from blocksparse.layers.reused_mask import MaskCache, ReusedMask, shared
from blocksparse.testing import make_qkv

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
    """Each with sinks of its own; the steps in which it is chosen are the same for all."""
    cache = MaskCache(2)
    inputs = [make_qkv(N=100, D=16, seed=seed) for seed in range(3)]
    for step in range(3):
        cache.begin(step)
        kept = [
            traced(cache, layer, PIPELINE, *qkv, chooser=0, sinks=float(layer)) for layer, qkv in enumerate(inputs)
        ]
        assert [each.age for each in kept] == 3 * [step % 2]
        assert all(each.mask is kept[0].mask for each in kept)
        choice = PIPELINE.choose(*inputs[0][:2])
        for layer, (each, (q, k, v)) in enumerate(zip(kept, inputs, strict=True)):
            own = evolve(choice, spec=evolve(choice.spec, sinks=float(layer)))
            assert torch.equal(each.output.out, PIPELINE.attend(q, k, v, own).out)
    cache.forget(0, 0)
    assert [traced(cache, i, PIPELINE, *qkv, chooser=0).age for i, qkv in enumerate(inputs)] == [0, 0, 0]


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
