"""`blocksparse bench`: dense attention against presets, in your shapes on your machine."""

from __future__ import annotations

import argparse
import json
import sys

from blocksparse.check.validators import UserError
from blocksparse.tools.cli.options import Commands, add_command, add_json, add_presets

_EXAMPLES = """\
  blocksparse bench
  blocksparse bench --heads 28 --kv-heads 4 --head-dim 128 --lengths 8192,32768,131072
  blocksparse bench --device cpu --heads 9 --kv-heads 3 --head-dim 64 --preset xattention --preset 'pbs_attn(0.8)'
  blocksparse bench --json > bench.json
"""
_PRESETS = ("auto", "mean_pooling", "pbs_attn")
_LENGTHS = {"cpu": (1024, 2048, 4096, 8192), "cuda": (4096, 8192, 16384, 32768, 65536, 131072)}
_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def add_to(commands: Commands) -> None:
    """Add the subcommand `bench`."""
    parser = add_command(
        commands,
        "bench",
        _run,
        summary="time dense attention against presets, in your shapes on your machine",
        description="Times causal attention over a whole prompt, dense and with presets, at several lengths, and\n"
        "prints from which length on each preset is faster. The defaults are the heads of Llama-3.1-8B.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--heads", type=_size, default=32, metavar="HQ", help="query heads")
    parser.add_argument("--kv-heads", type=_size, default=8, metavar="HKV", help="key and value heads")
    parser.add_argument("--head-dim", type=_size, default=128, metavar="D", help="head dim")
    parser.add_argument(
        "--lengths",
        type=_sizes,
        metavar="N,N,...",
        help="prompt lengths in tokens; default: 1024 to 8192 on a CPU, 4096 to 131072 on a GPU",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of q, k and v; default: float32 on a CPU, bfloat16 on a GPU",
    )
    add_presets(parser, by_default=", ".join(_PRESETS))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device; default: a GPU if there is one, else the CPU"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.5,
        metavar="S",
        help="seconds for the timed calls of a row, from 3 to 300 calls",
    )
    parser.add_argument("--seed", type=_seed, default=0, help="seed of the random inputs")
    add_json(parser)


def _run(parsed: argparse.Namespace) -> int:
    import torch
    from attrs import asdict

    from blocksparse.execute.cpu import about_kernel
    from blocksparse.inputs import MAX_HEAD_DIM
    from blocksparse.presets.named import written
    from blocksparse.tools.bench import Crossover, Shape, crossovers, device_name, legend, run, table

    if parsed.heads % parsed.kv_heads:
        raise UserError(f"'--heads' must be a multiple of '--kv-heads' ({parsed.kv_heads}): {parsed.heads}")
    if parsed.head_dim > MAX_HEAD_DIM:
        raise UserError(
            f"'--head-dim' must be at most {MAX_HEAD_DIM}: {parsed.head_dim}. Give that of your model."
        )
    kind = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("'--device cuda' needs a GPU that PyTorch can use: none is here. Leave it out.")
    dtype = parsed.dtype or _DTYPES[kind]
    lengths = parsed.lengths or _LENGTHS[kind]
    pipelines = {text: written(text) for text in parsed.preset or _PRESETS}
    shape = Shape(parsed.heads, parsed.kv_heads, parsed.head_dim, getattr(torch, dtype), torch.device(kind))
    name = device_name(shape.device) + (f", {about_kernel()}" if kind == "cpu" else "")

    def progress(tokens: int) -> None:
        print(f"timing {tokens:,} tokens: dense, {', '.join(pipelines)}", file=sys.stderr, flush=True)

    rows = run(shape, lengths, pipelines, seconds=parsed.seconds, seed=parsed.seed, on_length=progress)
    about = {
        "device": name,
        "torch": torch.__version__,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": dtype,
        "seed": parsed.seed,
    }
    if parsed.json:
        found = {written: asdict(Crossover.of(rows, written)) for written in pipelines}
        pasted = {written: repr(pipeline) for written, pipeline in pipelines.items()}
        print(
            json.dumps(
                {**about, "pipelines": pasted, "crossover": found, "rows": list(map(asdict, rows))}, indent=2
            )
        )
        return 0
    print(f"{shape.heads} heads, {shape.kv_heads} KV heads, head dim {shape.head_dim}, {dtype}, on {name}\n")
    print(f"{table(rows)}\n\n{crossovers(rows)}\n\n{legend(rows)}")
    return 0


def _size(written: str) -> int:
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number, at least 1: {written}. Write 4096, say.")
    return int(written)


def _seed(written: str) -> int:
    if not written.isdecimal() or int(written) >= 2**63:
        raise argparse.ArgumentTypeError(f"it must be a whole number from 0 to 2**63 - 1: {written}")
    return int(written)


def _sizes(written: str) -> tuple[int, ...]:
    return tuple(_size(part.strip()) for part in written.split(","))


def _seconds(written: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"it must be a number of seconds, at least 0: {written}")
    return value
