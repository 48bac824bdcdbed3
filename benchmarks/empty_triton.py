"""A kernel that does nothing, to measure what a launch costs."""

from __future__ import annotations

import triton


@triton.jit
def empty(x):  # type: ignore[no-untyped-def]
    pass
