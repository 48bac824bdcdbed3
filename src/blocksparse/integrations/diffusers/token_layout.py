"""Where the tokens of a picture stand in a model's attention, and where those of text."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import Rule, count, flag, shown, whole
from blocksparse.permuters.grid_order import three_sizes

Sizes = tuple[int, int, int]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of q, k, v `[B, H, N, D]` that gives the output `[B, H, N, Dv]`."""

_several_sizes = Rule(
    "a tuple of grids (T, H, W), each of three whole numbers",
    lambda x: isinstance(x, tuple) and all(map(three_sizes.is_kind, x)),
    lambda x: all(map(three_sizes.holds, x)),
)


@final
@frozen
class TokenLayout:
    """The tokens of one forward call: those of one or more pictures or videos, and those of text beside them.

    Args:
        grids: frames, rows and columns `(T, H, W)` in tokens, one per picture or video. Each is flattened frame by
            frame and row by row, and they stand one after the other.
        text: tokens of text in the same sequence as the pictures, padding included; 0 where text has a cross
            attention of its own. Attention over the pictures alone may occur in the same model.
        text_first: whether the text stands before the pictures, and not behind them.
        real: how many tokens of text are real, for each entry of the batch. Real ones come first, and all behind
            them are padding. None means that there is no padding.
    """

    grids: tuple[Sizes, ...] = field(validator=_several_sizes)
    text: int = field(default=0, converter=whole, validator=count)
    text_first: bool = field(default=False, validator=flag)
    real: tuple[int, ...] | None = field(default=None)

    @real.validator
    def _check_real(self, _: object, real: tuple[int, ...] | None) -> None:
        if real is not None and not all(0 <= n <= self.text for n in real):
            raise ValueError(f"'real' must name at most 'text' ({self.text}) tokens per entry: {shown(real)}")

    @property
    def cells(self) -> int:
        """The number of tokens of all pictures."""
        return sum(map(prod, self.grids))

    @property
    def texts(self) -> frozenset[int]:
        """How many tokens of text one call of attention may have."""
        return frozenset({0, self.text, *(self.real or ())})

    def attend(self, attend: Callable[[int], Attend], q: Tensor, k: Tensor, v: Tensor, *, padded: bool) -> Tensor:
        """Call `attend(text)` on the pictures, followed by as many tokens of text, and put everything back.

        `q`, `k` and `v` are `[B, H, N, D]` in the model's order. Queries that are padding get zeros.

        Args:
            attend: gives for a number of tokens of text the function that attends.
            padded: whether the model masks the padding of its text. If not, every token is real.
        """
        text = q.shape[2] - self.cells
        real = self.real if padded and self.real is not None else (text,) * q.shape[0]
        if len(set(real)) == 1:
            return self._alike(attend(real[0]), q, k, v, text, real[0])
        one_by_one = [
            self._alike(attend(n), q[i : i + 1], k[i : i + 1], v[i : i + 1], text, n) for i, n in enumerate(real)
        ]
        return torch.cat(one_by_one)

    def _alike(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, text: int, real: int) -> Tensor:
        """The same for entries of a batch that have as many real tokens of text."""
        out = attend(*(self._pictures_first(x, text, real) for x in (q, k, v)))
        padding = out.new_zeros((*out.shape[:2], text - real, out.shape[3]))
        if not self.text_first or not text:
            return torch.cat((out, padding), dim=2) if text > real else out
        return torch.cat((out[:, :, self.cells :], padding, out[:, :, : self.cells]), dim=2)

    def _pictures_first(self, x: Tensor, text: int, real: int) -> Tensor:
        if not self.text_first or not text:
            return x[:, :, : self.cells + real]
        return torch.cat((x[:, :, text:], x[:, :, :real]), dim=2)

    def gathered(self, x: Tensor, ranks: int, text: int) -> Tensor:
        """`x` `[B, H, N, D]` in the model's order, from the order in which Ulysses gathers the parts of ranks.

        Each rank holds a part of the text and a part of the pictures, in the model's order.
        """
        if not text:
            return x
        parts = x.unflatten(2, (ranks, -1))
        here = text // ranks
        first = here if self.text_first else parts.shape[3] - here
        return torch.cat((parts[:, :, :, :first].flatten(2, 3), parts[:, :, :, first:].flatten(2, 3)), dim=2)

    def scattered(self, x: Tensor, ranks: int, text: int) -> Tensor:
        """The inverse of `gathered`."""
        if not text:
            return x
        first = text if self.text_first else x.shape[2] - text
        parts = (x[:, :, :first].unflatten(2, (ranks, -1)), x[:, :, first:].unflatten(2, (ranks, -1)))
        return torch.cat(parts, dim=3).flatten(2, 3)
