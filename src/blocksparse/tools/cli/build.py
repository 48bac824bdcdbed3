"""`blocksparse build`: compile the kernels for this CPU now, rather than at their first call."""

from __future__ import annotations

import argparse
from pathlib import Path

from blocksparse.check.validators import UserError
from blocksparse.tools.cli.options import Commands, add_command

_EXAMPLES = """\
  blocksparse build
  blocksparse build --for-wheel src/blocksparse
"""


def add_to(commands: Commands) -> None:
    """Add the subcommand `build`."""
    parser = add_command(
        commands,
        "build",
        _run,
        summary="compile the kernels for this CPU",
        description="Compiles the kernels for this CPU with the installed C++ compiler, into the user's\n"
        "cache folder. Without this command, the first call on a CPU does it. Kernels that are compiled\n"
        "already are compiled again. The environment variable CXX names another compiler.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--for-wheel",
        type=Path,
        metavar="PACKAGE",
        help="compile them for several kinds of x86 CPUs, into the source of this package, for a wheel",
    )


def _run(parsed: argparse.Namespace) -> int:
    from blocksparse.execute.cpu import about_kernel, compile_kernels, compile_kernels_for_wheel

    if parsed.for_wheel is not None:
        if not (parsed.for_wheel / "__init__.py").is_file():
            raise UserError(f"'--for-wheel' must be the folder of the package's source: {parsed.for_wheel}")
        for path in compile_kernels_for_wheel(parsed.for_wheel):
            print(path)
        return 0
    for kept, seconds in compile_kernels():
        where = "a temporary folder, since the cache cannot be written" if kept is None else kept
        print(f"compiled in {seconds:.1f} s into {where}")
    print(about_kernel())
    return 0
