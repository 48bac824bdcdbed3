"""Check that torch.compile compiles: if it is disabled, it runs functions uncompiled, without a warning."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from blocksparse.runtime.torch_private import compile_disabled, no_questions, under_a_dispatch_mode


def uncompiled_because() -> str | None:
    """The reason why torch.compile would not compile a function called now, or None. Takes some microseconds."""
    if under_a_dispatch_mode():
        # Do not test this by a call: torch.compile never compiles a function that it once met under such a mode.
        return "under an active TorchDispatchMode torch.compile does nothing"
    if torch.compiler.is_compiling():
        return None
    if missing := no_questions():
        return f"{missing}, by which one sees whether it is"
    if not compile_disabled() and _compiled_question()():
        return None
    return "torch.compile is switched off (by TORCHDYNAMO_DISABLE=1 or torch.compiler.set_stance)"


@functools.cache
def _compiled_question() -> Callable[[], bool]:
    # The answer does not depend on anything that guards watch. Without guards it is compiled only once.
    return torch.compile(
        _is_compiled,
        backend="eager",
        fullgraph=True,
        options={"guard_filter_fn": lambda guards: [False] * len(guards)},
    )


def _is_compiled() -> bool:
    """True if Dynamo has traced this function, False if it runs as plain Python."""
    return torch.compiler.is_compiling()
