"""`blocksparse demo`: a real model reads a text, densely and with presets."""

from __future__ import annotations

import argparse
from pathlib import Path

from blocksparse.check.validators import UserError
from blocksparse.tools.cli.options import Commands, add_command, add_json, add_presets, extra, only_errors
from blocksparse.tools.demo import TEXT

# Some of each kind, in little more than a minute on two cores; none that keeps everything of a prompt this short.
_PRESETS = ("auto", "pbs_attn", "mean_pooling", "s2o", "sparge", "xattention", "flex_prefill")

_EXAMPLES = """\
  blocksparse demo
  blocksparse demo --tokens 7680 --depth 0.9
  blocksparse demo --preset all
  blocksparse demo --model qwen2.5-coder-0.5b
  blocksparse demo --preset pbs_attn --preset 'pbs_attn(0.95)' --preset xattention
"""


def add_to(commands: Commands) -> None:
    """Add the subcommand `demo`."""
    parser = add_command(
        commands,
        "demo",
        _run,
        summary="run a real model on a text, dense and with presets",
        description="Runs a real model on a real text with a planted fact, with dense attention and with each\n"
        "given preset ('--preset all': with every one), and asks the model for the fact.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    parser.add_argument("--depth", type=float, default=0.5, help="share of the text before the planted fact")
    parser.add_argument("--seed", type=int, default=0, help="seed of the planted fact")
    add_presets(parser, by_default=", ".join(_PRESETS))
    parser.add_argument("--text", type=Path, help="the text to read; default: a novel from the package")
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a transformers model, or a model that is downloaded once: qwen2.5-coder-1.5b, "
        "qwen2.5-coder-0.5b or gemma-3-270m; default: SmolLM2-135M-Instruct",
    )
    parser.add_argument("--layer", type=int, help="layer of the picture; default: the nearest to 8")
    parser.add_argument("--head", type=int, help="query head of the picture; default: 1")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the output files")
    add_json(parser)


def _run(parsed: argparse.Namespace) -> int:
    with extra("demo"):
        from rich.console import Console
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from blocksparse.presets import every_preset
        from blocksparse.presets.named import written
        from blocksparse.tools.demo.run import DemoSettings, run

    chosen = every_preset if parsed.preset == ["all"] else parsed.preset or _PRESETS
    pipelines = {text: written(text) for text in chosen}
    if not 0 <= parsed.depth <= 1:
        raise UserError(f"'--depth' must be in [0, 1]: {parsed.depth}")

    disable_progress_bar()
    set_verbosity_error()
    # The report says which executor ran and why; a warning for each layer says no more.
    with only_errors():
        run(
            DemoSettings(
                out=parsed.out,
                text=parsed.text or TEXT,
                model=parsed.model,
                tokens=parsed.tokens,
                depth=parsed.depth,
                seed=parsed.seed,
                pipelines=pipelines,
                layer=parsed.layer,
                head=parsed.head,
            ),
            Console(quiet=parsed.json),
            progress=Console(stderr=True),
        )
    if parsed.json:
        print((parsed.out / "results.json").read_text(encoding="utf-8"), end="")
    return 0
