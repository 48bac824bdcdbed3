"""What `make hub-kernel` assembles loads under another name, beside the installed package, and does the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.machine import python

ASSEMBLE = Path(__file__).parents[2] / "integrations" / "kernels" / "assemble.py"

USE = """
import sys, torch
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
LOAD
import blocksparse as installed
q, k, v = (torch.randn(1, heads, 512, 64) for heads in (4, 2, 2))
for name in ("xattention", "pbs_attn", "auto"):
    ours = loaded.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, pipeline=getattr(loaded, name)()
    )
    assert torch.equal(ours, getattr(installed, name)()(q, k, v)), name
assert type(loaded.auto()).__module__.startswith(loaded.__name__ + ".")
of_ranks = import_module(f"{loaded.__name__}.blocksparse.distributed")
assert of_ranks.Ring.__module__.startswith(loaded.__name__ + ".")
assert not isinstance(loaded.TopK(4), installed.TopK)
compiled = torch.compile(loaded.xattention(), fullgraph=True, backend="eager")
assert torch.equal(compiled(q, k, v), installed.xattention()(q, k, v))  # operators of both are known to PyTorch
print(loaded.__name__)
"""
BY_KERNELS = """
from kernels import get_local_kernel
loaded = get_local_kernel(Path(sys.argv[1]), backend="cpu")
"""
BY_HAND = """
spec = spec_from_file_location("some_other_name", Path(sys.argv[1], "build/torch-cpu/__init__.py"))
sys.modules["some_other_name"] = loaded = module_from_spec(spec)
spec.loader.exec_module(loaded)
"""


@pytest.mark.parametrize(
    "load", [BY_KERNELS, pytest.param(BY_HAND, marks=pytest.mark.slow)], ids=["kernels", "hand"]
)
def test_it_loads_beside_the_installed_package(load: str, tmp_path: Path) -> None:
    if load is BY_KERNELS:
        pytest.importorskip("kernels", reason="`kernels` is not installed; make test-torch installs it")
    subprocess.run([sys.executable, str(ASSEMBLE), str(tmp_path)], check=True)
    result = python(USE.replace("LOAD", load), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("blocksparse_cpu_" if load is BY_KERNELS else "some_other_name")
