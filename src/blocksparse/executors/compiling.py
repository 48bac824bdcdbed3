"""Whether torch.compile compiles: where it is switched off, it runs things as they stand, without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode  # no public name up to torch 2.13


def uncompiled_because() -> str | None:
    """Why torch.compile would not compile what is called now, or None; takes some microseconds."""
    if _get_current_dispatch_mode() is not None:
        # Not to be tried: what torch.compile once met under such a mode it never compiles again.
        return "under an active TorchDispatchMode torch.compile does nothing"
    if torch.compiler.is_compiling() or (not torch._dynamo.config.disable and _compiled_question()()):
        return None
    return "torch.compile is switched off (by TORCHDYNAMO_DISABLE=1 or torch.compiler.set_stance)"


@functools.cache
def _compiled_question() -> Callable[[], bool]:
    # Its answer depends on nothing that a guard watches: without guards it is compiled once.
    return torch.compile(
        _is_compiled,
        backend="eager",
        fullgraph=True,
        options={"guard_filter_fn": lambda guards: [False] * len(guards)},
    )


def _is_compiled() -> bool:
    """True in what Dynamo makes of it, False as it stands."""
    return torch.compiler.is_compiling()
