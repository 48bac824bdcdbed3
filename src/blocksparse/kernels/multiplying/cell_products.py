"""What kernels over cells share. A cell is some consecutive tokens, taken as one long vector."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.multiplying.products import wide_dtype
from blocksparse.launch.torch_modes import without_autocast


@frozen(eq=False)
class Cells:
    """How tokens are cut into cells, cells into blocks, and which pairs of cells may meet."""

    slots: int  # tokens per cell
    q_lead: int  # empty slots before the first query, in its cell or in its row of blocks
    high: int  # query cells per block
    wide: int  # key cells per block
    causal: bool  # if not, every query meets every key, and positions are not looked at
    padded_tail: bool  # what takes no part counts as zeros, not as the mean of the tokens of its cell
    q_last: Tensor | None = None  # [B|1, Hm, query cells or rows of blocks] int32, the last position in each
    k_first: Tensor | None = (
        None  # [B|1, Hm, key cells] int32, the first position in each; both None: all in order
    )
    # With a sliding window. In order: how many key cells before its own, or before the first of its row of blocks, a
    # query cell reaches. Else a query cell, or a row, reaches only key cells whose last position is above its floor.
    behind: int | None = None
    q_floor: Tensor | None = None  # as `q_last`
    k_last: Tensor | None = None  # as `k_first`

    @property
    def windowed(self) -> bool:
        """Whether a window hides cells, which only the implementations in plain torch leave out."""
        return self.behind is not None or self.q_floor is not None


def cells_behind(window: int, slots: int) -> int:
    """How many cells of `slots` tokens before its own cell a token sees at most, if it is the first of its cell."""
    return (window + slots - 2) // slots


def cells(x: Tensor, slots: int, lead: int, filler: Tensor | None = None) -> Tensor:
    """Tokens `[B, H, N, D]` in cells, `[B, H, cells, slots, D]`; `lead` empty slots come first.

    Args:
        filler: `[B, H, 2, D]`, what empty slots at the start and at the end hold; zeros unless given.
    """
    missing = -(lead + x.shape[2]) % slots
    if filler is not None and (lead or missing):
        before, after = (filler[:, :, i : i + 1].expand(-1, -1, n, -1) for i, n in ((0, lead), (1, missing)))
        with without_autocast(x):  # autocast refuses to join tensors of another half precision than its own
            x = torch.cat((before, x, after), dim=2)
    elif lead or missing:
        x = pad(x, (0, 0, lead, missing))
    cells: Tensor = x.unflatten(2, (-1, slots))
    return cells


def means_of_short_cells(x: Tensor, slots: int, lead: int) -> Tensor | None:
    """The mean of the tokens in the first and in the last cell, `[B, H, 2, D]`; None if no cell lacks tokens."""
    missing = -(lead + x.shape[2]) % slots
    if not (lead or missing):
        return None
    ends = (x[:, :, : slots - lead], x[:, :, -(slots - missing) :])
    return torch.stack([end.mean(2, dtype=wide_dtype(x)) for end in ends], dim=2).to(x.dtype)
