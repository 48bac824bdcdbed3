"""What several subcommands share: how their help looks, and options with one meaning."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from blocksparse.check.validators import UserError

Commands = Any  # what `add_subparsers` gives, which argparse has no public name for


@final
class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults after the options that have one, and examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    """A subcommand whose help ends with examples; `run` gets the parsed arguments and gives the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, epilog=f"examples:\n{examples}", formatter_class=_Help
    )
    parser.set_defaults(run=run)
    return parser


def add_presets(parser: argparse.ArgumentParser, *, by_default: str) -> None:
    """`--preset`, which may be repeated; `blocksparse.presets.named.written` reads each."""
    parser.add_argument(
        "--preset",
        action="append",
        metavar="PRESET",
        help="a preset by name, or with arguments as in 'pbs_attn(0.95)' or 'mean_pooling(0.9) | Band(128)', or a "
        "function of yours as in 'my_stages:mine' or 'my_stages:mine(k=64)', in the current folder or PYTHONPATH; "
        f"may be repeated; default: {by_default}",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")


def check_out(out: Path, *read: Path | None) -> None:
    """Refuse to write over a file that is read, or that lies in a folder that is read."""
    for path in read:
        if (
            path is not None
            and out.exists()
            and path.exists()
            and path.resolve() in (out.resolve(), out.resolve().parent)
        ):
            raise UserError(f"'--out' must be another file than what is read: {out}. Give a new name.")


@final
class Given(argparse.Action):
    """Stores a value, and in `given` that its option was given, also if the value is the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {*namespace.given, self.dest}


@contextmanager
def only_errors() -> Iterator[None]:
    """Context without the library's warnings: the command's report includes them."""
    log = logging.getLogger("blocksparse")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Context for imports that need this extra of the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install -e '.[{name}]' in a checkout") from None
