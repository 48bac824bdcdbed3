"""What a call asks for, as tests write it."""

from __future__ import annotations

from typing import Any

from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec


def asked(mask: BlockMask, scale: float = 1.0, **more: Any) -> AttentionSpec:
    """The spec for which a mask was made; a mask does not know the scale, the softcap and the sinks."""
    return AttentionSpec(scale=scale, causal=mask.grid.causal, window=mask.grid.window, **more)
