"""How our masks and outputs are held against those of the authors' code."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from tests.papers.golden_inputs import Golden
from torch import Tensor

import blocksparse as bs

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "golden").glob("*.npz"))}


def cases(method: str) -> list[str]:
    """Names of a method's cases: "pbs", "meanpool", "xattn", "bfla", "sparge", "spargeex", "flex", "minf"."""
    return [name for name in FILES if name.split("_")[0] == method]


@functools.cache
def load(name: str) -> Golden:
    return Golden.load(FILES[name])


def differing(mask: bs.BlockMask, case: Golden, against: str = "mask") -> Tensor:
    """Blocks where we differ from the authors, as indices `[n, 4]`.

    A *fragile* block, which their own code flips when a threshold moves by 1e-4 or an input by 3e-6, may
    differ; so may a block without an allowed pair, which ours never holds.
    """
    suffix = against.removeprefix("mask")
    golden, fragile = (torch.from_numpy(case.arrays[name]) for name in (against, "fragile" + suffix))
    return ((mask.keep != (golden & mask.grid.visible)) & ~fragile).nonzero()


def assert_same_output(out: Tensor, case: Golden, *, atol: float = 2e-5) -> None:
    """About 50 rows of the output, and the norm of every row."""
    rows = torch.from_numpy(case.arrays["out_rows"])
    torch.testing.assert_close(out[:, :, rows], torch.from_numpy(case.arrays["out"]).float(), rtol=0, atol=atol)
    norm = torch.from_numpy(case.arrays["out_norm"]).float()
    torch.testing.assert_close(out.norm(dim=-1), norm, rtol=0, atol=atol)
