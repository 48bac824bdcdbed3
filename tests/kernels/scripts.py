"""Scripts of this folder, each run in a process of its own."""

from __future__ import annotations

from tests.machine import python


def printed_by(script: str, *arguments: str) -> str:
    """What `tests/kernels/<script>.py` prints, given these arguments; it must succeed. The test suite interprets kernels, it compiles them.

    It sees no GPU, since its targets are others and its tensors are on a CPU.
    """
    code = (
        "import os, runpy; os.environ.pop('TRITON_INTERPRET', None); "
        f"runpy.run_module('tests.kernels.{script}', run_name='__main__')"
    )
    result = python(code, *arguments, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
