"""Which transformers of diffusers attend sparsely: every one has an answer, and every family is tried."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("diffusers")

import diffusers
from tests.hosts.diffusion_models import CASES, LARGE, MORE, SMALL, Case, given
from tests.hosts.test_diffusers import DENSE_LIMIT, attached, made, watched
from tests.stages import ByReference

from blocksparse import HilbertOrder
from blocksparse.hosts.diffusers import DENSE_BY_CHOICE, FAMILIES, UNKNOWN, DensityRecorder

pytestmark = pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")  # by Chroma itself
KEPT = {  # tokens beside the picture in a call alone, with 5 or 7 of text
    **dict.fromkeys(("bria", "cogview_4", "consis_id", "flux_3", "longcat_image", "ovis_image"), 7),
    **dict.fromkeys(("chroma", "ernie_image", "krea_2"), 5),
    "cosmos_3": 7 + 4,  # sound
    "framepack": (16 // 4) * 1 * 2 + 1 * 2 * 3 + 2 * 24 + 3 + 5,  # earlier frames at three sizes, and a picture
    "helios": (16 // 4) * 1 * 2 + 1 * 2 * 3 + 2 * 24,
    "hunyuan_image": 5 + 3,
    "ltx_2": 24,  # a frame that is given
    "minimax_h3": 7 + 24 + 6,  # the same, and sound
    "motif_video": 3 + 5,
    "qwen_image_21": 3 + 8 + 1,  # a reference, whose attention is of another kind
    "z_image": 24 + 32,  # both filled up to a multiple of 32
}
each_family = pytest.mark.parametrize("case", MORE.values(), ids=list(MORE))


def test_every_model_that_dispatches_has_an_answer() -> None:
    """It is sparse, dense by choice or unknown, and for the last two there is a reason."""
    folder, found = Path(diffusers.__file__).parent, set[str]()
    for path in (folder / "models").rglob("*.py"):
        if path.parent.name == "transformers" or "dispatch_attention_fn" in path.read_text(encoding="utf-8"):
            module = import_module(".".join(path.relative_to(folder.parent).with_suffix("").parts))
            found |= {
                name
                for name, kind in vars(module).items()
                if inspect.isclass(kind)
                and issubclass(kind, diffusers.ModelMixin)
                and kind.__module__ == module.__name__
                and hasattr(diffusers, name)
            }
    answers = [set(FAMILIES), set(DENSE_BY_CHOICE), set(UNKNOWN)]
    assert found == set.union(*answers)
    assert sum(map(len, answers)) == len(found)
    assert all(map(str.strip, (*DENSE_BY_CHOICE.values(), *UNKNOWN.values())))
    tried = {type(made(case)).__name__ for case in (*CASES.values(), *MORE.values())}
    assert tried == set(FAMILIES)


def without_zeros(case: Case) -> Any:
    """The model; parts that begin at zero, so that they change nothing until they are trained, are drawn."""
    model = made(case)
    for weight in model.parameters():
        if not weight.any():
            weight.normal_(std=0.2)
    return model


def outputs(model: Any, inputs: dict[str, Any]) -> Tensor:
    """All that the model gives, in one line: pictures, videos, sound."""
    out = model(**{"return_dict": False, **inputs})
    out = out.sample if hasattr(out, "sample") else out
    flat: list[Tensor] = []
    for part in out if isinstance(out, tuple | list) else (out,):
        flat += [x.flatten() for x in (part if isinstance(part, list) else [part]) if x is not None]
    return torch.cat(flat)


@pytest.mark.slow
@each_family
def test_a_family(case: Case) -> None:
    """Two sizes, alone and with both halves of guidance: the dense limit, sparsity, a record of each layer."""
    model, recorder = without_zeros(case), DensityRecorder()
    calls = [given(case, grid, batch) for grid in (SMALL, LARGE) for batch in (1, 2)]
    before = [outputs(model, inputs) for inputs in calls]
    with attached(model, DENSE_LIMIT):
        for inputs, expected in zip(calls, before, strict=True):
            assert (outputs(model, inputs) - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))
    with attached(model, recorder=recorder):
        for inputs, expected in zip(calls, before, strict=True):
            assert (outputs(model, inputs) - expected).abs().max() >= 1e-4
    assert set(recorder.sparse_calls()) == set(range(case.layers))
    assert bool((recorder.density() < 1).all())
    assert all(
        torch.equal(outputs(model, inputs), expected) for inputs, expected in zip(calls, before, strict=True)
    )


@pytest.mark.parametrize("name", MORE)
def test_pictures_have_their_order_and_all_else_is_kept(name: str) -> None:
    """Text, sound and frames that are given see everything, and are seen by all."""
    case, executor = MORE[name], ByReference()
    model, (T, H, W) = without_zeros(case), SMALL
    with attached(model, watched(executor)):
        outputs(model, given(case, SMALL))
    cells = HilbertOrder((1, H, T * W) if case.image else SMALL).cells("cpu")
    kept = set()
    for mask in executor.masks:
        k_index = mask.grid.permutation.k_index
        assert k_index is not None
        assert torch.equal(k_index[0, 0, 0, : len(cells)].long(), cells)
        pictures = len(cells) + 15 * (name == "flux_3")  # its reference is a picture too
        for row in range(mask.grid.rows):
            assert bool(mask.pairs(row)[..., pictures:].all())
        last = (pictures + 15) // 16  # every block of queries behind that of the last cell is of text alone
        assert bool(mask.keep[:, :, last:].all())
        kept.add(mask.grid.k_len - pictures)
    assert kept == {KEPT.get(name, 0)}


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # by Mochi
@pytest.mark.parametrize("case", {**CASES, **MORE}.values(), ids=[*CASES, *MORE])
def test_layers_count_in_the_order_in_which_they_run(case: Case) -> None:
    """And each model is told a prompt, by which runs and halves of guidance are told apart."""
    model, inputs, ran = made(case), given(case, SMALL), list[str]()
    family = FAMILIES[type(model).__name__]
    assert isinstance(family.prompt(inputs), Tensor)
    assert family.prompt(inputs) is family.prompt({**inputs, "hidden_states": None})
    with attached(model) as attachment:
        for layer in attachment.layers:
            layer.module.register_forward_hook(lambda *_, name=layer.name: ran.append(name))
        model(**{"return_dict": False, **inputs})
    blocks = [name.rsplit(".", 1)[0] for name in dict.fromkeys(ran)]
    assert list(dict.fromkeys(blocks)) == list(
        dict.fromkeys(layer.name.rsplit(".", 1)[0] for layer in attachment.layers)
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of blocks over text alone
def test_gradients_of_pictures_in_a_list_are_dense() -> None:
    """A frozen model with reentrant checkpointing: its blocks run once without gradients."""
    case, recorder = MORE["z_image"], DensityRecorder()
    model, inputs = made(case).requires_grad_(requires_grad=False), given(case, SMALL)
    model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=True))

    def gradient() -> Tensor:
        picture: Tensor = inputs["x"][0].clone().requires_grad_()
        with torch.enable_grad():
            outputs(model, {**inputs, "x": [picture]}).square().sum().backward()
        assert picture.grad is not None
        return picture.grad

    expected = gradient()
    with attached(model, recorder=recorder):
        torch.testing.assert_close(gradient(), expected)
    assert recorder.sparse_calls() == {}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_masks_of_flex_attention() -> None:
    """Kandinsky 5 chooses blocks by itself where its pipeline asks for that."""
    case, N, recorder = MORE["kandinsky_5"], 512, DensityRecorder()
    model, inputs = made(case), case.given((2, 16, 16), 1)
    blocks = torch.ones(1, 1, N // 64, N // 64, dtype=torch.bool)
    inputs["sparse_params"] = {"to_fractal": True, "P": 0.1, "sta_mask": blocks}
    for block in model.visual_transformer_blocks:
        block.self_attention.set_attention_backend("flex")
    expected = outputs(model, inputs)
    with attached(model, recorder=recorder):
        assert torch.equal(outputs(model, inputs), expected)
    assert recorder.dense_calls() == {0: Counter({"mask": 1})}


def test_masks_of_chroma() -> None:
    """`ChromaPipeline` passes numbers, which diffusers adds to the logits: they are not padding."""
    model, inputs = made(MORE["chroma"]), given(MORE["chroma"], SMALL)
    mask = inputs["attention_mask"]
    hides_cells = mask.clone()
    hides_cells[:, -9:] = False
    for other, reason in ((mask.float(), "mask"), (hides_cells, "tokens of no whole grid"), (mask, None)):
        recorder = DensityRecorder()
        expected = model(**{**inputs, "attention_mask": other}).sample
        with attached(model, recorder=recorder):
            actual = model(**{**inputs, "attention_mask": other}).sample
        assert torch.equal(actual, expected) == (reason is not None)
        assert recorder.dense_calls() == {layer: Counter({reason: 1}) for layer in range(3) if reason is not None}
