"""Names that differ between the versions of Triton that can be installed, 3.6 to 3.9.

Parts of Gluon were renamed. Triton is asked for the new name, not for its version: where it lacks the new one, it has the
old one. No other file has a name of Triton that is not public.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core


def _named(owner: Any, new: str, old: str, had_old: Any = None) -> Any:
    return getattr(owner, new) if hasattr(owner, new) else getattr(had_old or owner, old)


# A class of constants and values that a kernel takes as one argument.
aggregate = _named(gluon, "aggregate", "_aggregate", core)
# (memory, dtype, shape, layout): the same shared memory as another array.
reinterpret = _named(shared_memory_descriptor, "reinterpret", "_reinterpret")
# (descriptor, coordinates, barrier, memory): the bulk copy engine's copy into shared memory, and without the barrier out of it.
bulk_load = _named(tma, "async_load", "async_copy_global_to_shared")
bulk_store = _named(tma, "async_store", "async_copy_shared_to_global")
# (memory, pointers, mask): each thread's own copies into shared memory (cp.async).
thread_load = _named(async_copy, "async_load", "async_copy_global_to_shared")
# All threads of these warps meet, and each sees what the others stored before.
thread_barrier = _named(gl, "barrier", "thread_barrier")
