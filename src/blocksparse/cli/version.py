"""What `blocksparse --version --verbose` prints: all that a report of a fault must say of a machine."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import blocksparse
from blocksparse.presets.auto import AutoChoice

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
