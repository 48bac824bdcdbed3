"""The node: a model in, the same model with sparse attention out."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from blocksparse import HilbertOrder, Int8Executor, Pipeline, sol_attn, sparge, subblock

from .patch import SparsePatch

KEY = "blocksparse"
PRESETS: dict[str, Callable[[float], Pipeline[Any, Any, Any]]] = {
    "sparge": lambda share: sparge(share=share, order=HilbertOrder()),
    "sparge, 8 bits": lambda share: sparge(share=share, order=HilbertOrder(), executor=Int8Executor()),
    "subblock": lambda share: subblock(share, order=HilbertOrder()),
    "subblock, 8 bits": lambda share: subblock(share, order=HilbertOrder(), executor=Int8Executor()),
    "sol-attn": lambda share: sol_attn(deviations(share)),  # neighbours in the model's order, which it keeps
}
"""A pipeline for each name and the share of key blocks that a row keeps."""


def deviations(share: float) -> float:
    """Above how many standard deviations this share of normal numbers lies: 1.0 for 16 %, 1.5 for 7 %."""
    return NormalDist().inv_cdf(1 - min(share, 1 - 1e-6))


def numbers(text: str) -> frozenset[int]:
    """The whole numbers that a text names: "0, 1, 47-49".

    Raises:
        ValueError: a part of it is neither a number nor a range.
    """
    found: set[int] = set()
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None:
            raise ValueError(f"'dense_blocks' must be numbers and ranges, as in '0, 1, 47-49': {part!r}")
        found.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return frozenset(found)


class ModelBlocksparseAttention:
    """Let a video model attend to the heaviest blocks of keys alone, in all but its first steps and blocks."""

    CATEGORY = "model/patch"
    DESCRIPTION = (
        "Attention over the tokens of a picture or a video becomes block-sparse. Text, sound and frames that are "
        "given are kept as they are. Dense steps, dense blocks and what this node does not know run on the "
        "attention that the model has without it."
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 (the name is ComfyUI's)
        percent = {"default": 25.0, "min": 1.0, "max": 100.0, "step": 0.5}
        count = {"min": 0, "max": 1 << 20}
        return {
            "required": {
                "model": ("MODEL",),
                "preset": (list(PRESETS), {"tooltip": "How blocks of keys are chosen, and in what precision."}),
                "keep_percent": (
                    "FLOAT",
                    percent | {"tooltip": "Of the key blocks of each block of queries, that are attended to."},
                ),
                "dense_steps": ("INT", count | {"default": 10, "tooltip": "The first steps of a run stay dense."}),
                "dense_blocks": (
                    "STRING",
                    {
                        "default": "0, 1",
                        "tooltip": "Blocks of the model that stay dense: numbers and ranges, 0, 47-49.",
                    },
                ),
                "min_tokens": (
                    "INT",
                    count | {"default": 4096, "tooltip": "Attention over fewer tokens than this stays dense."},
                ),
                "verbose": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "Log what is sparse, and why the rest is dense."},
                ),
            }
        }

    def patch(
        self,
        model: Any,
        preset: str,
        keep_percent: float,
        dense_steps: int,
        dense_blocks: str,
        min_tokens: int,
        verbose: bool = False,
    ) -> tuple[Any]:
        """A clone of `model` (a `ModelPatcher`) whose forward calls attend sparsely."""
        sparse = SparsePatch(
            PRESETS[preset](keep_percent / 100), dense_steps, numbers(dense_blocks), min_tokens, verbose
        )
        patched = model.clone()
        patched.add_wrapper_with_key("diffusion_model", KEY, sparse.wrapper)
        return (patched,)
