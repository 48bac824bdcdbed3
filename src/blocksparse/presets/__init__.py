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

every_preset: dict[str, Callable[..., Pipeline[Any, Any, Any]]] = {
    "auto": auto,
    "pbs_attn": pbs_attn,
    "pbs_attn_plus": pbs_attn_plus,
    "mean_pooling": mean_pooling,
    "bfla": bfla,
    "s2o": s2o,
    "sparge": sparge,
    "xattention": xattention,
    "flex_prefill": flex_prefill,
    "minference": minference,
    "a_shape": a_shape,
    "tri_shape": tri_shape,
    "flash_prefill": flash_prefill,
    "prism": prism,
    "stem": stem,
    "skip_softmax": skip_softmax,
}
"""Every preset for text by name. Each can be called without arguments, or with `executor=` alone."""

video_presets: dict[str, Callable[..., Pipeline[Any, Any, Any]]] = {
    "subblock": subblock,
    "sol_attn": sol_attn,
    "dfs_attn": dfs_attn,
    "radial": radial,
    "nabla": nabla,
    "lva": lva,
    "svg2": svg2,
}
"""Those for pictures and videos, in calls that are not causal; some need the grid of the cells, or more."""
