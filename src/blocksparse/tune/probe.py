"""`Probe` is what a candidate does to the attention of one unit."""

from __future__ import annotations

from typing import final

from attrs import frozen


@final
@frozen
class Probe:
    """One candidate on the q, k and v of one unit."""

    density: float
    error: float  # relative L1 distance of the output from dense attention's
