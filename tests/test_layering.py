"""Imports go one way, importing the package needs neither Triton nor a GPU, and private names are in one file."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.machine import python

SOURCE = Path(__file__).parents[1] / "src" / "blocksparse"

# A layer is a folder, or a file beside them. It may import itself and what stands before it.
LAYERS = [
    "launch", "check", "kernels", "spec", "batch", "inputs", "custom_op", "order", "grid", "score", "select",
    "execute", "values", "pipeline_core", "pipeline", "layers", "observe", "presets", "testing", "distributed",
    "hosts", "tools",
]  # fmt: skip
MAY_IMPORT_KERNELS = {
    "spec", "batch", "kernels", "order", "grid", "score", "select", "execute", "values", "observe", "tools",
}  # fmt: skip

MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """What a file imports of ours, inside functions too: the module, and the name that is taken from it or ""."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "blocksparse"
        ):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append((inner, "") if inner in MODULES else (str(node.module), alias.name))
        elif isinstance(node, ast.Import):
            found += ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "blocksparse")
    return tuple(found)


def part(module: str, depth: int) -> str:
    """The name at `depth` of a dotted one, or ""."""
    return (module.split(".") + ["", ""])[depth]


def forbidden(module: str) -> set[str]:
    """What a module imports, of ours, that stands above it."""
    imported, layer = {name for name, _ in imports(MODULES[module])}, part(module, 1)
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    if layer not in MAY_IMPORT_KERNELS:
        allowed -= {"kernels"}
    if layer in ("distributed", "hosts", "testing", "tools"):
        allowed |= {""}  # the public surface itself
    return {name for name in imported if part(name, 1) not in allowed}


def test_imports_go_one_way() -> None:
    found = {module: forbidden(module) for module in MODULES if module != "blocksparse"}
    assert not {module: names for module, names in found.items() if names}


FOLDERS = sorted(
    path.relative_to(SOURCE).parent.as_posix() for path in MODULES.values() if path.stem == "__init__"
)


def test_no_arrow_goes_up_between_folders() -> None:
    """Folders and files that lie in one folder can be put in an order in which each imports earlier ones alone."""
    for folder in FOLDERS:
        inside = SOURCE / folder
        graph: dict[str, set[str]] = {}
        for path in MODULES.values():
            if path.is_relative_to(inside) and path != inside / "__init__.py":
                here = path.relative_to(inside).parts[0]
                taken = (MODULES[name] for name, _ in imports(path) if name in MODULES)
                there = {each.relative_to(inside).parts[0] for each in taken if each.is_relative_to(inside)}
                graph.setdefault(here, set()).update(there - {here, "__init__.py"})
        graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names what lies in a circle


def test_layers_are_those_of_the_modules() -> None:
    assert sorted(LAYERS) == sorted({part(module, 1) for module in MODULES} - {""})
    importing = {
        part(module, 1) for module in MODULES for name, _ in imports(MODULES[module]) if part(name, 1) == "kernels"
    }
    assert importing - {""} == MAY_IMPORT_KERNELS


@pytest.mark.slow
def test_a_process_without_triton() -> None:
    """It imports no library of a host, nor Dynamo, which takes longest; and what needs no Triton runs."""
    code = (
        "import sys; sys.modules['triton'] = None; import blocksparse as bs;"
        "hosts = 'transformers', 'vllm', 'matplotlib', 'rich', 'diffusers', 'scipy', 'cattrs', 'torch._dynamo';"
        "print([m for m in hosts if m in sys.modules]); import torch;"
        "x = torch.rand(1, 1, 32, 16); p = bs.pbs_attn(executor=bs.TritonExecutor());\n"
        "try: p(x, x, x)\nexcept ValueError as e: print(e)\n"
        "print(tuple(bs.s2o(0.1, S=32, block=16)(x, x, x).shape))"
    )
    result = python(code)
    hosts, error, shape = result.stdout.splitlines()
    assert shape == "(1, 1, 32, 16)"
    assert hosts == "[]"
    assert "triton is not installed" in error


def is_private(dotted: str) -> bool:
    """Operators (`torch.ops`) are named by saved models, and so as good as public."""
    names = dotted.split(".")
    return names[:2] != ["torch", "ops"] and any(
        name.startswith("_") and not name.startswith("__") for name in names
    )


def private_names(tree: ast.Module, package: str) -> Iterator[str]:
    of_torch = {package: package}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.split(".")[0] == package and is_private(x.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for x in node.names:
                of_torch[x.asname or x.name] = full = f"{node.module}.{x.name}"
                if is_private(full):
                    yield full
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root, _, rest = ast.unparse(node).partition(".")
            if root in of_torch and is_private(f"{of_torch[root]}.{rest}"):
                yield f"{of_torch[root]}.{rest}"


@pytest.mark.parametrize(
    ("package", "home"), [("torch", "launch/torch_private.py"), ("triton", "kernels/common/names_triton.py")]
)
def test_private_names_are_in_one_file(package: str, home: str) -> None:
    paths = {*SOURCE.rglob("*.py")} - {SOURCE / home}
    found = {path: [*private_names(parsed(path), package)] for path in paths}
    assert not {path: names for path, names in found.items() if names}


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
    result = python(WITHOUT)
    said = f"with PyTorch 2.11 and 2.13 to 2.15, and this is {torch.__version__}: no module named torch.utils"
    assert said in result.stderr


@pytest.mark.slow
def test_importing_it_prints_nothing() -> None:
    """PyTorch logs a warning for each of its older names."""
    result = python("import blocksparse")
    assert result.stdout + result.stderr == ""
