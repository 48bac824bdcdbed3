"""The command `blocksparse` and what all of its subcommands share: exit statuses, and no tracebacks for users."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from blocksparse.check.validators import UserError
from blocksparse.cli import bench, build, demo, inspect, tune
from blocksparse.cli.version import version

_COMMANDS = (demo, bench, inspect, tune, build)
_EPILOG = """\
exit status: 0 if all went well, 1 if the command cannot run as asked, 2 if its arguments are not understood,
130 after Ctrl-C. Results go to stdout, progress and errors to stderr.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status, 1 with one sentence on stderr when it cannot run as asked."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.version:
        print(version(verbose=parsed.verbose))
        return 0
    if parsed.command is None:
        parser.error(f"name a command, one of {', '.join(x.__name__.rpartition('.')[2] for x in _COMMANDS)}")
    if parsed.verbose:
        parser.error("--verbose goes with --version; commands report their progress in any case")
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except UserError as error:
        print(f"blocksparse {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"blocksparse {parsed.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has seen enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blocksparse",
        description="Block-sparse prefill attention for models that were trained dense.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "--verbose", action="store_true", help="with --version: also packages, devices and what runs on them"
    )
    commands = parser.add_subparsers(metavar="command", dest="command")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
