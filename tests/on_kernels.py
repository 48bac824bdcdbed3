"""Calls as on a GPU where there is none: every op takes its Triton kernel, and the interpreter runs it."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import blocksparse as bs
from blocksparse.kernels.common import hardware
from blocksparse.kernels.common.hardware import TARGETS, Hardware
from blocksparse.testing import every_preset
from tests.machine import GPU

# A prompt of a few dozen tokens then has several blocks and segments of everything.
_SMALL: dict[str, Any] = {
    "block": 16, "k_block": 16, "S": 32, "g": 16, "tile": 16, "stride": 4, "prefix": 32, "n_local": 16, "local": 20,
    "sink": 8, "last": 5, "min_budget": 16, "vertical": 5, "slash": 8, "recent": 4, "last_q": 8,
}  # fmt: skip


class _OnDevice(contextlib.nullcontext[None]):
    def __init__(self, device: object = None) -> None:
        super().__init__()


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, has: Hardware = TARGETS["sm_80"]) -> None:
    """CPU tensors say that they are on a GPU, which has this; nothing changes where they are."""
    if GPU:
        return
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "device", _OnDevice)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # A PyTorch for GPUs raises where it finds no driver; one for CPUs answers so.
    monkeypatch.setattr(torch._C, "_can_use_cudnn_attention", lambda params, debug: False, raising=False)
    monkeypatch.setattr(hardware, "_asked", lambda index: has)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: has.capability)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=4)
    )


def zeros_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel has written is an index that is in range."""
    monkeypatch.setattr(torch, "empty", untouched_zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *size, dtype=None, **_: untouched_zeros(*size, dtype=dtype or x.dtype)
    )


def untouched_zeros(*size: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Zeros on the CPU that the system provides once they are read; PyTorch writes its own."""
    shape = torch.Size(size if not size or isinstance(size[0], int) else size[0])
    dtype = dtype or torch.get_default_dtype()
    memory = torch.from_numpy(np.zeros(max(shape.numel() * dtype.itemsize, 1), np.uint8))
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def small_preset(name: str, factor: int = 1) -> bs.Pipeline[Any, Any, Any]:
    """A preset with small sizes, `factor` times the least, and with the kernel that it has on a GPU at any length."""
    preset = every_preset[name]
    known = inspect.signature(preset).parameters
    pipeline = preset(**{size: factor * value for size, value in _SMALL.items() if size in known})
    if isinstance(pipeline.executor, bs.AutoExecutor):
        return evolve(pipeline, executor=bs.TritonExecutor())
    return pipeline
