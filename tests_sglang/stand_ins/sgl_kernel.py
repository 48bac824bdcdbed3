"""In the place of SGLang's kernels, which PyPI has for GPUs only. SGLang imports names of them on a CPU as well.

Its backend in plain torch (`torch_native`) calls none of them. If it did, the engine would stop here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"there is no kernel {name} here")

    return missing
