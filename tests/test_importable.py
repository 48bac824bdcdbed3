"""Executors that call packages of others: one that is found and does not import is a reason, not an error."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import blocksparse as bs
from blocksparse.testing import make_qkv

EXECUTORS = {
    "cudnn": (bs.CudnnExecutor(), "block_sparse_attention", "cuDNN's frontend with block sparsity"),
    "flash_attn": (bs.FlashAttention4Executor(), "cute", "flash-attn-4"),
}


@pytest.mark.parametrize("package", EXECUTORS)
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, " is not installed ("),
        ({"{}.py": ""}, " is not installed ("),  # a module of that name that is no package
        ({"{}/__init__.py": ""}, " is not installed ("),  # an older version
        (
            {"{}/__init__.py": "raise OSError('lib.so: cannot open')"},
            " cannot be imported (OSError: lib.so: cannot open;",
        ),
        ({"{}/__init__.py": "", "{}/{}.py": "import needed"}, " cannot be imported (No module named 'needed';"),
        ({"{}/__init__.py": "", "{}/{}.py": ""}, None),
    ],
)
def test_a_package_that_does_not_import_is_a_reason(
    package: str, files: dict[str, str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: bs.Executor[Any, Any]
    executor, module, title = EXECUTORS[package]
    q, k, v = make_qkv(N=128)
    trace = bs.mean_pooling(block=64, executor=bs.ReferenceExecutor()).trace(q, k, v, causal=False)
    for name, content in files.items():
        path = tmp_path / name.format(package, module)
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # not what is installed
    for name in [x for x in sys.modules if x.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    reasons = executor.unsupported(trace.q, trace.k, trace.v, trace.mask, trace.spec)
    assert [x[len(title) : len(title) + len(said or "")] for x in reasons if x.startswith(title)] == (
        [] if said is None else [said]
    )
    for name in [x for x in sys.modules if x.partition(".")[0] == package]:
        del sys.modules[name]
