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
    """A preset with one setting; `pipeline(block=...)` gives it the side of its blocks."""

    preset: str
    label: str
    pipeline: Callable[..., AnyPipeline]


def _settings(preset: Callable[..., AnyPipeline], *values: Any, **rest: Any) -> list[Setting]:
    """One setting for each value, or tuple of values, of the preset's first parameters."""
    rows = []
    for value in values:
        first = value if isinstance(value, tuple) else (value,)
        label = ", ".join([*(f"{x:g}" for x in first), *(f"{name}={x}" for name, x in rest.items())])
        rows.append(Setting(preset.__name__, label, partial(preset, *first, **rest)))
    return rows


def bfla(mass: float, *, block: int, per_token: bool = False) -> AnyPipeline:
    """Its blocks are the tiles of the final mask."""
    return bs.bfla(mass, tile=block, per_token=per_token)


def sparge(tau: float, theta: float, *, block: int) -> AnyPipeline:
    """Its blocks are 128 x 64."""
    return bs.sparge(tau, theta, block=block, k_block=64)


SETTINGS: tuple[Setting, ...] = (
    *_settings(bs.mean_pooling, 0.9, 0.97, 0.99),
    *_settings(bs.pbs_attn, 0.5, 0.75, 0.9),
    *_settings(bs.pbs_attn_plus, 0.5, 0.75, 0.9),
    *_settings(bs.xattention, 0.8, 0.9, 0.95),
    *_settings(bfla, 0.99),
    *_settings(bfla, 0.9, 0.97, per_token=True),
    *_settings(bs.s2o, 0.01, 0.03, 0.1),
    *_settings(sparge, (0.98, 0.6), (0.95, 0.5), (0.9, 0.3)),
    *_settings(bs.flex_prefill, 0.95, 0.9),
    *_settings(bs.flex_prefill, 0.9, min_budget=128),
    *_settings(bs.minference, (1000, 6096), (200, 500), (60, 120)),
    *_settings(bs.a_shape, (128, 3968), (128, 2048), (128, 1024)),
    *_settings(bs.tri_shape, (128, 3968), (128, 2048), (128, 1024)),
)
