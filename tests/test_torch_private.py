"""Names that are not public are in one file, Triton's in another; a PyTorch without its own is named."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "src" / "blocksparse"
HOME = SOURCE / "launch" / "torch_private.py"
HOME_OF_TRITON = SOURCE / "kernels" / "common" / "names_triton.py"


def is_private(dotted: str) -> bool:
    """Operators (`torch.ops`) are named by saved models, and so as good as public."""
    names = dotted.split(".")
    return names[:2] != ["torch", "ops"] and any(
        name.startswith("_") and not name.startswith("__") for name in names
    )


def private_names(source: str, package: str = "torch") -> Iterator[str]:
    of_torch = {package: package}
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.split(".")[0] == package and is_private(x.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for x in node.names:
                of_torch[x.asname or x.name] = full = f"{node.module}.{x.name}"
                if is_private(full):
                    yield full
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in of_torch and is_private(f"{of_torch[root]}.{rest}"):
                yield f"{of_torch[root]}.{rest}"


def test_private_names_are_in_one_file() -> None:
    elsewhere = [
        (str(x), name) for x in SOURCE.rglob("*.py") if x != HOME for name in private_names(x.read_text())
    ]
    assert not elsewhere


def test_private_names_of_triton_are_in_another() -> None:
    found = {x: list(private_names(x.read_text(), "triton")) for x in SOURCE.rglob("*.py")}
    assert not [(str(x), names) for x, names in found.items() if names and x != HOME_OF_TRITON]


# A PyTorch that lacks one of these names. It goes on using it itself: it is hidden from this library alone.
WITHOUT = """
import builtins, torch
real = builtins.__import__
def without(name, globals=None, *rest):
    if name == "torch.utils._pytree" and (globals or {}).get("__name__") == "blocksparse.launch.torch_private":
        raise ImportError(f"no module named {name}")
    return real(name, globals, *rest)
builtins.__import__ = without

import blocksparse
"""


@pytest.mark.slow
def test_a_pytorch_without_them_is_named() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    said = f"with PyTorch 2.11 and 2.13 to 2.15, and this is {torch.__version__}: no module named torch.utils"
    assert said in result.stderr


@pytest.mark.slow
def test_importing_it_prints_nothing() -> None:
    """PyTorch logs a warning for each of its older names."""
    result = subprocess.run([sys.executable, "-c", "import blocksparse"], capture_output=True, text=True)
    assert result.stdout + result.stderr == ""
