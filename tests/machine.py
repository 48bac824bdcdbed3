"""What this machine has, and the marks of tests that need it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from blocksparse.kernels.common.hardware import is_hopper

GPU = torch.cuda.is_available()
HOPPER = GPU and is_hopper(torch.device("cuda"))

# Of CPUs, PyTorch compiles FlexAttention for those with AVX2 alone.
needs_flex = pytest.mark.skipif(
    not GPU and not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="needs a compiled FlexAttention",
)
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which has run this code; whether that went well is for the caller to see."""
    command, variables = [sys.executable, "-c", code, *arguments], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
