"""Kernels that cannot run on a GPU: a launch that fails says so in one sentence, and is not tried again."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_MOST = 4096  # failures that are remembered

# Errors of Triton's and PyTorch's compilers, and what drivers say where a kernel was never started. What else a
# driver says may be of an earlier kernel.
_NOT_COMPILED = {
    "CompilationError", "OutOfResources", "PTXASError", "InductorError", "BackendCompilerFailed",
    "CalledProcessError",
}  # fmt: skip
_NEVER_STARTED = (
    "out of resource", "too many resources requested", "no kernel image", "kernel image is invalid", "PTX JIT",
    "unsupported toolchain", "PassManager::run failed", "ptxas", "Failed to find C compiler",
    "compatible backends",
)  # fmt: skip


class LaunchError(RuntimeError):
    """A kernel could not be compiled for a device, or needs more than it has. It was not started."""


def launch_error(kernel: str, error: Exception) -> LaunchError | None:
    """The reason in `error` why `kernel` was not launched, in a sentence; None if it is not about the kernel."""
    if isinstance(error, LaunchError):
        return error
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & _NOT_COMPILED or any(said in str(error) for said in _NEVER_STARTED):
        return LaunchError(
            f"{kernel} cannot be compiled or launched on this device ({_last_line(error)}): try other blocks or "
            "another preset, and report it with what `blocksparse --version --verbose` prints"
        )
    return None


@contextmanager
def launches(kernel: str) -> Iterator[None]:
    """Raises a `LaunchError` if what is done meanwhile cannot be compiled or launched."""
    try:
        yield
    except Exception as error:
        if (failure := launch_error(kernel, error)) is None:
            raise
        raise failure from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__


_why: dict[Hashable, str] = {}


def note(tried: Hashable, error: LaunchError) -> None:
    """Remember that what `tried` names has failed, and warn of it, once."""
    if tried not in _why:
        _log.warning("%s; other kernels run instead where there are any", error)
        _log.debug("that kernel's error:", exc_info=error)
        if len(_why) >= _MOST:
            _why.clear()
        _why[tried] = str(error)


def any_failed() -> bool:
    """Whether anything has failed in this process."""
    return bool(_why)


def noted(tried: Hashable) -> list[str]:
    """The reason against what `tried` names, if it has failed before."""
    return [_why[tried]] if tried in _why else []
