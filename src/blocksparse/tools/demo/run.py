"""The demo itself, from a model to a table, a JSON file and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from attrs import asdict, filters, frozen
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from blocksparse.check.validators import UserError
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.layers.schedule import base_model, heads_of, text_config
from blocksparse.presets.text import mean_pooling, pbs_attn
from blocksparse.tools.bench import device_name
from blocksparse.tools.demo import read_text
from blocksparse.tools.demo.measure import MethodResult, Prompt, build, measure
from blocksparse.tools.demo.model import SHIPPED, Model, convert_smollm2, fetch, load
from blocksparse.tools.demo.picture import Panel, draw
from blocksparse.tools.demo.watch import watch

_REPLY = 10  # letters of an answer in the table; the JSON file has all


def table(rows: list[MethodResult], *, title: str) -> Table:
    """One line per method; speed-up and perplexity are against the first row, which is dense."""
    dense = rows[0]
    # Fits in 80 columns, the width when the output is not a terminal; long names of methods are folded.
    result = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    result.add_column("method", overflow="fold", vertical="bottom")
    for heading in ("first\ntoken", "attention", "speed-\nup", "density", "perplexity"):
        result.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    result.add_column("answer", vertical="bottom", no_wrap=True)
    for row in rows:
        more = "" if row is dense else f" ({row.perplexity / dense.perplexity - 1:+.1%})"
        result.add_row(
            row.method,
            _seconds(row.first_token_s),
            _seconds(row.attention_s),
            f"{dense.attention_s / row.attention_s:.2f}x",
            f"{row.density:.1%}",
            f"{row.perplexity:.2f}{more}",
            f"{'[green]right[/]' if row.right else '[red]wrong[/]'} {escape(_short(row.reply))}",
        )
    return result


def _short(reply: str) -> str:
    return reply if len(reply) <= _REPLY else reply[: _REPLY - 1] + "…"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def legend(rows: list[MethodResult]) -> str:
    """Explanation of the columns."""
    lines = [
        "first token: time to read the prompt and give the first token of the answer",
        "attention: of that, the time in attention; speed-up: of attention, against dense",
        "density: share of dense attention's work, mean over layers and heads",
        "perplexity: of the text, from the same pass, and its change against dense",
    ]
    sparse = rows[1:]
    if sparse:
        compiled = sum(row.compile_s for row in sparse)
        lines.append(f"not counted: the first call of each pipeline, which compiles: {compiled:.0f} s in all")
    executors: dict[str, list[str]] = {}
    for row in sparse:
        executors.setdefault(row.executor, []).append(row.method)
    for executor, methods in executors.items():
        which = "sparse attention" if len(executors) == 1 else ", ".join(methods)
        lines.append(f"{which}: {executor}")
    return "\n".join(lines)


def write_json(rows: list[MethodResult], path: Path, **about: Any) -> None:
    """Write what was run (`about`) and every row."""
    kept = filters.exclude("qkv", "asked")
    path.write_text(json.dumps({**about, "rows": [asdict(row, filter=kept) for row in rows]}, indent=2) + "\n")


# In SmolLM2 a head with a few heavy keys for all queries, which is what sorting keys is for.
_LAYER, _HEAD = 8, 1


@final
@frozen
class DemoSettings:
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


def run(settings: DemoSettings, console: Console, *, progress: Console) -> list[MethodResult]:
    """Run the demo and print the table. Returns its rows, dense first.

    Args:
        console: the table goes here.
        progress: and what is being done until then, here: a bar in a terminal, else a line for each step.

    Raises:
        UserError: the model, the text or a number does not allow it.
    """
    text = read_text(settings.text, "--text")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"'--out' must be a folder, which may be made: {settings.out}: {error}. Name another."
        ) from None
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
        attending = _attending(model)
        layer, head = _layer_and_head(model, settings, attending)
        if settings.tokens > model.longest:
            raise UserError(
                f"'--tokens' must be at most {model.longest}, what the model can read: {settings.tokens}"
            )
        prompt = build(model.tokenizer, text, tokens=settings.tokens, depth=settings.depth, seed=settings.seed)

        def step() -> None:
            bar.advance(task)

        methods = len(settings.pipelines)
        bar.update(task, total=len(attending) * (1 + methods) + 2)
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


def _model(settings: DemoSettings, begin: Callable[[str], None]) -> Model:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = settings.model or settings.out / "SmolLM2-135M-Instruct"
    if settings.model is None:
        convert_smollm2(folder)
    elif str(settings.model) in SHIPPED and not settings.model.exists():
        folder = fetch(str(settings.model), settings.out, begin)
    model = load(folder, device=device)
    model.check_readable()
    return model


def _attending(model: Model) -> list[int]:
    """The layers that attend: those of a hybrid model do not all."""
    found = set[int]()
    with torch.inference_mode(), watch(model.network, on_qkv=lambda layer, *_: found.add(layer)):
        base_model(model.network)(torch.zeros(1, 8, dtype=torch.int64, device=model.device), use_cache=False)
    return sorted(found)


def _layer_and_head(model: Model, settings: DemoSettings, attending: Sequence[int]) -> tuple[int, int]:
    config = text_config(model.network)
    heads, _ = heads_of(config)
    for name, wanted, count in (
        ("--layer", settings.layer, config.num_hidden_layers),
        ("--head", settings.head, heads),
    ):
        if wanted is not None and not 0 <= wanted < count:
            raise UserError(f"'{name}' must be from 0 to {count - 1}: {wanted}")
    near = _LAYER if settings.layer is None else settings.layer
    layer = min(attending, key=lambda each: abs(each - near))
    if settings.layer not in (None, layer):
        raise UserError(f"'--layer' must be a layer with attention: {near}. The nearest one is {layer}.")
    return layer, min(_HEAD, heads - 1) if settings.head is None else settings.head


def _picture(dense: MethodResult, settings: DemoSettings, layer: int, head: int) -> None:
    """Before and after sorting keys, whichever presets the table shows."""
    assert dense.qkv is not None  # it was asked for
    pipelines = {
        "mean_pooling: keys in the order of the text": mean_pooling(),
        "pbs_attn: keys sorted inside segments": pbs_attn(),
    }
    panels = [
        Panel.of(title, pipeline, *dense.qkv, head=head, **dense.asked) for title, pipeline in pipelines.items()
    ]
    title = f"Where layer {layer}, head {head} looks, and which blocks are kept"
    draw(panels, settings.out / "attention-map.png", title=title)


def _report(
    rows: list[MethodResult], model: Model, prompt: Prompt, settings: DemoSettings, console: Console
) -> None:
    device = device_name(model.device)
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
