"""The kernels that a compiled wheel brings need no compiler: PATH= python -I tests/without_compiler.py"""

from __future__ import annotations

from pathlib import Path

import torch

import blocksparse
from blocksparse.execute.cpu import about_kernel
from blocksparse.kernels.attention.cpu_attention import cpu_kernel
from blocksparse.kernels.score.cpu_scores import takes

package = Path(blocksparse.__file__).parent
brought = sorted(path.relative_to(package) for path in package.rglob("compiled/*.so"))
print(f"{len(brought)} compiled files in {package}; {about_kernel()}")
if brought:
    used = cpu_kernel().path
    assert used is not None, cpu_kernel().why_not
    assert package in used.parents, used
    assert takes(torch.zeros(1))
else:
    assert "no C++ compiler is found" in str(cpu_kernel().why_not), cpu_kernel()
