"""`blocksparse inspect`: one HTML file that shows where a model's heads look and what presets keep of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from blocksparse.check.validators import UserError
from blocksparse.tools.cli.options import (
    Commands,
    add_command,
    add_json,
    add_presets,
    check_out,
    extra,
    only_errors,
)
from blocksparse.tools.demo import TEXT, read_text

_EXAMPLES = """\
  blocksparse inspect smollm2
  blocksparse inspect path/to/model prompt.txt --tokens 8192 --out report.html
  blocksparse inspect smollm2 --preset 'pbs_attn(0.95)' --preset s2o --json > numbers.json
"""
_PRESETS = ("pbs_attn", "mean_pooling", "xattention", "flex_prefill")
_SMOLLM2, _CONVERTED = "smollm2", Path("demo-output/SmolLM2-135M-Instruct")
_LEAST = 128  # tokens; shorter prompts have nothing to skip


def add_to(commands: Commands) -> None:
    """Add the subcommand `inspect`."""
    parser = add_command(
        commands,
        "inspect",
        _run,
        summary="write an HTML report: attention maps of a model's heads, and what presets keep of them",
        description="Runs a model on a text with dense attention. Then presets run on each layer, and on the\n"
        "whole model. The report is one HTML file: maps of every head, density, coverage and error by layer,\n"
        "the change of the next-token distributions with each preset, and stage times.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"folder of a transformers model, or '{_SMOLLM2}' for the model of the demo, which is converted once",
    )
    parser.add_argument(
        "text", metavar="TEXT", type=Path, nargs="?", help="the text to read; default: a novel from the package"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to read, at most")
    add_presets(parser, by_default=", ".join(_PRESETS))
    parser.add_argument("--out", type=Path, default=Path("blocksparse-report.html"), help="the file to write")
    parser.add_argument(
        "--converted",
        type=Path,
        metavar="DIR",
        help=f"folder for the converted '{_SMOLLM2}'; default: {_CONVERTED}",
    )
    add_json(parser)


def _run(parsed: argparse.Namespace) -> int:
    with extra("demo"):
        import torch
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from blocksparse.presets.named import written
        from blocksparse.tools.bench import device_name
        from blocksparse.tools.demo.model import convert_smollm2, load
        from blocksparse.tools.inspection.collect import collect
        from blocksparse.tools.inspection.page import numbers, page, table

    pipelines = {text: written(text) for text in parsed.preset or _PRESETS}
    if parsed.tokens < _LEAST:
        raise UserError(f"'--tokens' must be at least {_LEAST}: {parsed.tokens}. Leave it out for 4096.")
    if parsed.converted is not None and parsed.model != _SMOLLM2:
        raise UserError(f"'--converted' is for the model '{_SMOLLM2}' alone, and this is {parsed.model}")
    path = parsed.text or TEXT
    text = read_text(path, "TEXT")
    if not parsed.out.parent.is_dir() or parsed.out.is_dir():
        raise UserError(f"'--out' must be a file in a folder that exists: {parsed.out}. Make the folder.")
    check_out(parsed.out, path, Path(parsed.model))
    disable_progress_bar()
    set_verbosity_error()
    _say("getting the model ready")
    folder = Path(parsed.model)
    if parsed.model == _SMOLLM2:
        folder = parsed.converted or _CONVERTED
        folder.parent.mkdir(parents=True, exist_ok=True)
        convert_smollm2(folder)
    model = load(folder, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model.check_readable()
    if parsed.tokens > model.longest:
        raise UserError(f"'--tokens' must be at most {model.longest}, what the model can read: {parsed.tokens}")
    # Ten characters a token is more than any prose needs.
    ids = model.tokenizer.encode(text[: 10 * parsed.tokens])[: parsed.tokens]
    if len(ids) < _LEAST:
        raise UserError(
            f"'TEXT' must have at least {_LEAST} tokens, or there is nothing to skip: {len(ids)}. "
            "Give a longer text."
        )
    with only_errors():  # the report says which layers are dense
        findings = collect(model, torch.tensor([ids]), pipelines, begin=_say)
    if not findings.maps:
        why = next(iter(findings.skipped.values()), "it has no attention that could be watched")
        raise UserError(f"no layer of {model.name} can be inspected: {why}")
    about = {
        "model": model.name,
        "text": path.name,
        "tokens": len(ids),
        "device": device_name(model.device),
    }
    try:
        parsed.out.write_text(page(findings, **about), encoding="utf-8")
    except OSError as error:
        raise UserError(f"'--out' cannot be written: {parsed.out}: {error}") from None
    if parsed.json:
        print(json.dumps(numbers(findings, **about), indent=2, allow_nan=False))
    else:
        print(f"{table(findings)}\n\nwritten: {parsed.out}; open it in a browser")
    return 0


def _say(doing: str) -> None:
    print(doing, file=sys.stderr, flush=True)
