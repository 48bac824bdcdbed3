"""docs/support.md says of every target what the code says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import blocksparse as bs
from blocksparse.kernels.attention import sparse_attention_triton
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.testing import make_qkv
from tests.machine import GPU
from tests.on_kernels import pretend_gpu

PAGE = Path(__file__).parents[1] / "docs/support.md"
LINES = [line for line in PAGE.read_text().splitlines() if "KiB |" in line]
ROWS = [[cell.strip() for cell in line.strip("| ").split("|")] for line in LINES]
COLUMNS: tuple[tuple[bs.Executor[Any, Any], torch.dtype], ...] = (
    (bs.TritonExecutor(), torch.float16),
    (bs.TritonExecutor(), torch.float32),
    (bs.GatherExecutor(), torch.float16),
    (bs.GatherExecutor(), torch.float32),
    (bs.Int8Executor(fp8_pv=False), torch.float16),
    (bs.Int8Executor(), torch.float16),
)


def test_every_target_has_a_row() -> None:
    assert {row[1]: row[2] for row in ROWS} == {x.name: f"{x.shared >> 10} KiB" for x in TARGETS.values()}
    assert {cell for row in ROWS for cell in row[3:]} == {"timed", "run", "compiled", "refused"}


@pytest.mark.skipif(GPU, reason="pretends other GPUs than there are")
@pytest.mark.parametrize("row", ROWS, ids=[row[1] for row in ROWS])
def test_the_executors_refuse_what_the_page_says(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    has, pipeline = TARGETS[row[1]], bs.s2o(S=32, block=32)
    inputs = {dtype: make_qkv(N=64, D=64, dtype=dtype) for dtype in (torch.float16, torch.float32)}
    traces = {dtype: pipeline.trace(*qkv) for dtype, qkv in inputs.items()}
    pretend_gpu(monkeypatch, has)
    monkeypatch.setattr(torch.version, "hip", None if has.is_nvidia else "7.0")
    monkeypatch.setattr(sparse_attention_triton, "runs_interpreted", lambda: False)
    for said, (executor, dtype) in zip(row[3:], COLUMNS, strict=True):
        trace = traces[dtype]
        reasons = executor.unsupported(*inputs[dtype], trace.mask, trace.spec)
        assert (said == "refused") == bool(reasons), (executor, dtype, reasons)
