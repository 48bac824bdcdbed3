"""The presets: one function for each paper and `auto`, each in its file, and a dict of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocksparse.pipeline import Pipeline
from blocksparse.presets.a_shape import a_shape
from blocksparse.presets.auto import auto
from blocksparse.presets.bfla import bfla
from blocksparse.presets.dfs_attn import dfs_attn
from blocksparse.presets.flash_prefill import flash_prefill
from blocksparse.presets.flex_prefill import flex_prefill
from blocksparse.presets.lva import lva
from blocksparse.presets.mean_pooling import mean_pooling
from blocksparse.presets.minference import minference
from blocksparse.presets.nabla import nabla
from blocksparse.presets.pbs_attn import pbs_attn
from blocksparse.presets.pbs_attn_plus import pbs_attn_plus
from blocksparse.presets.prism import prism
from blocksparse.presets.radial import radial
from blocksparse.presets.s2o import s2o
from blocksparse.presets.skip_softmax import skip_softmax
from blocksparse.presets.sol_attn import sol_attn
from blocksparse.presets.sparge import sparge
from blocksparse.presets.stem import stem
from blocksparse.presets.subblock import subblock
from blocksparse.presets.svg2 import svg2
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
