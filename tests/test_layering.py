"""Imports go one way, and importing the package needs neither Triton nor a GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "blocksparse"

# A layer may import itself and what stands before it; `kernels` may import nothing of ours but `precision`.
LAYERS = [
    "validators", "precision", "inputs", "per_head", "opaque_call", "class_line", "permuters", "scorers",
    "selectors", "executors", "pipeline", "head_groups", "schedule", "presets", "testing", "integrations", "demo",
]  # fmt: skip
MAY_IMPORT_KERNELS = {"permuters", "scorers", "selectors", "executors", "pipeline"}

# What multiplies matrices in torch obeys autocast, and what a process lets torch round fp32 to.
MULTIPLY = {
    "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "cdist", "chain_matmul", "corrcoef", "cov", "dot",
    "einsum", "inner", "linear", "matmul", "mm", "multi_dot", "mv", "scaled_dot_product_attention", "tensordot",
    "vdot", "vecdot",
}  # fmt: skip
# One function that is immune, dense attention beside it, the yardstick of tests, a host's attention, a picture.
MAY_MULTIPLY = {
    "kernels/products.py", "executors/dense_attention.py", "testing/budget.py", "integrations/transformers.py",
    "demo/picture.py",
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """The layers of ours that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {
        parts[1] if len(parts := name.split(".")) > 1 else ""
        for name in names
        if name.split(".")[0] == "blocksparse"
    }


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or p.stem != "__init__"],
    ids=lambda p: str(p.relative_to(SOURCE)),
)
def test_imports_go_one_way(path: Path) -> None:
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if layer == "kernels":
        assert imported(path) <= {"kernels", "precision"}
        return
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    if layer in MAY_IMPORT_KERNELS:
        allowed |= {"kernels"}
    if layer in ("integrations", "demo", "testing"):
        allowed |= {""}  # the public surface itself
    assert imported(path) <= allowed


def multiplies(path: Path) -> list[str]:
    """Where a file multiplies matrices by torch; Triton's products and fields of stages have such names too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.append(f"@ in line {node.lineno}")
        elif isinstance(node, ast.Attribute) and node.attr in MULTIPLY:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("tl", "gl", "self")):
                found.append(f"{node.attr} in line {node.lineno}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "einops"):
            found += [f"{alias.name} in line {node.lineno}" for alias in node.names if alias.name in MULTIPLY]
    return found


def test_one_function_multiplies_matrices() -> None:
    found = {str(path.relative_to(SOURCE)): multiplies(path) for path in SOURCE.rglob("*.py")}
    assert {path for path, where in found.items() if where} == MAY_MULTIPLY, found


def test_import_needs_no_triton_and_no_host() -> None:
    """And brings in no host library: each is imported by its own integration."""
    code = (
        "import sys; sys.modules['triton'] = None; import blocksparse;"
        "print([m for m in ('transformers', 'matplotlib', 'rich', 'diffusers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_without_triton_the_executor_says_so() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch, blocksparse as bs;"
        "x = torch.rand(1, 1, 32, 16); p = bs.pbs_attn(executor=bs.TritonExecutor());\n"
        "try: p(x, x, x)\nexcept ValueError as e: print(e)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "triton is not installed" in result.stdout
