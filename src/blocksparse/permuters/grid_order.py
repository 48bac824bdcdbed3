"""What orders of image and video tokens share (SpargeAttn, section 3.7 and appendix A.1)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from attrs import converters, field, frozen
from torch import Tensor

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.validators import Rule, count, is_whole, optional, whole


def three(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Converter: whole numbers in a tuple become Python's."""
    return tuple(map(whole, sizes)) if isinstance(sizes, tuple) else sizes  # type: ignore[return-value]


three_sizes = Rule(
    "three whole numbers (T, H, W), each at least 1; an image is (1, H, W)",
    lambda x: isinstance(x, tuple) and len(x) == 3 and all(map(is_whole, x)),
    lambda x: min(x) >= 1,
)


@frozen(eq=False)
class GridOrder(Permuter[GlobalPermutation]):
    """An order of tokens that stand for the cells of a video, one order for every head.

    Tokens arrive as models flatten them: `prefix` tokens of text, then the cells frame by frame and row by row,
    then `suffix` tokens of text. Only cells move. Queries take the order of the keys where they are the same
    tokens: as many queries as keys, or, causal, a chunk of them. Not causal with another number of queries, the
    queries are other tokens (cross attention) and stay in place.

    Made for attention that is not causal. Causal attention is exact too, but many blocks then hold pairs above
    the diagonal. Orders are computed on the device: nothing is copied to it and nothing waits for it.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens, after patching; an image is `(1, H, W)`.
        prefix: tokens before the cells, left in place.
        suffix: tokens after the cells, left in place; None takes whatever is left.
    """

    grid: tuple[int, int, int] = field(converter=three, validator=three_sizes)
    prefix: int = field(default=0, converter=whole, validator=count, kw_only=True)
    suffix: int | None = field(
        default=0, converter=converters.optional(whole), validator=optional(count), kw_only=True
    )

    @abstractmethod
    def cells(self, device: torch.device | str) -> Tensor | None:
        """Which cell stands in each place, `[T * H * W]` int64, cells counted frame by frame and row by row.

        None leaves all of them where they are.
        """

    def __call__(self, q: Tensor, k: Tensor, *, causal: bool, scale: float) -> GlobalPermutation:
        """The order of `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`.

        Raises:
            ValueError: `N` is not the number of cells and text tokens.
        """
        del scale
        (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
        self._check_length(N)
        cells = self.cells(k.device)
        if cells is None:
            return GlobalPermutation()
        position = torch.arange(N, device=k.device)
        order = torch.cat((position[: self.prefix], self.prefix + cells, position[self.prefix + len(cells) :]))
        k_index = order.int().expand(B, Hkv, 1, N)
        if M == N:
            return GlobalPermutation(k_index, order.int().expand(B, Hq, N))
        if not causal:
            return GlobalPermutation(k_index)
        # A chunk: the queries that are there, in the order of the places that their keys have.
        place = torch.empty_like(position).scatter_(0, order, position)
        return GlobalPermutation(k_index, place[N - M :].argsort().int().expand(B, Hq, M))

    def _check_length(self, N: int) -> None:
        T, H, W = self.grid
        expected = self.prefix + T * H * W + (self.suffix or 0)
        if expected == N or (self.suffix is None and expected < N):
            return
        tokens = f"prefix {self.prefix} + grid {T} x {H} x {W} = {T * H * W}"
        tokens += " + any suffix" if self.suffix is None else f" + suffix {self.suffix}"
        raise ValueError(
            f"{type(self).__name__} needs {'at least ' if self.suffix is None else ''}{expected} keys "
            f"({tokens}): Nk={N}; give the grid after patching as (T, H, W), text tokens as prefix= and suffix="
        )
