"""What calls of compiled kernels on a CPU have in common: pointers to functions of the process, and strides."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from torch import Tensor

_PROCESS = os.getpid()  # that loaded this module, and may have started OpenMP's threads


def steps(x: Tensor, axes: int) -> Any:
    """The strides of the first axes; 0 for an axis of one entry, which serves all."""
    return (ctypes.c_int64 * axes)(*(x.stride(i) if x.shape[i] > 1 else 0 for i in range(axes)))


def parallel() -> int | None:
    """The address of the function by which compilers start threads of the OpenMP that PyTorch has loaded, if any.

    A process that forks leaves OpenMP's threads behind, and OpenMP would wait for them for ever: there is none then.
    """
    return _gomp_parallel() if os.getpid() == _PROCESS else None


@functools.cache
def _gomp_parallel() -> int | None:
    try:
        return _address(ctypes.CDLL(None).GOMP_parallel)
    except (AttributeError, OSError, TypeError):
        return None


@functools.cache
def python_calls() -> tuple[int | None, int | None, int | None]:
    """Addresses of the functions that release Python's lock, take it again, and run handlers of pending signals."""
    api = ctypes.pythonapi
    return (
        _address(api.PyEval_SaveThread), _address(api.PyEval_RestoreThread), _address(api.PyErr_CheckSignals)
    )  # fmt: skip


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
