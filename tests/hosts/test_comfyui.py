"""The node of ComfyUI, loaded and driven as ComfyUI does it, around small stand-ins for its models."""

from __future__ import annotations

import logging
import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hosts.comfyui import Executor, MiniMaxH3, Patcher, Wan, attention, plain_attention
from torch import Tensor

from blocksparse import HilbertOrder, MeanPoolScorer, Pipeline, ReferenceExecutor, TopK
from blocksparse.hosts.token_layout import TokenLayout, placed

FOLDER = Path(__file__).parents[2] / "integrations" / "comfyui"
SIGMAS = torch.tensor([1.0, 0.9, 0.6, 0.0])


@pytest.fixture(scope="module")
def nodes() -> Any:
    """The folder as a module under a name of its own, as ComfyUI loads what lies in `custom_nodes`."""
    name = "custom_nodes_blocksparse"
    spec = spec_from_file_location(name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(name)]:
        del sys.modules[loaded]


@pytest.fixture(autouse=True)
def _small_blocks(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins have a hundred tokens, which are one block of a preset."""
    presets = sys.modules[nodes.__name__ + ".node"].PRESETS
    stages = HilbertOrder(), MeanPoolScorer(16), ReferenceExecutor()
    monkeypatch.setitem(presets, "small", lambda share: Pipeline(*stages[:2], TopK(share=share), stages[2]))


def patched(nodes: Any, model: Patcher, **changed: Any) -> Patcher:
    """What the node gives: called by keyword, with every input that it asks for."""
    kind = nodes.NODE_CLASS_MAPPINGS["ModelBlocksparseAttention"]
    asked = kind.INPUT_TYPES()["required"]
    given = {
        name: options[1]["default"]
        for name, options in asked.items()
        if len(options) > 1 and "default" in options[1]
    }
    given |= {"model": model, "preset": "small", "dense_steps": 0, "dense_blocks": "", "min_tokens": 1, **changed}
    assert set(given) == set(asked)
    (out,) = getattr(kind(), kind.FUNCTION)(**given)
    assert isinstance(out, Patcher)
    return out


def wan() -> tuple[Patcher, dict[str, Any]]:
    torch.manual_seed(0)
    given = {"x": torch.randn(2, 4, 3, 8, 12), "sigmas": SIGMAS, "context": torch.randn(2, 7, 32)}
    return Patcher(Wan().eval()), given


def same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(one, other, strict=True)]


def test_it_changes_what_it_should(nodes: Any) -> None:
    model, given = wan()
    expected = model.sample(**given)
    everything = patched(nodes, model, keep_percent=100.0).sample(**given)
    assert all((x - y).abs().max() <= 1e-6 for x, y in zip(everything, expected, strict=True))
    sparse = patched(nodes, model, keep_percent=20.0).sample(**given)
    assert all((x - y).abs().max() > 1e-3 for x, y in zip(sparse, expected, strict=True))
    assert same(patched(nodes, model, dense_steps=2).sample(**given), expected) == [True, True, False]
    assert same(patched(nodes, model, dense_blocks="0-1").sample(**given), expected) == [True] * 3
    one = patched(nodes, model, dense_blocks="0", keep_percent=20.0).sample(**given)
    assert same(one, expected) == same(one, sparse) == [False] * 3
    assert same(patched(nodes, model, min_tokens=73).sample(**given), expected) == [True] * 3
    assert same(model.sample(**given), expected) == [True] * 3  # the model that came in


def test_between_two_steps_is_the_one_that_has_begun(nodes: Any) -> None:
    step = sys.modules[nodes.__name__ + ".patch"].step_of
    for sigma, expected in ((1.0, 0), (0.95, 1), (0.9, 1), (0.7, 2), (0.6, 2), (0.01, 3)):
        assert step({"sample_sigmas": SIGMAS, "sigmas": torch.tensor([sigma] * 2)}) == expected
    rising = torch.tensor([0.0, 0.3, 0.6, 1.0])  # an inversion
    assert [step({"sample_sigmas": rising, "sigmas": sigma[None]}) for sigma in rising[:-1]] == [0, 1, 2]
    assert step({}) is None


def test_without_steps_all_may_be_the_first(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, given = wan()
    (wrapper,) = patched(nodes, model, dense_steps=1, verbose=True).wrappers["diffusion_model"]["blocksparse"]
    run = Executor(model.model.run, model.model, [wrapper])
    with caplog.at_level(logging.INFO):
        out = run(given["x"], SIGMAS[:1], given["context"], transformer_options={})
    assert torch.equal(out, model.sample(**given)[0])
    assert caplog.messages == ["blocksparse: dense: the sampler does not tell its steps, so each may be the first"]


def test_of_two_nodes_the_one_nearer_to_the_sampler_decides(nodes: Any) -> None:
    model, given = wan()
    expected = model.sample(**given)
    one = patched(nodes, model, keep_percent=20.0)
    for options in ({"dense_steps": 99}, {"dense_blocks": "0-9"}, {"keep_percent": 100.0}):
        for x, y in zip(patched(nodes, one, **options).sample(**given), expected, strict=True):
            assert (x - y).abs().max() <= 1e-6
    two = patched(nodes, patched(nodes, model, dense_steps=99), keep_percent=20.0)
    assert same(two.sample(**given), one.sample(**given)) == [True] * 3


@pytest.mark.parametrize(
    ("option", "dense"),
    [
        ({}, False),
        ({"scale": 0.3, "is_causal": False, "attn_bias": None}, False),
        ({"is_causal": True}, True),
        ({"causal": True}, True),
        ({"window_size": 3}, True),
        ({"attn_bias": torch.zeros(72, 72)}, True),
        ({"softmax_scale": 0.1}, True),
        ({"low_precision_attention": False}, True),
    ],
    ids=str,
)
def test_options_that_are_not_known_go_to_the_host(nodes: Any, option: dict[str, Any], dense: bool) -> None:
    seen: list[dict[str, Any]] = []

    def host(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return plain_attention(*args, **kwargs)

    class Own:
        patch_size = (1, 2, 2)

        def run(self, x: Tensor, transformer_options: dict[str, Any]) -> Tensor:
            q = torch.randn(1, 72, 32)
            out: Tensor = transformer_options["optimized_attention_override"](host, q, q, q, 2, **option)
            return out

    wrappers = patched(nodes, Patcher(Own())).wrappers["diffusion_model"]["blocksparse"]
    Executor(Own().run, Own(), wrappers)(VIDEO, transformer_options={})
    assert [option.items() <= kwargs.items() for kwargs in seen if len(option) == 1] == [True] * dense
    assert bool(seen) == dense


def test_dense_blocks_without_numbers_are_warned_of(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Own:
        patch_size = (1, 2, 2)

        def run(self, x: Tensor, transformer_options: dict[str, Any]) -> None:
            q = torch.randn(1, 72, 32)
            for _ in range(2):
                attention(q, q, q, 2, transformer_options=transformer_options)

    wrappers = patched(nodes, Patcher(Own()), dense_blocks="0").wrappers["diffusion_model"]["blocksparse"]
    Executor(Own().run, Own(), wrappers)(x=VIDEO, transformer_options={})
    assert caplog.messages == [
        "blocksparse: 'dense_blocks' leaves nothing dense here: this model does not number its blocks"
    ]


@pytest.mark.parametrize("model", ["Flux", "HunyuanVideo"])
@pytest.mark.parametrize("by_name", [False, True])
def test_references_are_found_wherever_they_are_given(nodes: Any, model: str, by_name: bool) -> None:
    """They stand behind the picture in the single blocks of Flux, which say where; elsewhere that is not known."""
    said: list[bool] = []

    class Own:
        patch_size = 2

        def run(
            self, x: Tensor, timestep: Tensor, ref_latents: Any = None, *, transformer_options: dict[str, Any]
        ) -> None:
            q = torch.randn(1, 7 + 96 + 12, 32)
            for where in ({}, {"img_slice": [7, 115]}):
                out = attention(q, q, q, 2, transformer_options={**transformer_options, **where})
                off = (out - plain_attention(q, q, q, 2))[0].abs().amax(-1)
                said.append(bool(off[7:103].max() > 1e-3))
                assert max(off[:7].max(), off[103:].max()) <= 1e-5

    own = type(model, (Own,), {})()
    wrappers = patched(nodes, Patcher(own), keep_percent=20.0).wrappers["diffusion_model"]["blocksparse"]
    latents, reference = torch.zeros(1, 16, 16, 24), [torch.zeros(1, 16, 6, 8)]
    run = Executor(own.run, own, wrappers)
    if by_name:
        run(latents, SIGMAS[:1], ref_latents=reference, transformer_options={})
    else:
        run(latents, SIGMAS[:1], reference, transformer_options={})
    assert said == [False, model == "Flux"]


def test_text_and_sound_are_kept(nodes: Any) -> None:
    """Their rows are those of dense attention, up to rounding, and only those of the video differ."""
    torch.manual_seed(0)
    model = Patcher(MiniMaxH3().eval())
    video, sound, context = torch.randn(1, 8, 3, 8, 12), torch.randn(1, 6, 32), torch.randn(1, 7, 32)
    given: dict[str, Any] = {"x": [video, sound], "sigmas": SIGMAS, "context": context}
    expected = model.sample(**given)[0]
    out = patched(nodes, model, keep_percent=20.0).sample(**given)[0]
    assert (out - expected)[:13].abs().max() <= 1e-6
    assert (out - expected)[13:].abs().max() > 1e-3
    everything = patched(nodes, model, keep_percent=100.0).sample(**given)[0]
    assert (everything - expected).abs().max() <= 1e-6


def test_overrides_of_other_nodes_get_what_is_dense(nodes: Any) -> None:
    """And are there again after each forward call, and after one that fails."""
    model, given = wan()
    seen: list[int] = []

    def other(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert func is plain_attention
        seen.append(args[1].shape[-2])
        out: Tensor = func(*args, **kwargs)
        return out

    model.model_options["transformer_options"]["optimized_attention_override"] = other
    sparse = patched(nodes, model)
    sparse.sample(**given)
    assert seen == [7] * 6  # cross attention to text
    options: dict[str, Any] = {"sigmas": SIGMAS[:1], "optimized_attention_override": other}
    (wrapper,) = sparse.wrappers["diffusion_model"]["blocksparse"]
    with pytest.raises(ZeroDivisionError):
        wrapper(Executor(lambda *_, **__: 1 / 0, model.model, []), given["x"], transformer_options=options)
    assert options["optimized_attention_override"] is other


def test_it_says_what_it_does(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, given = wan()
    with caplog.at_level(logging.INFO):
        patched(nodes, model, verbose=True, dense_steps=1, dense_blocks="1").sample(**given)
    assert caplog.messages == [
        "blocksparse: dense: first steps",
        "blocksparse: 72 tokens sparse, grid (3, 4, 6), 0 kept",
        "blocksparse: 72 tokens dense: cross attention",
        "blocksparse: 72 tokens dense: dense block",
    ]


VIDEO = torch.zeros(1, 16, 3, 8, 12)  # a grid of 3 x 4 x 6 in patches of 2
PACKED = SimpleNamespace(
    seq_len=85, signature=(7, 3, 8, 12, 3), segments=[(0, 7, "text"), (7, 13, "audio"), (13, 85, "video")]
)


@pytest.mark.parametrize(
    ("model", "options", "tokens", "before"),
    [
        ("LTXVModel", {}, 72, 0),
        ("WanModel", {"grid_sizes": (3, 4, 6)}, 72, 0),
        ("WanModel", {"grid_sizes": (3, 4, 6)}, 72 + 24, 24),
        ("HumoWanModel", {"grid_sizes": (3, 4, 6)}, 72 + 24, None),
        ("Anything", {}, 72, 0),
        ("Anything", {}, 79, None),
        ("Anything", {}, 71, None),
        ("Flux", {}, 79, 7),
        ("HunyuanVideo", {}, 79, 0),
        ("Anything", {"img_slice": [7, 79]}, 79, 7),
        ("Anything", {"img_slice": [7, 103]}, 103, 7),  # a reference behind the picture
        ("Anything", {"img_slice": [7, 79]}, 80, None),
        ("MiniMaxH3Model", {"minimax_h3_layout": PACKED}, 85, 13),
        ("MiniMaxH3Model", {"minimax_h3_layout": PACKED}, 7, None),  # its refiner of text
    ],
)
def test_layouts(nodes: Any, model: str, options: dict[str, Any], tokens: int, before: int | None) -> None:
    layout = sys.modules[nodes.__name__ + ".layout"]
    kind = type(model, (), {"patch_size": (1, 2, 2)})
    latents = layout.Latents.of(kind(), {"x": VIDEO, "ref_latents": None})
    expected = None if before is None else TokenLayout(((3, 4, 6),), text=tokens - 72, before=before)
    assert layout.token_layout(latents, options, tokens) == expected


def test_latents_of_pictures_and_references(nodes: Any) -> None:
    layout = sys.modules[nodes.__name__ + ".layout"]
    flux = type("Flux", (), {"patch_size": 2})()
    latents = layout.Latents.of(flux, {"x": torch.zeros(1, 16, 9, 12)})
    assert latents.grid == (1, 5, 6)  # what is left over is filled up
    given = layout.Latents.of(flux, {"x": torch.zeros(1, 16, 8, 12), "ref_latents": [VIDEO]})
    assert layout.token_layout(given, {}, 24 + 7) is None


def test_bad_block_lists(nodes: Any) -> None:
    model, _ = wan()
    message = r"'dense_blocks' must be numbers and ranges, as in '0, 1, 47-49': 'first'"
    with pytest.raises(ValueError, match=message):
        patched(nodes, model, dense_blocks="0, first")
    assert sys.modules[nodes.__name__ + ".node"].numbers("0, 3-5 9") == {0, 3, 4, 5, 9}


def test_what_its_registry_asks_for(nodes: Any) -> None:
    """The fields and the form of the name; and every preset makes a pipeline for any share."""
    described = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    assert re.fullmatch(r"[a-z][a-z0-9._-]{0,98}[a-z0-9]", described["project"]["name"])
    assert "comfyui" not in described["project"]["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", described["project"]["version"])
    assert {"PublisherId", "DisplayName"} <= set(described["tool"]["comfy"])
    wanted = (FOLDER / "requirements.txt").read_text(encoding="utf-8").split()
    assert described["project"]["dependencies"] == wanted
    assert set(nodes.NODE_DISPLAY_NAME_MAPPINGS) == set(nodes.NODE_CLASS_MAPPINGS)
    q = torch.randn(1, 2, 2000, 32)
    for make in sys.modules[nodes.__name__ + ".node"].PRESETS.values():
        kept = []
        for share in (0.05, 0.3, 1.0):
            pipeline = placed(make(share), ((5, 20, 20),), 0, torch.device("cpu"))
            assert isinstance(pipeline, Pipeline)
            kept.append(float(pipeline.choose(q, q, causal=False).mask.density().mean()))
        assert kept[0] < 0.25 < kept[1] < 0.45 < 0.99 <= kept[2], kept
