"""Pipelines that engines of these tests import by name."""

from __future__ import annotations

from typing import Any

from blocksparse import LastQueries, Pipeline, a_shape


def with_last_queries(tokens: int) -> Pipeline[Any, Any, Any]:
    """Which blocks a row keeps depends on its position, and on where the prompt ends, alone."""
    return a_shape(sink=32, local=64, block=32) | LastQueries(tokens)
