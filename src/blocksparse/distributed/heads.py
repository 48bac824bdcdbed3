"""A pipeline for some of the heads of a layer."""

from __future__ import annotations

from typing import Any, TypeVar

import attrs

from blocksparse.check.per_head import HeadValues
from blocksparse.distributed.stages import all_in, arguments
from blocksparse.layers.head_groups import AnyPipeline, Heads
from blocksparse.select.combined import SharedByGroup
from blocksparse.select.positions import Random

T = TypeVar("T")


def of_heads(stage: T, heads: Heads, of: int) -> T:
    """`stage`, or a whole pipeline, for some query heads of `of`: options per query head are those of these heads.

    Raises:
        ValueError: an option does not have one number for each of the `of` query heads.
    """
    changed = {}
    for name, old in arguments(stage).items():
        new: Any = _values_of(old, heads, of) if isinstance(old, HeadValues) else of_heads(old, heads, of)
        if new is not old:
            changed[name] = new
    return attrs.evolve(stage, **changed) if changed else stage  # type: ignore[misc]


def _values_of(values: HeadValues, heads: Heads, of: int) -> HeadValues:
    if len(values.values) != of:
        raise ValueError(f"a per-head value needs one entry per query head ({of}): {len(values.values)}")
    return HeadValues(values.values[list(heads)])


def refuse_apart(pipeline: AnyPipeline, *, split: bool) -> None:
    """Refuse a pipeline that chooses otherwise in some heads than in all of them.

    Args:
        split: whether the query heads of one KV head are apart.

    Raises:
        ValueError: names the stage.
    """
    for stage in all_in(pipeline):
        name = type(stage).__name__
        if isinstance(stage, Random):
            raise ValueError(
                f"'{name}' draws by the index of the KV head, which no rank with some heads knows: use "
                "AllGatherKV, whose ranks have all heads"
            )
        if split and isinstance(stage, SharedByGroup):
            raise ValueError(
                f"'{name}' joins the query heads of a KV head, and more ranks than KV heads take them apart: "
                "leave it out, or use at most as many ranks as KV heads"
            )
        if split and getattr(stage, "per_query_head", True) is False:
            raise ValueError(
                f"'{name}' has one order for the query heads of a KV head, and more ranks than KV heads take them "
                "apart: give it per_query_head=True, or use at most as many ranks as KV heads"
            )
