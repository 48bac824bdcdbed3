"""Pipelines that engines of these tests import by name."""

from __future__ import annotations

from typing import Any

from blocksparse import Band, LastQueries, Pipeline, a_shape, xattention


def with_last_queries(tokens: int) -> Pipeline[Any, Any, Any]:
    """Which blocks a row keeps depends on its position, and on where the prompt ends, alone."""
    return a_shape(sink=32, local=64, block=32) | LastQueries(tokens)


def as_auto(mass: float) -> Pipeline[Any, Any, Any]:
    """What `auto` is made of, in blocks that a short prompt has many of."""
    return xattention(mass, stride=8, block=32, pattern="sum") | (Band(32) | LastQueries(96))
