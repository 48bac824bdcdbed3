"""The command `blocksparse`: its subcommands, exit statuses without tracebacks, and `--version --verbose`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

import torch

import blocksparse
from blocksparse.check.validators import UserError
from blocksparse.presets.auto import AutoChoice
from blocksparse.tools.cli import bench, build, demo, inspect, tune

_DISTRIBUTIONS = (
    "torch", "triton", "numpy", "einops", "attrs", "transformers", "diffusers", "vllm", "sglang", "flash-attn-4",
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16)


def version(*, verbose: bool = False) -> str:
    """The version alone, or with it Python, packages, devices, and what `auto` runs on each."""
    lines = [f"blocksparse {blocksparse.__version__}"]
    if verbose:
        lines += [f"Python {platform.python_version()} on {platform.platform()}", *_packages(), *_devices()]
    return "\n".join(lines)


def _packages() -> list[str]:
    lines = []
    for name in _DISTRIBUTIONS:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    build = torch.version.cuda or torch.version.hip
    return [*lines, f"torch's build: {'CPU alone' if build is None else build}"]


def _devices() -> list[str]:
    lines = [f"CPU: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"]
    lines += [f"  {_what_auto_runs('cpu', dtype, tokens=1024)}" for dtype in _DTYPES]
    for index in range(torch.cuda.device_count()):
        here = torch.cuda.get_device_properties(index)
        memory = here.total_memory / 2**30
        lines.append(f"GPU {index}: {here.name}, {here.major}.{here.minor}, {memory:.0f} GiB")
        lines += [f"  {_what_auto_runs(f'cuda:{index}', dtype, tokens=32768)}" for dtype in _DTYPES]
    return lines if torch.cuda.device_count() else [*lines, "GPU: none that torch sees"]


def _what_auto_runs(device: str, dtype: torch.dtype, *, tokens: int) -> str:
    """One call of `auto()` with 8 query heads on 2 KV heads of dim 128, and which executor took it."""
    call = f"auto(), {tokens} tokens, {dtype}"
    q, k, v = (torch.ones(1, heads, tokens, 128, device=device, dtype=dtype) for heads in (8, 2, 2))
    try:
        return f"{call}: {AutoChoice.of(q, k, v).runs}"
    except Exception as error:  # whatever it is belongs into the report
        return f"{call}: {type(error).__name__}: {error}"


_COMMANDS = (demo, bench, inspect, tune, build)
_EPILOG = """\
exit status: 0 if all went well, 1 if the command cannot run as asked, 2 if its arguments are invalid,
130 after Ctrl-C. Results go to stdout, progress and errors to stderr.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status, 1 with the reason on stderr when it cannot run as asked."""
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
    except KeyboardInterrupt:
        print(f"blocksparse {parsed.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has seen enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError) as error:  # OSError of a disk that is full, say; the text names the file
        print(f"blocksparse {parsed.command}: {error}", file=sys.stderr)
        return 1
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
        "--verbose",
        action="store_true",
        help="with --version: also print packages, devices and the executor of each",
    )
    commands = parser.add_subparsers(metavar="command", dest="command")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
