"""Layers that attend to what one of them chose, in models of transformers and of diffusers."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

import transformers
from tests.hosts.diffusion_models import CASES, SMALL, at, given
from tests.hosts.test_diffusers import made, run
from tests.hosts.test_transformers import make
from tests.stages import ByReference
from tests.tiny_model import tiny_llama

import blocksparse as bs
from blocksparse.hosts import diffusers as diffusion
from blocksparse.hosts import transformers as language
from blocksparse.observe import Audit
from blocksparse.observe.density_recorder import DensityRecorder


def watching(block: int = 16) -> tuple[ByReference, bs.Pipeline[Any, Any, Any]]:
    executor = ByReference()
    return executor, bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(block), bs.TopK(2), executor)


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_of_a_language_model(compiled: bool) -> None:
    """Prompts of two lengths in a batch, and another batch after it; layer 0 chooses for itself."""
    model, (executor, pipeline) = tiny_llama(num_hidden_layers=4), watching()
    schedule, lengths = bs.Schedule(pipeline, same_choice=((1, 2, -1),)), [150] if compiled else [150, 100]
    call: Any = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with language.attach(model, schedule, min_tokens=16, min_queries=1):
        chosen = []
        for seed in range(2):
            executor.masks.clear()
            ids = torch.randint(1, 61, (len(lengths), 150), generator=torch.Generator().manual_seed(seed))
            padding = torch.stack([torch.arange(150) >= 150 - length for length in lengths]).long()
            cache = transformers.DynamicCache(config=model.config)
            call(input_ids=ids, attention_mask=None if compiled else padding, past_key_values=cache)
            layers = [executor.masks[i : i + len(lengths)] for i in range(0, len(executor.masks), len(lengths))]
            assert len(layers) == 4
            assert [mask.grid.k_len for mask in layers[1]] == lengths
            for one, *others in zip(*layers[1:], strict=True):
                assert all(other is one for other in others)
            assert layers[0][0] is not layers[1][0]
            chosen.append(layers[1][0].keep)
        assert not torch.equal(*chosen)


def test_layers_with_and_without_a_window_share_no_choice() -> None:
    """None sees what the other one chooses among."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model, (executor, pipeline) = make("gemma3", num_hidden_layers=4, layer_types=kinds), watching()
    message = r"of Gemma3ForCausalLM, layer 1 has full_attention and layer 2 has sliding_attention\. Group them"
    with pytest.raises(ValueError, match=message):
        language.attach(model, bs.Schedule(pipeline, same_choice=((1, 2),)))
    of_one_kind = bs.Schedule(pipeline, same_choice=((0, 2), (1, -1)))
    with torch.no_grad(), language.attach(model, of_one_kind, min_tokens=16, min_window=16):
        model(torch.randint(1, 61, (1, 150)))
    one, other, *again = executor.masks
    assert [one, other] == again
    assert one.grid.window == 48


def test_nothing_is_kept_of_forward_calls_in_which_the_first_layer_is_dense() -> None:
    """The next layer chooses for the others, anew in each call."""
    model, (executor, pipeline) = tiny_llama(num_hidden_layers=4), watching()
    bias = {"position_bias": torch.zeros(1, 4, 150, 150)}
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | bias), with_kwargs=True
    )
    chosen: list[weakref.ref[Any]] = []
    with language.attach(model, bs.Schedule(pipeline, same_choice=((0, 1, 2, 3),)), min_tokens=16):
        for seed in range(4):
            ids = torch.randint(1, 61, (1, 150), generator=torch.Generator().manual_seed(seed))
            model(input_ids=ids, use_cache=False)
            first, *others = executor.masks
            assert len(others) == 2
            assert all(other is first for other in others)
            chosen.append(weakref.ref(first))
            executor.masks.clear()
            del first, others
        gc.collect()
        assert [mask() is not None for mask in chosen] == [False, False, False, True]


def test_what_records_and_audits_of_a_language_model_say() -> None:
    model, (_, pipeline) = tiny_llama(num_hidden_layers=4), watching()
    recorder, audit = DensityRecorder(), Audit(rows=16, every=1)
    ids = torch.randint(1, 61, (1, 150))
    with language.attach(model, pipeline, min_tokens=16):
        alone = model(input_ids=ids, use_cache=False).logits
    schedule = bs.Schedule(pipeline, same_choice=((0, 1, 2, 3),))
    with language.attach(model, schedule, min_tokens=16, recorder=recorder, audit=audit):
        together = model(input_ids=ids, use_cache=False).logits
        model(input_ids=ids, use_cache=False)
    assert recorder.sparse_calls() == dict.fromkeys(range(4), 2)
    assert bool((recorder.density() == recorder.density()[0]).all())
    found = audit.layers()
    assert [layer.audited for layer in found] == [2, 2, 2, 2]
    assert all(layer.covered_mass is not None and 0.1 < layer.covered_mass.value < 1 for layer in found)
    assert (together - alone).abs().max() > 1e-4
    with language.attach(model, bs.Schedule(pipeline, same_choice=((0, 1),)), min_tokens=1000):
        model(input_ids=ids, use_cache=False)  # dense, whatever is shared


def test_layers_of_a_video_model() -> None:
    """Each step chooses anew, but for those that keep choices, and each half of guidance for itself."""
    case = CASES["wan"]
    model, halves = made(case), [given(case, SMALL), given(case, SMALL)]
    for every, ages in ((None, [0, 0, 0]), (2, [0, 1, 0])):
        executor, pipeline = watching()
        recorder, seen = DensityRecorder(), []
        schedule = bs.Schedule(pipeline, same_choice=((0, 1),))
        with diffusion.attach(model, schedule, min_tokens=1, choose_every=every, recorder=recorder):
            for timestep in (900.0, 800.0, 700.0):
                recorder.clear()
                for half in halves:
                    run(model, {**half, "timestep": at(1, timestep)})
                seen.append(recorder.choice_ages())
        assert seen == [{0: Counter({age: 2}), 1: Counter({age: 2})} for age in ages]
        first, second, *_ = pairs = [executor.masks[i : i + 2] for i in range(0, len(executor.masks), 2)]
        assert all(one is other for one, other in pairs)
        assert first[0] is not second[0]


def test_a_kept_choice_that_covers_too_little_is_made_anew() -> None:
    """By an audit of each call, and bounds that all or none cross; with `fall_back` the layer is dense."""
    case, (_, pipeline) = CASES["wan"], watching()
    model, inputs = made(case), given(case, SMALL)
    bounds: list[dict[str, Any]] = [{"min_mass": 1.0}, {"min_mass": 0.0}, {"min_mass": 1.0, "fall_back": True}]
    told: list[dict[str, Any]] = []
    for bound in bounds:
        recorder, audit = DensityRecorder(), Audit(rows=16, every=1, **bound)
        with diffusion.attach(model, pipeline, min_tokens=1, choose_every=9, recorder=recorder, audit=audit):
            for timestep in (900.0, 800.0, 700.0):
                run(model, {**inputs, "timestep": at(1, timestep)})
        told.append({"ages": recorder.choice_ages()[0], "dense": recorder.dense_calls().get(0, Counter())})
        assert audit.layers()[0].audited == (1 if "fall_back" in bound else 3)
    assert told[0] == {"ages": Counter({0: 3}), "dense": Counter()}
    assert told[1] == {"ages": Counter({0: 1, 1: 1, 2: 1}), "dense": Counter()}
    assert told[2]["ages"] == Counter({0: 1})
    assert told[2]["dense"].total() == 2


def test_an_audit_of_a_video_model() -> None:
    """Without kept choices, and of groups of heads; where nothing is left out, nothing is off."""
    case = CASES["hunyuan_video"]
    model, inputs = made(case), given(case, SMALL)
    everything: Any = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(8), bs.Everything(), bs.ReferenceExecutor())
    for attention in (everything, bs.HeadGroups({(0,): everything, (1,): None})):
        audit, recorder = Audit(rows=16, every=1), DensityRecorder()
        with diffusion.attach(model, attention, min_tokens=1, audit=audit, recorder=recorder):
            run(model, inputs)
        assert recorder.sparse_calls() == {layer.layer: 1 for layer in audit.layers()}
        for layer in audit.layers():
            assert layer.covered_mass is not None
            assert layer.error is not None
            assert layer.covered_mass.value == pytest.approx(1, abs=1e-5)
            assert layer.error.value < 1e-5
