"""The command `blocksparse`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from blocksparse.demo import TEXT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status, 1 with one sentence on stderr when it cannot run as asked."""
    parsed = _parser().parse_args(arguments)
    from blocksparse.demo.errors import DemoError

    try:
        return _demo(parsed)
    except DemoError as error:
        print(f"blocksparse demo: {error}", file=sys.stderr)
        return 1


def _demo(parsed: argparse.Namespace) -> int:
    from blocksparse.demo.errors import DemoError

    try:
        from rich.console import Console
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from blocksparse.demo.methods import method
        from blocksparse.demo.run import Settings, run
        from blocksparse.presets import every_preset
    except ModuleNotFoundError as error:
        raise DemoError(f"{error.name} is not installed: pip install 'blocksparse-attention[demo]'") from None

    pipelines = {written: method(written) for written in parsed.preset or every_preset}
    if not 0 <= parsed.depth <= 1:
        raise DemoError(f"'--depth' must be in [0, 1]: {parsed.depth}")

    disable_progress_bar()
    set_verbosity_error()
    # The report says which executor ran and why; a warning for each layer says no more.
    logging.getLogger("blocksparse").setLevel(logging.ERROR)
    run(
        Settings(
            out=parsed.out,
            text=parsed.text,
            model=parsed.model,
            tokens=parsed.tokens,
            depth=parsed.depth,
            seed=parsed.seed,
            pipelines=pipelines,
            layer=parsed.layer,
            head=parsed.head,
        ),
        Console(),
        progress=Console(stderr=True),
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="blocksparse", description="Block-sparse prefill attention.")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="read a text with a real model, densely and with each preset",
        description="A real model reads a real text, in which a fact is planted, with dense attention and with "
        "each preset, and is asked for the fact.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    demo.add_argument("--depth", type=float, default=0.5, help="share of the text before the planted fact")
    demo.add_argument("--seed", type=int, default=0, help="chooses the planted fact")
    demo.add_argument(
        "--preset",
        action="append",
        metavar="PRESET",
        help="a preset to run, with its own defaults or as in 'pbs_attn(0.95)'; may be repeated; all by default",
    )
    demo.add_argument("--text", type=Path, default=TEXT, help="the text to read")
    demo.add_argument(
        "--model", type=Path, help="folder of a transformers model; SmolLM2-135M-Instruct by default"
    )
    demo.add_argument("--layer", type=int, help="layer of the picture; 8 by default")
    demo.add_argument("--head", type=int, help="query head of the picture; 1 by default")
    demo.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for what the demo writes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
