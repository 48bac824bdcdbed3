"""Memory that a call uses for some of its steps, in one allocation."""

from __future__ import annotations

from collections.abc import Sequence


def side_by_side(used: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[int]:
    """Where in one allocation each piece of memory begins, so that those that are in use at a time do not meet.

    Args:
        used: by piece, the first step that uses it and the last one.
        sizes: in the unit of the result.
    """
    begins: dict[int, int] = {}
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):  # small ones then fill gaps
        (first, last), begin = used[piece], 0
        for other in sorted(begins, key=begins.__getitem__):
            apart = used[other][1] < first or last < used[other][0]
            if not apart and begin + sizes[piece] > begins[other]:
                begin = max(begin, begins[other] + sizes[other])
        begins[piece] = begin
    return [begins[piece] for piece in range(len(sizes))]
