"""Fallback to the next kernel if one cannot be launched; a failed kernel is not tried again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from blocksparse.runtime.failures import LaunchError, any_failed, note, noted

_Kernel = TypeVar("_Kernel", bound=Hashable)
_Result = TypeVar("_Result")


def first_launched(
    kernels: Iterable[_Kernel], of: Hashable, run: Callable[[_Kernel], _Result], refuse: Callable[[], None]
) -> _Result:
    """The result of the first kernel that can be launched.

    Args:
        kernels: from the fastest on.
        of: what else decides whether a kernel can be launched: device, dtypes, head dims.
        run: runs a kernel.
        refuse: raises an error with the reasons, if none can be launched.

    Raises:
        LaunchError: none can be launched, and nothing was refused.
    """
    for kernel in kernels:
        if noted((kernel, of)):
            continue
        try:
            return run(kernel)
        except LaunchError as error:
            note((kernel, of), error)
    refuse()
    raise LaunchError("no kernel can be launched; use AutoExecutor(), which chooses another executor")


def never_launched(kernels: Iterable[_Kernel], of: Hashable) -> list[str]:
    """The reasons why none of these kernels can be launched; empty while one may."""
    if not any_failed():
        return []
    reasons = [noted((kernel, of)) for kernel in kernels]
    return list(dict.fromkeys(why for found in reasons for why in found)) if all(reasons) else []
