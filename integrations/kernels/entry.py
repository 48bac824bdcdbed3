"""Training-free block-sparse prefill attention: `scaled_dot_product_attention`, the presets, and their stages."""

from __future__ import annotations

from importlib.util import find_spec

_packages = {"attr": "attrs", "einops": "einops", "numpy": "numpy"}
if _missing := [package for module, package in _packages.items() if find_spec(module) is None]:
    raise ImportError(f"blocksparse needs {', '.join(_missing)}: pip install {' '.join(_missing)}")

from .blocksparse import *  # noqa: E402, F403
from .blocksparse import __version__ as __version__  # noqa: E402
