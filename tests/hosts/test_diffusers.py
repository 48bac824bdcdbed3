"""Every row of docs/start/diffusers.md, on tiny random models, against the same models without a pipeline."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

pytest.importorskip("diffusers")

import diffusers
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from tests.hosts.diffusion_models import CASES, LARGE, SMALL, TEXT, Case, at, given, positions
from tests.hosts.diffusion_pipelines import PIPELINES
from tests.specs import not_none
from tests.stages import ByReference

import blocksparse as bs
from blocksparse.hosts.diffusers import FAMILIES, DensityRecorder, Family, TokenLayout, attach
from blocksparse.hosts.diffusers.adapter import StepCounter
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.schedule import LayerPipeline

# Mochi asks for autocast to fp32, which CPUs do not have.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
each_model = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
JOINT = [name for name in CASES if name not in ("wan", "ltx")]  # text in the same sequence
PADDED = ["hunyuan_video", "hunyuan_video_15", "qwen_image", "mochi"]


DENSE_LIMIT: AnyPipeline = bs.Pipeline(
    bs.HilbertOrder(), bs.MeanPoolScorer(16), bs.Everything(), bs.ReferenceExecutor()
)
SPARSE: AnyPipeline = bs.Pipeline(bs.HilbertOrder(), bs.MeanPoolScorer(16), bs.TopK(1), bs.ReferenceExecutor())


def watched(executor: ByReference, order: Any = None) -> AnyPipeline:
    return bs.Pipeline(order or bs.HilbertOrder(), bs.MeanPoolScorer(16), bs.TopK(1), executor)


def made(case: Case) -> Any:
    torch.manual_seed(0)
    return case.model().eval()


def attached(model: Any, pipeline: LayerPipeline | bs.Schedule = SPARSE, **options: Any) -> Any:
    return attach(model, pipeline, min_tokens=1, **options)


def run(model: Any, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = model(**inputs, return_dict=False)[0]
    return out


@pytest.mark.parametrize("batch", [1, 2], ids=["alone", "guidance"])
@pytest.mark.parametrize("grid", [SMALL, LARGE], ids=["small", "large"])
@each_model
def test_dense_limit_sparsity_and_restoring(case: Case, grid: tuple[int, int, int], batch: int) -> None:
    """One pipeline serves both sizes. A batch holds both halves of guidance, with text of two lengths."""
    model, inputs = made(case), given(case, grid, batch)
    before = run(model, inputs)
    recorder = DensityRecorder()
    with attached(model, DENSE_LIMIT):
        assert (run(model, inputs) - before).abs().max() <= 1e-6
    with attached(model, recorder=recorder):
        assert (run(model, inputs) - before).abs().max() >= 1e-2
    assert recorder.dense_calls() == {}
    assert set(recorder.sparse_calls()) == set(range(case.layers))
    assert bool((recorder.density() < 0.7).all())
    assert torch.equal(run(model, inputs), before)


@each_model
def test_the_order_is_that_of_the_models_own_grid(case: Case) -> None:
    """And the recorder tells the density of what ran."""
    for grid in (SMALL, LARGE):
        T, H, W = grid
        executor, recorder, inputs = ByReference(), DensityRecorder(), given(case, grid)
        with attached(model := made(case), watched(executor), recorder=recorder):
            run(model, inputs)
        cells = bs.HilbertOrder((1, H, T * W) if case.image else grid).cells("cpu")
        for mask in executor.masks:
            k_index = not_none(mask.grid.permutation.k_index)
            assert torch.equal(k_index[0, 0, 0, : len(cells)].long(), cells)
        if len(executor.masks) == case.layers:  # one module per block
            assert torch.allclose(recorder.density(), torch.cat([mask.density() for mask in executor.masks]))
        else:  # SD 3.5 has two in some
            assert sum(recorder.sparse_calls().values()) == len(executor.masks) > case.layers


@pytest.mark.parametrize("every", [None, 2])
def test_the_recorder_tells_what_ran_densely(every: int | None) -> None:
    """The executor may attend densely where that is less work."""
    little = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(8), bs.TopK(1), bs.AutoExecutor(dense_below=1e30))
    recorder, model = DensityRecorder(), made(CASES["wan"])
    with attached(model, little, recorder=recorder, choose_every=every):
        run(model, given(CASES["wan"], SMALL))
    assert recorder.sparse_calls() == {}
    assert {layer: reasons.total() for layer, reasons in recorder.dense_calls().items()} == {0: 1, 1: 1}


@pytest.mark.parametrize("name", JOINT)
def test_text_sees_everything_and_is_seen_by_all(name: str) -> None:
    """Its rows of the first attention are those of dense attention, and its columns are kept in every row."""
    case, outputs, executor = CASES[name], [], ByReference()
    model, inputs = made(case), given(case, SMALL)
    block: Any = next(part for part in model.children() if isinstance(part, torch.nn.ModuleList))[0]
    attention = getattr(block, "attn1", None) or block.attn
    attention.register_forward_hook(lambda *call: outputs.append(call[-1]))
    run(model, inputs)
    with attached(model, watched(executor)):
        run(model, inputs)
    (pictures, text), (sparse_pictures, sparse_text) = (output[:2] for output in outputs)
    real = 5 if name in ("hunyuan_video", "qwen_image", "mochi") else TEXT
    real = 5 + 3 if name == "hunyuan_video_15" else real
    assert text.shape[1] >= real
    assert torch.allclose(text[:, :real], sparse_text[:, :real], atol=1e-6)
    assert (pictures - sparse_pictures).abs().max() > 1e-2
    mask, cells = executor.masks[0], sparse_pictures.shape[1]
    assert mask.grid.k_len == cells + real
    for row in range(mask.grid.rows):
        assert bool(mask.pairs(row)[..., cells:].all())


@pytest.mark.parametrize("name", PADDED)
def test_padding_of_text_changes_nothing(name: str) -> None:
    case = CASES[name]
    model, inputs = made(case), given(case, SMALL, 2)
    with attached(model):
        expected = run(model, inputs)
        inputs["encoder_hidden_states"][1, 5:] += 1  # behind the real tokens of the second entry
        if name == "mochi":  # whose pooled caption is another matter
            model.time_embed.pooler.register_forward_hook(lambda *_: torch.ones(2, 64))
            expected = run(model, given(case, SMALL, 2))
        assert torch.equal(run(model, inputs), expected)


def test_cross_attention_and_text_alone_are_left_to_the_model() -> None:
    """Their processors are not touched, even where text is as long as the video."""
    model = made(CASES["wan"])
    inputs = {**given(CASES["wan"], SMALL), "encoder_hidden_states": torch.randn(1, 72, 16)}
    recorder, processors = DensityRecorder(), model.attn_processors
    with attached(model, recorder=recorder):
        run(model, inputs)
        changed = {name for name, own in processors.items() if model.attn_processors[name] is not own}
    assert changed == {"blocks.0.attn1.processor", "blocks.1.attn1.processor"}
    assert recorder.sparse_calls() == {0: 1, 1: 1}


def test_any_pipeline_and_head_groups_run() -> None:
    """Orders that keep tokens in place, finer blocks than those that were scored, heads that differ."""
    model, inputs = made(CASES["flux"]), given(CASES["flux"], SMALL)
    expected = run(model, inputs)
    finer = bs.Refined(bs.Everything(), 2)
    for pipeline in (
        bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), finer, bs.ReferenceExecutor()),
        bs.Pipeline(bs.RasterOrder(), bs.MeanPoolScorer(16), bs.Everything(), bs.ReferenceExecutor()),
        bs.HeadGroups(
            {
                (1,): bs.Pipeline(
                    bs.TileOrder(tile=(1, 4, 4)), bs.MeanPoolScorer(16), finer, bs.ReferenceExecutor()
                ),
                (0,): None,
            }
        ),
    ):
        with attached(model, pipeline):
            assert (run(model, inputs) - expected).abs().max() <= 1e-6


def test_an_early_stop_does_not_go_with_text() -> None:
    stops: AnyPipeline = bs.Pipeline(
        bs.Identity(), bs.MeanPoolScorer(16), bs.Ranked(bs.TopK(1)), bs.GatherExecutor(0.1)
    )
    model = made(CASES["flux"])
    with (
        attached(model, stops),
        pytest.raises(TypeError, match=r"text are added .* Use an executor that does not stop"),
    ):
        run(model, given(CASES["flux"], SMALL))
    with attached(model := made(CASES["wan"]), stops):
        run(model, given(CASES["wan"], SMALL))


def test_an_order_with_a_grid_of_its_own_must_fit() -> None:
    model = made(CASES["wan"])
    fits = bs.GivenOrder(SMALL, bs.HilbertOrder(SMALL).cells("cpu"))
    with attached(model):
        expected = run(model, given(CASES["wan"], SMALL))
    with attached(model, watched(ByReference(), fits)):
        assert torch.equal(run(model, given(CASES["wan"], SMALL)), expected)
        message = r"made for the grid \(3, 4, 6\), and the tokens .* \(2, 7, 5\). Leave"
        with pytest.raises(ValueError, match=message):
            run(model, given(CASES["wan"], LARGE))
    for order in (bs.HilbertOrder(SMALL, prefix=7), bs.HilbertOrder(SMALL, suffix=7)):
        with pytest.raises(ValueError, match="the model says where its text stands, so leave out"):
            attached(model, watched(ByReference(), order))


def test_layers() -> None:
    """Blocks count through both lists of Flux; a dense layer is diffusers' own, bit by bit."""
    model, inputs, recorder = made(CASES["flux"]), given(CASES["flux"], SMALL), DensityRecorder()
    expected = run(model, inputs)
    with attached(model, bs.Schedule(SPARSE, layers={1: DENSE_LIMIT}, dense=(-1,)), recorder=recorder):
        run(model, inputs)
    assert recorder.sparse_calls() == {0: 1, 1: 1}
    assert recorder.dense_calls() == {2: Counter({"no pipeline for this layer": 1})}
    assert float(recorder.density()[0].mean()) < 0.7 < float(recorder.density()[1].mean())
    with attached(model, bs.Schedule(SPARSE, dense=(0, 1, 2))):
        assert torch.equal(run(model, inputs), expected)
    with pytest.raises(ValueError, match="there is no layer 3: the model has 3"):
        attached(model, bs.Schedule(SPARSE, dense=(3,)))


def test_steps() -> None:
    """Calls with one timestep are one step; a timestep nearer to noise begins another run."""
    model, inputs, recorder = made(CASES["wan"]), given(CASES["wan"], SMALL), DensityRecorder()
    expected = run(model, inputs)
    dense = []
    with attached(model, dense_steps=(0, 2), recorder=recorder):
        for timestep in (900.0, 900.0, 600.0, 600.0, 300.0, 100.0, 800.0, 700.0, 800.0):
            recorder.clear()
            out = run(model, {**inputs, "timestep": at(1, timestep)})
            dense.append(bool(recorder.dense_calls()))
            if timestep == 900.0:
                assert torch.equal(out, expected)
    assert dense == [True, True, False, False, True, False, True, False, True]
    assert recorder.dense_calls() == {layer: Counter({"dense step": 1}) for layer in (0, 1)}


def test_a_run_after_one_that_was_stopped() -> None:
    """A prompt that the run had not begins another, where prompts last; by timesteps alone it would go on."""
    a, b, c, d = (torch.zeros(1, 4, 8) for _ in range(4))
    # Each is what the model is called with: a timestep and a prompt; and the step that it belongs to.
    stopped = [(900, a, 0), (900, b, 0), (800, a, 1), (800, b, 1), (700, a, 2)]
    runs: dict[str, list[tuple[int, Tensor | None, int]]] = {
        "nearer to the picture": [*stopped, (600, c, 0), (600, d, 0), (500, c, 1), (500, d, 1), (950, c, 0)],
        "nearer to noise": [*stopped, (900, c, 0), (800, c, 1)],
        "of the same prompt": [*stopped, (600, a, 3), (600, b, 3)],
        "a view of the prompt": [*stopped, (600, a[:1], 3), (500, a[:1], 4)],
        "a half that begins late": [(900, a, 0), (800, a, 1), (700, a, 2), (700, b, 2), (600, a, 3), (600, b, 3)],
        "and comes first": [(900, a, 0), (800, a, 1), (700, b, 0), (700, a, 2), (600, c, 3), (600, a, 3)],
        "for one step alone": [(900, a, 0), (800, a, 1), (700, b, 0), (600, a, 3), (500, a, 4), (400, b, 5)],
        "made anew in each step": [(900, a, 0), (800, b, 1), (700, c, 2), (600, d, 3)],
        "another pipeline, a prompt each step": [*stopped, (900, b, 0), (800, c, 0), (700, d, 2), (600, b, 3)],
        "stopped in the first step": [(900, a, 0), (800, c, 1), (700, c, 2)],
        "no prompt": [(900, None, 0), (800, None, 1), (800, None, 1), (900, None, 0)],
    }
    for name, calls in runs.items():
        for sign in (1, -1):
            steps = StepCounter(rising=sign < 0)
            assert [steps.at(sign * at, prompt) for at, prompt, _ in calls] == [step for *_, step in calls], name


def test_a_run_that_begins_where_the_last_one_ended() -> None:
    """Another prompt begins it if the latents are others; a half of guidance that begins late shares them."""
    a, b, c, d, *latents = (torch.zeros(1, 4, 8) for _ in range(8))
    first = [(900, a, 0, 0), (900, b, 0, 0), (800, a, 1, 1), (800, b, 1, 1)]
    for calls in (
        [*first, (800, c, 2, 0), (800, d, 2, 0), (700, c, 3, 1), (700, d, 3, 1)],
        [*first, (800, c, 1, 1), (700, a, 2, 2)],
    ):
        steps = StepCounter()
        assert [steps.at(at, x, latents[i]) for at, x, i, _ in calls] == [step for *_, step in calls]
    model, recorder, dense = made(CASES["wan"]), DensityRecorder(), []
    with attached(model, dense_steps=(0,), recorder=recorder):
        for timesteps in ((900.0, 800.0, 700.0), (700.0, 600.0)):
            inputs = given(CASES["wan"], SMALL)
            for timestep in timesteps:
                recorder.clear()
                run(model, inputs | {"timestep": at(1, timestep)})
                dense.append(bool(recorder.dense_calls()))
    assert dense == [True, False, False, True, False]


def test_dense_steps_after_a_run_that_was_stopped() -> None:
    """The first step of the next one is dense, and takes no choice of the last one."""
    model, recorder = made(CASES["wan"]), DensityRecorder()
    dense, ages = [], []
    with attached(model, dense_steps=(0,), choose_every=9, recorder=recorder):
        for timesteps in ((900.0, 800.0, 700.0), (600.0, 500.0, 400.0)):
            inputs = given(CASES["wan"], SMALL)
            for timestep in timesteps:
                recorder.clear()
                run(model, {**inputs, "timestep": at(1, timestep)})
                dense.append(bool(recorder.dense_calls()))
                ages.append(sorted(recorder.choice_ages().get(1, Counter())))
    assert dense == 2 * [True, False, False]
    assert ages == 2 * [[], [0], [1]]


def test_steps_of_frames_that_follow_one_another() -> None:
    """Diffusion forcing: the last frames are pure noise for many steps. The number of tokens makes no step."""
    model, inputs, recorder = made(CASES["wan"]), given(CASES["wan"], SMALL), DensityRecorder()
    adapter = attached(model, dense_steps=(0,), recorder=recorder)._adapter
    dense = []
    for frames in ((999, 999, 999), (999,), (819, 999, 999), (639, 999, 999), (459, 819, 999), (999, 999, 999)):
        adapter.begin({**inputs, "timestep": torch.tensor([frames])})
        dense.append(adapter.now.dense is not None)
    assert dense == [True, True, False, False, False, True]


def test_a_timestep_may_be_a_number(request: pytest.FixtureRequest) -> None:
    """Of Python, which the default dtype would round: 999 and 1000 are one number of bf16."""
    model, inputs = made(CASES["wan"]), given(CASES["wan"], SMALL)
    adapter = attached(model, dense_steps=(0,))._adapter
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        adapter.begin({**inputs, "timestep": 1000})
        assert adapter.now.dense is not None
        adapter.begin({**inputs, "timestep": 999})
        assert adapter.now.dense is None


def test_choices_last() -> None:
    """For three steps each half of guidance attends to what it chose; a dense step before them does not count."""
    model, inputs = made(CASES["wan"]), given(CASES["wan"], SMALL)
    recorder, executor = DensityRecorder(), ByReference()
    other, ages = given(CASES["wan"], SMALL), []
    with attached(model, watched(executor), dense_steps=(0,), choose_every=3, recorder=recorder):
        for timestep in (900.0, 800.0, 700.0, 600.0, 500.0, 400.0, 900.0, 300.0):
            recorder.clear()
            for half in (inputs, other):
                run(model, {**half, "timestep": at(1, timestep)})
            ages.append(sorted(recorder.choice_ages().get(1, Counter()).items()))
    assert ages == [[], [(0, 2)], [(1, 2)], [(2, 2)], [(0, 2)], [(1, 2)], [], [(0, 2)]]
    masks = [executor.masks[i : i + 4] for i in range(0, len(executor.masks), 4)]  # two layers of two halves
    for step, old in ((1, 0), (2, 0), (4, 3)):
        assert all(mine is its for mine, its in zip(masks[step], masks[old], strict=True))
    assert not any(mine is its for mine, its in zip(masks[3], masks[0], strict=True))
    assert len({id(mask) for mask in masks[0]}) == 4
    assert float(recorder.density().mean()) < 0.7


def test_choices_of_halves_stay_apart_where_a_cache_skips_blocks() -> None:
    """The cache takes the second block of one half from the step before; the other half runs it."""
    model, executor = made(CASES["wan"]), ByReference()
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.05))
    halves = {name: given(CASES["wan"], SMALL) for name in ("cond", "uncond")}
    masks: list[list[bs.BlockMask]] = []
    with attached(model, watched(executor), dense_steps=(0,), choose_every=4):
        for timestep in (900.0, 800.0, 799.99):
            for name, half in halves.items():
                if timestep < 800.0 and name == "uncond":
                    half = {**half, "hidden_states": torch.randn_like(half["hidden_states"])}
                executor.masks.clear()
                with model.cache_context(name):
                    run(model, {**half, "timestep": at(1, timestep)})
                masks.append([*executor.masks])
    assert [len(of_call) for of_call in masks] == [0, 0, 2, 2, 1, 2]
    for later, before in ((4, 2), (5, 3)):
        assert all(mine is its for mine, its in zip(masks[later], masks[before], strict=False))


def test_a_choice_of_the_same_step_is_the_call_itself() -> None:
    model, inputs = made(CASES["hunyuan_video"]), given(CASES["hunyuan_video"], SMALL, 2)
    with attached(model):
        expected = run(model, inputs)
    with attached(model, choose_every=2):
        assert torch.equal(run(model, inputs), expected)
        run(model, given(CASES["hunyuan_video"], LARGE))  # other sizes are another choice
        assert torch.equal(run(model, inputs), expected)
    groups = bs.HeadGroups({(0,): SPARSE, (1,): None})
    with pytest.raises(ValueError, match="'choose_every' keeps what pipelines choose, and HeadGroups are several"):
        attached(model, groups, choose_every=2)


def test_budgets_by_step() -> None:
    """From step 1 on another pipeline, from step 3 on in one layer alone; another run has the first one again."""
    model, inputs, recorder = made(CASES["wan"]), given(CASES["wan"], SMALL), DensityRecorder()
    less: AnyPipeline = bs.Pipeline(bs.HilbertOrder(), bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())
    phases: dict[int, Any] = {3: bs.Schedule(SPARSE, dense=(0,)), 1: less}
    outs, densities = [], []
    with attached(model, DENSE_LIMIT, by_step=phases, choose_every=2, recorder=recorder):
        for timestep in (900.0, 800.0, 700.0, 600.0, 950.0):
            recorder.clear()
            outs.append(run(model, {**inputs, "timestep": at(1, timestep)}))
            densities.append([round(float(x), 3) for x in recorder.density().mean(1)])
    assert densities[0] == densities[4] == [1, 1]
    assert densities[1] == densities[2]
    assert 1 > densities[1][1] > densities[3][1] > 0
    assert densities[3][0] != densities[3][0]  # not sparse
    for step, timestep in ((0, 900.0), (1, 800.0), (3, 600.0)):
        with attached(model, {0: DENSE_LIMIT, **phases}[step]):
            assert torch.equal(run(model, {**inputs, "timestep": at(1, timestep)}), outs[step])


def test_rules_on_cells_take_the_grid_from_the_model() -> None:
    """Inside of unions too."""
    model, inputs, executor = made(CASES["wan"]), given(CASES["wan"], SMALL), ByReference()
    for selector in (bs.Frames(first=0, period=3), bs.TopK(1) | bs.Frames(first=0, period=3)):
        pipeline: AnyPipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(8), selector, executor)
        executor.masks.clear()
        with attached(model, pipeline):
            run(model, inputs)
        keep = executor.masks[0].keep[0, 0]
        assert bool(keep[:, :3].all())  # 24 cells of frame 0, in blocks of 8
        assert bool(keep[:, 3:].any()) == (not isinstance(selector, bs.Frames))
    with (
        attached(model, bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(8), bs.Frames((1, 2, 3)), executor)),
        pytest.raises(ValueError, match=r"made for other tokens than those of this call, \(3, 4, 6\)"),
    ):
        run(model, inputs)


PER_TOKEN = torch.cat((torch.zeros(1, 24), torch.full((1, 48), 900.0)), dim=1)


@pytest.mark.parametrize(
    ("name", "timesteps"),
    [
        ("mochi", [at(1, timestep) for timestep in (0.0, 250.0, 0.0, 500.0)]),  # they rise
        ("wan", [PER_TOKEN, 0.5 * PER_TOKEN, PER_TOKEN, 0.5 * PER_TOKEN]),  # Wan 2.2: 0 for a given first frame
    ],
)
def test_steps_of_other_timesteps(name: str, timesteps: list[Tensor]) -> None:
    model, inputs, recorder = made(CASES[name]), given(CASES[name], SMALL), DensityRecorder()
    with attached(model, dense_steps=(0,), recorder=recorder):
        for timestep in timesteps:
            run(model, {**inputs, "timestep": timestep})
    assert recorder.sparse_calls() == {0: 2, 1: 2}
    assert recorder.dense_calls()[0] == Counter({"dense step": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "calls"),
    [
        ("wan", {"guidance_scale": 1.0}, 1),
        ("wan", {"guidance_scale": 5.0}, 2),  # one call for each half
        ("ltx", {"guidance_scale": 3.0}, 1),  # both halves in one batch, as with all whose text is not padded
        ("flux", {}, 1),  # guidance is an input of the model
        ("flux2", {}, 1),
        ("qwen_image", {"true_cfg_scale": 4.0}, 2),
        ("hunyuan_video", {}, 1),
        ("hunyuan_video", {"true_cfg_scale": 4.0}, 2),
        ("cogvideox", {"guidance_scale": 6.0}, 1),
        ("cogvideox", {"guidance_scale": 1.0}, 1),
        ("mochi", {"guidance_scale": 4.5}, 2),  # one batch, and the model attends entry by entry
        ("sd3", {"guidance_scale": 7.0}, 1),
    ],
)
def test_a_pipeline_end_to_end(name: str, options: dict[str, Any], calls: int) -> None:
    """4 steps, dense in the first; twice, because each call of a pipeline counts its steps anew."""
    transformer, recorder = made(CASES[name]), DensityRecorder()
    pipe, arguments = PIPELINES[name](transformer)
    if name == "hunyuan_video" and options:
        negative = {"prompt_embeds": 1, "pooled_prompt_embeds": 1, "prompt_attention_mask": 0}
        arguments |= {f"negative_{key}": arguments[key] + shift for key, shift in negative.items()}
    arguments |= options | {"num_inference_steps": 4, "output_type": "latent", "return_dict": False}

    def latents() -> Tensor:
        return torch.as_tensor(pipe(**arguments, generator=torch.Generator().manual_seed(0))[0])

    expected = latents()
    with attached(transformer, DENSE_LIMIT, dense_steps=(0,)):
        assert (latents() - expected).abs().max() <= 2e-6 * max(1.0, float(expected.abs().max()))
    with attached(transformer, dense_steps=(0,), recorder=recorder):
        sparse = latents()
        assert torch.equal(latents(), sparse)
    last = CASES[name].layers - 1  # a block with one attention module, in all of them
    assert recorder.sparse_calls()[last] == 2 * 3 * calls
    assert recorder.dense_calls()[last] == Counter({"dense step": 2 * calls})
    assert (sparse - expected).abs().max() > 1e-2
    assert torch.equal(latents(), expected)


def test_several_pictures() -> None:
    """Reference pictures of an editing model follow the picture; each gets an order of its own."""
    executor = ByReference()
    qwen, inputs = made(CASES["qwen_image"]), given(CASES["qwen_image"], SMALL)  # 4 x 18
    inputs |= {"hidden_states": torch.randn(1, 72 + 15, 4), "img_shapes": [[(1, 4, 18), (1, 3, 5)]]}
    expected = run(qwen, inputs)
    with attached(qwen, DENSE_LIMIT):
        assert (run(qwen, inputs) - expected).abs().max() <= 1e-6
    with attached(qwen, watched(executor)):
        run(qwen, inputs)
    both = bs.HilbertOrder((1, 4, 18)).cells("cpu"), bs.HilbertOrder((1, 3, 5)).cells("cpu") + 72
    k_index = not_none(executor.masks[0].grid.permutation.k_index)
    assert torch.equal(k_index[0, 0, 0, :87].long(), torch.cat(both))

    flux, inputs = made(CASES["flux"]), given(CASES["flux"], SMALL)
    reference = positions((1, 3, 5), 3) + torch.tensor([1.0, 0.0, 0.0])
    inputs |= {"hidden_states": torch.randn(1, 87, 4), "img_ids": torch.cat((inputs["img_ids"], reference))}
    with attached(flux, watched(executor)):
        run(flux, inputs)
    k_index = not_none(executor.masks[-1].grid.permutation.k_index)
    assert torch.equal(k_index[0, 0, 0, :87].long(), torch.cat(both))


def _shuffled(inputs: dict[str, Any]) -> None:
    inputs["img_ids"] = inputs["img_ids"].flip(0)


def _without_sizes(inputs: dict[str, Any]) -> None:
    T, H, W = (inputs.pop(name) for name in ("num_frames", "height", "width"))
    inputs["video_coords"] = torch.cartesian_prod(*(torch.arange(n) for n in (T, H, W))).float().mT[None]


def _holes(inputs: dict[str, Any]) -> None:
    inputs["encoder_hidden_states_mask"][:, 2] = False


def _other_shapes(inputs: dict[str, Any]) -> None:
    inputs["img_shapes"] = [[(1, 4, 18)], [(1, 18, 4)]]


@pytest.mark.parametrize(
    ("name", "change", "batch"),
    [
        ("flux", _shuffled, 1),
        ("ltx", _without_sizes, 1),
        ("qwen_image", _holes, 1),
        ("qwen_image", _other_shapes, 2),
    ],
)
def test_tokens_of_no_whole_grid_are_dense(name: str, change: Any, batch: int) -> None:
    model, inputs, recorder = made(CASES[name]), given(CASES[name], SMALL, batch), DensityRecorder()
    change(inputs)
    expected = run(model, inputs)
    with attached(model, recorder=recorder):
        assert torch.equal(run(model, inputs), expected)
    assert recorder.dense_calls()[0] == Counter({"tokens of no whole grid": 1})


def test_few_tokens_and_gradients_are_dense() -> None:
    model, inputs, recorder = made(CASES["wan"]), given(CASES["wan"], SMALL), DensityRecorder()
    expected = run(model, inputs)
    with attach(model, SPARSE, recorder=recorder):
        assert torch.equal(run(model, inputs), expected)
    assert recorder.dense_calls()[0] == Counter({"fewer than min_tokens": 1})
    outside = torch.ones((), requires_grad=True)  # what is trained on a frozen model
    with attached(model.requires_grad_(requires_grad=False), recorder=recorder), torch.enable_grad():
        (run(model, inputs) * outside).sum().backward()
    assert recorder.dense_calls()[0] == Counter({"fewer than min_tokens": 1, "gradients": 1})


@pytest.mark.parametrize("name", ["wan", "flux"])
@pytest.mark.parametrize("part", ["blocks", "model"])
@pytest.mark.parametrize("training", [False, True])
def test_a_training_step_is_dense_whatever_is_checkpointed(name: str, part: str, training: bool) -> None:
    """Reentrant checkpointing runs the forward pass without gradients, so grad mode in a block does not tell."""
    inputs, recorder = given(CASES[name], SMALL), DensityRecorder()

    def checkpointed(call: Any, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=True)

    def step(model: Any, *, checkpoint: bool) -> list[Tensor]:
        model.train(training)
        with torch.enable_grad():
            if checkpoint and part == "model":
                wanted = torch.ones((), requires_grad=True)
                loss = checkpointed(lambda _: run(model, inputs), wanted).square().mean()
            else:
                if checkpoint:
                    model.enable_gradient_checkpointing(checkpointed)
                loss = run(model, inputs).square().mean()
            loss.backward()
        return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    expected = step(made(CASES[name]), checkpoint=False)
    with attached(model := made(CASES[name]), recorder=recorder):
        actual = step(model, checkpoint=True)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert recorder.sparse_calls() == {}


def test_a_mask_of_ones_own_is_dense() -> None:
    """Given to each attention module, which diffusers' blocks let pass."""
    model, inputs, recorder = made(CASES["flux"]), given(CASES["flux"], SMALL), DensityRecorder()
    mask = torch.ones(79, 79, dtype=torch.bool).tril()
    for block in model.single_transformer_blocks:
        block.attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
    expected = run(model, inputs)
    with attached(model, bs.Schedule(SPARSE, dense=(0,)), recorder=recorder):
        assert torch.equal(run(model, inputs), expected)
    assert recorder.dense_calls()[1] == recorder.dense_calls()[2] == Counter({"mask": 1})


class Regions(HunyuanVideoAttnProcessor2_0):  # type: ignore[misc]
    """A processor of a user's own, which hides some cells."""

    def __call__(self, attn: Any, states: Tensor, *, attention_mask: Tensor, **options: Any) -> Any:
        shown = torch.arange(attention_mask.shape[-1]) >= 20
        return super().__call__(attn, states, attention_mask=attention_mask & shown, **options)


class WithoutTheDispatcher(FluxAttnProcessor):  # type: ignore[misc]
    """A processor of a user's own, which has a backend as its base class does, and calls PyTorch's function."""

    def __call__(self, attn: Any, states: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (
            f(states).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for f in (attn.to_q, attn.to_k, attn.to_v)
        )
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2, 3)


def test_processors_of_ones_own() -> None:
    """Their masks are no padding, which attention would leave out by itself."""
    model, inputs, recorder = made(CASES["hunyuan_video"]), given(CASES["hunyuan_video"], SMALL), DensityRecorder()
    plain = run(model, inputs)
    model.transformer_blocks[0].attn.set_processor(Regions())
    expected = run(model, inputs)
    assert (expected - plain).abs().max() > 1e-3
    with attached(model, DENSE_LIMIT, recorder=recorder):
        assert (run(model, inputs) - expected).abs().max() <= 1e-6
    assert recorder.dense_calls() == {0: Counter({"mask": 1})}
    with attached(model, watched(executor := ByReference())):
        run(model, inputs)  # without a record, others share one route
    assert len(executor.masks) == sum(recorder.sparse_calls().values()) > 0
    model, inputs, recorder = made(CASES["flux"]), given(CASES["flux"], SMALL), DensityRecorder()
    model.single_transformer_blocks[0].attn.set_processor(WithoutTheDispatcher())
    with attached(model, recorder=recorder):
        run(model, inputs)
        assert recorder.sparse_calls() == {0: 1, 1: 1, 2: 1}
        model.single_transformer_blocks[0].attn.processor._attention_backend = "native"
        with pytest.raises(RuntimeError, match=r"backend of single_transformer_blocks\.0\.attn was changed while"):
            run(model, inputs)


@pytest.mark.parametrize("attaches_first", [True, False])
def test_guidance_may_skip_the_scores_of_a_layer(attaches_first: bool) -> None:
    """As perturbed-attention guidance does: the values stand in the place of attention, by a function mode."""
    skips = LayerSkipConfig([0], skip_attention=False, skip_attention_scores=True, skip_ff=False)
    model, inputs, recorder = made(CASES["qwen_image"]), given(CASES["qwen_image"], SMALL), DensityRecorder()
    plain = run(model, inputs)
    if not attaches_first:
        apply_layer_skip(model, skips)
    with attached(model, DENSE_LIMIT, recorder=recorder):
        if attaches_first:
            apply_layer_skip(model, skips)
        out = run(model, inputs)
    skipped = run(model, inputs)
    assert float((skipped - plain).abs().max()) > 0.01
    assert_close(out, skipped)
    assert recorder.dense_calls() == {0: Counter({"function mode": 1})}


def test_modules_called_by_themselves_are_dense() -> None:
    model, recorder, x = made(CASES["flux"]), DensityRecorder(), torch.randn(1, 79, 32)
    attention = model.single_transformer_blocks[0].attn
    expected = attention(x)
    with attached(model, recorder=recorder):
        assert torch.equal(attention(x), expected)
    assert recorder.dense_calls() == {1: Counter({"outside a forward call": 1})}


@pytest.mark.parametrize("name", ["flux", "qwen_image", "cogvideox"])
def test_fused_projections_and_half_precision(name: str) -> None:
    model, recorder = made(CASES[name]).bfloat16(), DensityRecorder()
    model.fuse_qkv_projections()
    inputs = {
        name: x.bfloat16() if isinstance(x, Tensor) and name.endswith(("states", "projections", "ids")) else x
        for name, x in given(CASES[name], SMALL).items()
    }
    expected = run(model, inputs)
    with attached(model, DENSE_LIMIT):
        assert (run(model, inputs) - expected).abs().max() <= 2**-6  # two steps of bfloat16 at 2
    with attached(model, recorder=recorder):
        assert run(model, inputs).dtype == torch.bfloat16
    assert recorder.dense_calls() == {}
    assert torch.equal(run(model, inputs), expected)


def test_image_prompts() -> None:
    """The second attention of their processor is to the image prompt; copies have its newest scale."""
    model, inputs, recorder = made(CASES["flux"]), given(CASES["flux"], SMALL), DensityRecorder()
    attention = model.transformer_blocks[0].attn
    attention.set_processor(FluxIPAdapterAttnProcessor(32, 16, (4,)))
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(1, 1, 4, 16)]}
    expected = run(model, inputs)
    with attached(model, DENSE_LIMIT, recorder=recorder):
        assert (run(model, inputs) - expected).abs().max() <= 1e-6
    assert recorder.sparse_calls() == {0: 1, 1: 1, 2: 1}
    assert recorder.dense_calls() == {0: Counter({"cross attention": 1})}
    assert torch.equal(run(model, inputs), expected)
    with attached(model):
        attention.processor.scale = [0.0]  # as pipelines do
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert not torch.equal(run(model, inputs), expected)
    assert torch.equal(run(copied, inputs), run(model, inputs))
    assert torch.equal(run(pickled, inputs), run(model, inputs))


def test_ring_and_uneven_parts_are_dense() -> None:
    """Known before ranks exchange anything, so that one process can tell."""
    adapter = attached(model := made(CASES["flux"]))._adapter
    inputs, q = given(CASES["flux"], SMALL), torch.zeros(1, 2, 79, 16)
    found: list[str | None] = []
    model.proj_out.register_forward_hook(
        lambda *_: found.extend(
            adapter.dense_before_gathering(0, q, mask, ranks=ranks, ring=ring)
            for ranks, ring, mask in ((1, True, None), (2, False, None), (1, False, q), (1, False, None))
        )
    )
    run(model, inputs)
    assert found == ["ring attention", "uneven parts of ranks", "mask", None]


def test_dense_calls_take_the_backend_that_was_set() -> None:
    model, inputs = made(CASES["wan"]), given(CASES["wan"], SMALL)
    model.set_attention_backend("_native_math")
    try:
        expected = run(model, inputs)
        with attached(model, dense_steps=(0,)):
            assert torch.equal(run(model, inputs), expected)
        assert {p._attention_backend.value for p in model.attn_processors.values()} == {"_native_math"}
    finally:
        model.reset_attention_backend()
        diffusers.models.attention_dispatch._AttentionBackendRegistry.set_active_backend(
            diffusers.models.attention_dispatch.AttentionBackendName.NATIVE
        )


@each_model
def test_everything_is_restored_after_an_exception(case: Case) -> None:
    model, inputs = made(case), given(case, SMALL)
    expected, processors = (
        run(model, inputs),
        {name: m.processor for name, m in model.named_modules() if hasattr(m, "processor")},
    )
    registry = diffusers.models.attention_dispatch._AttentionBackendRegistry
    tables = [dict(registry._backends), dict(registry._constraints), dict(registry._supported_arg_names)]
    fails: AnyPipeline = bs.Pipeline(
        bs.HilbertOrder((1, 2, 3)), bs.MeanPoolScorer(16), bs.TopK(1), bs.ReferenceExecutor()
    )
    with pytest.raises(ValueError, match="made for the grid"), attached(model, fails):
        run(model, inputs)
    hook = model.proj_out.register_forward_hook(lambda *_: 1 / 0)
    attachment = attached(model)
    with pytest.raises(ZeroDivisionError):
        run(model, inputs)
    hook.remove()
    with attachment:
        assert (run(model, inputs) - expected).abs().max() > 1e-2  # the next call runs as ever
    assert {name: m.processor for name, m in model.named_modules() if hasattr(m, "processor")} == processors
    assert tables == [registry._backends, registry._constraints, registry._supported_arg_names]
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert torch.equal(run(model, inputs), expected)


def test_an_interrupt_from_the_keyboard() -> None:
    """After which PyTorch calls no hooks."""
    model, inputs = made(CASES["wan"]), given(CASES["wan"], SMALL)
    dense = run(model, inputs)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.proj_out.register_forward_hook(interrupt)
    attachment = attached(model)
    with pytest.raises(KeyboardInterrupt):
        run(model, inputs)
    hook.remove()
    assert (run(model, inputs) - dense).abs().max() > 1e-2
    attachment.detach()
    assert torch.equal(run(model, inputs), dense)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_copies_have_no_pipeline_nor_have_processors_that_somebody_kept(name: str) -> None:
    """As `fuse_qkv_projections` of CogVideoX keeps processors, to put them back later."""
    model, inputs = made(CASES[name]), given(CASES[name], SMALL)
    expected = run(model, inputs)
    with attached(model):
        kept, sparse = model.attn_processors, run(model, inputs)
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert torch.equal(run(copied, inputs), expected)
        assert torch.equal(run(pickled, inputs), expected)
        with attached(copied):
            assert torch.equal(run(copied, inputs), sparse)
    model.set_attn_processor(kept)
    for one in (copied, model, copy.deepcopy(model)):
        assert torch.equal(run(one, inputs), expected)
    with attached(model):
        assert torch.equal(run(model, inputs), sparse)


def test_processors_that_layers_share_are_told_apart() -> None:
    model, inputs = made(CASES["wan"]), given(CASES["wan"], SMALL)
    shared = model.blocks[0].attn1.processor
    for block in model.blocks:
        block.attn1.processor = shared
    recorder = DensityRecorder()
    with attached(model, bs.Schedule(SPARSE, dense=(0,)), recorder=recorder):
        run(model, inputs)
    assert recorder.sparse_calls() == {1: 1}
    assert all(block.attn1.processor is shared for block in model.blocks)


def test_nothing_outlives_a_model() -> None:
    registry = diffusers.models.attention_dispatch._AttentionBackendRegistry
    before = dict(registry._backends)
    model = made(CASES["wan"])
    attached(model)
    assert before != registry._backends
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    assert before == registry._backends


def test_a_processor_that_attends_by_itself_is_an_error() -> None:
    class Own:
        def __call__(
            self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: Any
        ) -> tuple[Tensor, Tensor]:
            return hidden_states, encoder_hidden_states

    model = made(CASES["cogvideox"])
    model.transformer_blocks[1].attn1.set_processor(Own())
    with (
        attached(model),
        pytest.raises(RuntimeError, match="Own computed attention without PyTorch's scaled_dot_product_attention"),
    ):
        run(model, given(CASES["cogvideox"], SMALL))


def test_changes_while_attached_are_refused() -> None:
    model, inputs = made(CASES["wan"]), given(CASES["wan"], SMALL)
    with attached(model) as attachment:
        with pytest.raises(ValueError, match="is attached already"):
            attached(model)
        model.set_attention_backend("native")
        with pytest.raises(RuntimeError, match=r"backend of blocks\.0\.attn1 was changed while"):
            run(model, inputs)
        attachment.detach()
        attachment.detach()
    model.reset_attention_backend()
    with attached(model):
        own = type(model.blocks[0].attn1.processor)()
        model.blocks[0].attn1.set_processor(own)
        with pytest.raises(RuntimeError, match=r"the processor of blocks\.0\.attn1 was changed while"):
            run(model, inputs)
    assert model.blocks[0].attn1.processor is own


def test_one_forward_call_at_a_time() -> None:
    model, inputs = made(CASES["wan"]), given(CASES["wan"], SMALL)
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if not inside.is_set():
            inside.set()
            go_on.wait(30)

    with attached(model) as attachment:
        hook = model.proj_out.register_forward_hook(wait)
        expected: list[Tensor] = []
        thread = threading.Thread(target=lambda: expected.append(torch.no_grad()(run)(model, inputs)))
        thread.start()
        assert inside.wait(30)
        try:
            with pytest.raises(RuntimeError, match="still runs in another thread"):
                run(model, inputs)
            with pytest.raises(RuntimeError, match="Detach when it has ended"):
                attachment.detach()
        finally:
            go_on.set()
            thread.join()
            hook.remove()
        assert torch.equal(run(model, inputs), expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "hunyuan_video", "cogvideox"])
def test_blocks_compile_whole(name: str) -> None:
    """As `compile_repeated_blocks(fullgraph=True)` does; dense and sparse steps are two graphs, for all layers.

    PyTorch gives up after 8 variants of one block, and real models have 40.
    """
    case = CASES[name]
    few, inputs = made(case), given(case, SMALL, 2)
    model = type(few).from_config({**few.config, "num_layers": 10}).eval()
    blocks = [block for part in model.children() if isinstance(part, torch.nn.ModuleList) for block in part]
    torch._dynamo.reset()
    with attached(model, dense_steps=(0,)):
        steps = [{**inputs, "timestep": inputs["timestep"] * share} for share in (1, 0.9, 0.8)]
        expected = [run(model, step) for step in steps]
        for block in blocks:
            block.compile(backend="eager", fullgraph=True)
        for _ in range(2):
            for step, out in zip(steps, expected, strict=True):
                assert torch.equal(run(model, step), out)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "qwen_image"])
def test_whole_models_compile(name: str) -> None:
    """The layout of a call is read outside the graph: there is one for dense steps, and one for sparse ones."""
    model, inputs = made(CASES[name]), given(CASES[name], SMALL)
    steps = [{**inputs, "timestep": inputs["timestep"] * share} for share in (1, 0.9, 0.8)]
    torch._dynamo.reset()
    with attached(model, dense_steps=(0,)):
        expected = [run(model, step) for step in steps]
        both: tuple[Any, ...] = (model, torch.compile(model, backend="eager", fullgraph=True))
        for compiled in both:
            if compiled is model:
                model.compile(backend="eager", fullgraph=True)
            for again in (False, True):
                with torch._dynamo.config.patch(error_on_recompile=again):
                    for step, out in zip(steps, expected, strict=True):
                        assert torch.equal(run(compiled, step), out)
    assert not torch.equal(expected[1], run(model, steps[1]))  # detached, and compiled anew
    torch._dynamo.reset()


def test_the_page_has_every_model() -> None:
    page = (Path(__file__).parents[2] / "docs" / "start" / "diffusers.md").read_text(encoding="utf-8")
    models = page.split("## Models")[1].split("## Steps")[0]
    assert not [name for name in FAMILIES if f"`{name}`" not in models]


def test_a_model_of_ones_own() -> None:
    class Own(diffusers.WanTransformer3DModel):  # type: ignore[misc]
        pass

    torch.manual_seed(0)
    wan = made(CASES["wan"])
    model, inputs = Own.from_config(wan.config).eval(), given(CASES["wan"], SMALL)
    model.load_state_dict(wan.state_dict())
    with pytest.raises(ValueError, match=r"Own is not a known transformer .* Give family=Family"):
        attached(model)
    family = Family(lambda config, given: TokenLayout((SMALL,)), attention=("attn1",))
    with attached(wan), attached(model, family=family):
        assert torch.equal(run(model, inputs), run(wan, inputs))
    with pytest.raises(TypeError, match="'attention' must be a tuple: 'attn1'"):
        Family(lambda config, given: None, "attn1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no blocks with attention named attn9"):
        attached(model, family=Family(lambda config, given: None, attention=("attn9",)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grids": SMALL}, TypeError, r"'grids' must be a tuple of grids \(T, H, W\), .*: \(3, 4, 6\)"),
        ({"grids": ((0, 4, 6),)}, ValueError, r"'grids' must be a tuple of grids"),
        ({"text": -1}, ValueError, "'text' must be a whole number, at least 0: -1"),
        (
            {"text": 3, "real": (3, 4)},
            ValueError,
            r"'real' must name at most 'text' \(3\) tokens per entry: \(3, 4\)",
        ),
    ],
)
def test_bad_layouts(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenLayout(**{"grids": (SMALL,), **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pipeline": lambda q, k, v: q}, TypeError, "'pipeline' must be a Pipeline, HeadGroups or a Schedule"),
        ({"dense_steps": 2}, TypeError, r"'dense_steps' must be a sequence of whole numbers: 2"),
        ({"dense_steps": (0, -1)}, ValueError, r"'dense_steps\[1\]' must be a whole number, at least 0: -1"),
        ({"by_step": [SPARSE]}, TypeError, "'by_step' must be a mapping of steps to pipelines"),
        ({"by_step": {0: SPARSE}}, ValueError, "'a step of by_step' must be a whole number, at least 1: 0"),
        ({"by_step": {5: None}}, TypeError, "'pipeline' must be a Pipeline, HeadGroups or a Schedule: None"),
        ({"choose_every": 0}, ValueError, "'choose_every' must be a whole number, at least 1, or None: 0"),
        ({"min_tokens": 0}, ValueError, "'min_tokens' must be a whole number, at least 1: 0"),
        ({"recorder": []}, TypeError, "'recorder' must be a DensityRecorder, or None"),
        ({"family": "wan"}, TypeError, "'family' must be a Family, or None"),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "'model' must be a model of diffusers: Linear"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"model": made(CASES["wan"]), "pipeline": SPARSE, **options}
    with pytest.raises(error, match=message):
        attach(**arguments)


@pytest.mark.slow
def test_ulysses() -> None:
    """Two ranks give what one gives, sparse too: each has the whole grid, and text lies between its parts."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.hosts.ulysses"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env, timeout=300, check=False)
    assert printed.returncode == 0, printed.stderr[-3000:]
    assert printed.stdout.count("as one rank") == 2 * 2
