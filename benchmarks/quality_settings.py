"""The presets and settings that quality is measured for: each preset's default, and two more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import frozen

import blocksparse as bs

AnyPipeline = bs.Pipeline[Any, Any, Any]


@frozen
class Setting:
    """A preset with one setting; `pipeline(block)` gives it the block."""

    preset: str
    label: str
    pipeline: Callable[..., AnyPipeline]


def _settings(preset: Callable[..., AnyPipeline], *values: float) -> list[Setting]:
    """One setting per value of the preset's first parameter."""
    return [Setting(preset.__name__, f"{value:g}", partial(preset, value)) for value in values]


SETTINGS: tuple[Setting, ...] = (
    *_settings(bs.mean_pooling, 0.9, 0.97, 0.99),
    *_settings(bs.pbs_attn, 0.5, 0.75, 0.9),
)
