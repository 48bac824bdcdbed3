"""The demo itself, from a model to a table, a JSON file and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import torch
from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from blocksparse.check.validators import UserError
from blocksparse.demo.fetch import SHIPPED, fetch
from blocksparse.demo.measure import Row, measure
from blocksparse.demo.model import Model, convert_smollm2, load
from blocksparse.demo.picture import Panel, draw
from blocksparse.demo.prompt import Prompt, build
from blocksparse.demo.report import legend, table, write_json
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.text_model import text_config
from blocksparse.presets.text import mean_pooling, pbs_attn

# In SmolLM2 a head with a few heavy keys for all queries, which is what sorting keys is for.
_LAYER, _HEAD = 8, 1


@final
@frozen
class Settings:
    """Settings of the demo."""

    out: Path
    text: Path
    model: Path | None  # a folder, or a name in `SHIPPED`; None is SmolLM2
    tokens: int
    depth: float
    seed: int
    pipelines: Mapping[str, AnyPipeline]  # by what the table calls them
    layer: int | None  # of the picture; None takes one
    head: int | None


def run(settings: Settings, console: Console, *, progress: Console) -> list[Row]:
    """Run the demo and print the table. Returns its rows, dense first.

    Args:
        console: the table goes here.
        progress: and what is being done until then, here: a bar in a terminal, else a line for each step.

    Raises:
        UserError: the model, the text or a number does not allow it.
    """
    text = _read(settings.text)
    settings.out.mkdir(parents=True, exist_ok=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=progress,
        disable=not progress.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)

        def begin(doing: str) -> None:
            bar.update(task, description=doing)
            if not progress.is_terminal:
                progress.print(doing, highlight=False, markup=False)

        begin("getting the model ready")
        model = _model(settings, begin)
        layer, head = _layer_and_head(model, settings)
        if settings.tokens > model.longest:
            raise UserError(
                f"'--tokens' must be at most {model.longest}, what the model can read: {settings.tokens}"
            )
        prompt = build(model.tokenizer, text, tokens=settings.tokens, depth=settings.depth, seed=settings.seed)

        def step() -> None:
            bar.advance(task)

        layers = text_config(model.network).num_hidden_layers
        methods = len(settings.pipelines)
        bar.update(task, total=layers * (1 + methods) + 2)
        begin("reading with dense attention")
        dense = measure(model, prompt, "dense", None, keep_layer=layer, on_layer=step)
        rows = [dense]
        for number, (name, pipeline) in enumerate(settings.pipelines.items(), 1):
            begin(f"reading with {name} ({number} of {methods})")
            rows.append(measure(model, prompt, name, pipeline, warm_up=dense.qkv, on_layer=step))
        begin("drawing the attention map")
        _picture(dense, settings, layer, head)
        bar.update(task, advance=2, description="done")

    _report(rows, model, prompt, settings, console)
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'--text' must be a readable UTF-8 text: {path}: {error}") from None


def _model(settings: Settings, begin: Callable[[str], None]) -> Model:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = settings.model or settings.out / "SmolLM2-135M-Instruct"
    if settings.model is None:
        convert_smollm2(folder)
    elif str(settings.model) in SHIPPED and not settings.model.exists():
        folder = fetch(str(settings.model), settings.out, begin)
    model = load(folder, device=device)
    model.check_readable()
    return model


def _layer_and_head(model: Model, settings: Settings) -> tuple[int, int]:
    config = text_config(model.network)
    chosen = []
    for name, wanted, default, count in (
        ("--layer", settings.layer, _LAYER, config.num_hidden_layers),
        ("--head", settings.head, _HEAD, config.num_attention_heads),
    ):
        if wanted is not None and not 0 <= wanted < count:
            raise UserError(f"'{name}' must be from 0 to {count - 1}: {wanted}")
        chosen.append(min(default, count - 1) if wanted is None else wanted)
    return chosen[0], chosen[1]


def _picture(dense: Row, settings: Settings, layer: int, head: int) -> None:
    """Before and after sorting keys, whichever presets the table shows."""
    assert dense.qkv is not None  # it was asked for
    pipelines = {
        "mean_pooling: keys in the order of the text": mean_pooling(),
        "pbs_attn: keys sorted inside segments": pbs_attn(),
    }
    panels = [Panel.of(title, pipeline, *dense.qkv, head=head) for title, pipeline in pipelines.items()]
    title = f"Where layer {layer}, head {head} looks, and which blocks are kept"
    draw(panels, settings.out / "attention-map.png", title=title)


def _report(rows: list[Row], model: Model, prompt: Prompt, settings: Settings, console: Console) -> None:
    device = (
        torch.cuda.get_device_name() if model.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    write_json(
        rows,
        settings.out / "results.json",
        model=model.name,
        device=device,
        dtype=model.dtype,
        text=settings.text.name,
        tokens=settings.tokens,
        depth=settings.depth,
        seed=settings.seed,
        needle=prompt.needle,
        needle_at=prompt.needle_at,
        question=prompt.question,
        answer=prompt.answer,
    )
    console.print(table(rows, title=f"{model.name} reads {settings.tokens} tokens of {settings.text.name}"))
    console.print(legend(rows), style="dim", highlight=False)
    console.print(f'planted at token {prompt.needle_at}: "{prompt.needle}"', highlight=False, markup=False)
    console.print(f"ran in {model.dtype} on {device}", highlight=False)
    console.print(f"written: {settings.out}/results.json, {settings.out}/attention-map.png", highlight=False)
