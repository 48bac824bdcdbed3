"""The presets: one function for each paper and `auto`, and a dict of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocksparse.pipeline import Pipeline
from blocksparse.presets.auto import auto
from blocksparse.presets.text import (
    a_shape,
    bfla,
    flash_prefill,
    flex_prefill,
    mean_pooling,
    minference,
    pbs_attn,
    pbs_attn_plus,
    prism,
    s2o,
    skip_softmax,
    stem,
    tri_shape,
    xattention,
)
from blocksparse.presets.video import dfs_attn, lva, nabla, radial, sol_attn, sparge, subblock, svg2

_Makes = Callable[..., Pipeline[Any, Any, Any]]


def _by_name(*presets: _Makes) -> dict[str, _Makes]:
    return {preset.__name__: preset for preset in presets}


every_preset = _by_name(
    auto, pbs_attn, pbs_attn_plus, mean_pooling, bfla, s2o, sparge, xattention, flex_prefill, minference, a_shape,
    tri_shape, flash_prefill, prism, stem, skip_softmax,
)  # fmt: skip
"""Every preset for text by name. Each can be called without arguments, or with `executor=` alone."""

video_presets = _by_name(subblock, sol_attn, dfs_attn, radial, nabla, lva, svg2)
"""Those for pictures and videos, in calls that are not causal; some need the grid of the cells, or more."""
