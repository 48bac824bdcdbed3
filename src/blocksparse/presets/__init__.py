"""The presets: one function for each paper and `auto`, in files of their own, and a dict of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocksparse.pipeline import Pipeline
from blocksparse.presets.a_shape import a_shape
from blocksparse.presets.auto import auto
from blocksparse.presets.bfla import bfla
from blocksparse.presets.flex_prefill import flex_prefill
from blocksparse.presets.mean_pooling import mean_pooling
from blocksparse.presets.minference import minference
from blocksparse.presets.pbs_attn import pbs_attn
from blocksparse.presets.pbs_attn_plus import pbs_attn_plus
from blocksparse.presets.s2o import s2o
from blocksparse.presets.sparge import sparge
from blocksparse.presets.tri_shape import tri_shape
from blocksparse.presets.xattention import xattention

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
}
"""Every preset by name. Each can be called without arguments, or with `executor=` alone."""
