"""Whether a call runs, or is written down by torch.compile or a transform of `torch.func`."""

from __future__ import annotations

import torch

from blocksparse.runtime.torch_private import under_a_transform


def is_transformed() -> bool:
    """Whether tensors may be stand-ins now: those of a graph that is traced, or of a transform of `torch.func`.

    Kernels cannot read stand-ins. An op gets the tensors behind them.
    """
    return torch.compiler.is_compiling() or under_a_transform()


def refuse_transforms(method: str) -> None:
    """Refuse a call of a method of pipelines for which there is no node that a graph could have.

    Raises:
        ValueError: tensors may be stand-ins now.
    """
    if is_transformed():
        raise ValueError(
            f"torch.compile and torch.func take calls of a pipeline, but not {method!r}: leave it out of them"
        )
