"""Which consecutive tokens each rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Consecutive tokens, from position `start` up to, but not including, position `end`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    def within(self, other: Piece) -> slice:
        """Where these tokens stand in a larger piece."""
        return slice(self.start - other.start, self.end - other.start)


def in_order(lengths: Sequence[int], before: int) -> list[list[Piece]]:
    """The pieces of each rank: rank `r` has the next `lengths[r]` tokens, the first rank those after `before`."""
    return [[Piece(before + end - n, before + end)] for n, end in zip(lengths, accumulate(lengths), strict=True)]


def head_tail(lengths: Sequence[int], before: int, cut: int) -> list[list[Piece]]:
    """The pieces of each of `n` ranks where rank `r` has pieces `r` and `2 n - 1 - r` of `2 n`.

    Late queries see more keys, so that in a causal call each rank then has much the same work. Pieces end at
    multiples of one length, which is a multiple of `cut`; thus the first and the last may be shorter.

    Raises:
        ValueError: the ranks' `lengths` are not those of such pieces.
    """
    n, (first, *others) = len(lengths), lengths
    if n == 1:
        return in_order(lengths, before)
    length, lead = others[0] // 2, before % cut
    last = first + lead - length
    if any(other != 2 * length for other in others) or not 0 < last <= length:
        raise ValueError(
            "head-tail shards must be pieces of one length, of which only the first and the last may be shorter, "
            f"as shard() cuts them: the ranks have {', '.join(map(str, lengths))} tokens"
        )
    bounds = [before, *(before - lead + length * i for i in range(1, 2 * n)), before + sum(lengths)]
    each = [Piece(*bound) for bound in pairwise(bounds)]
    return [[each[rank], each[-1 - rank]] for rank in range(n)]


def cut(tokens: int, ranks: int, before: int, at: int, *, both_ends: bool) -> list[list[Piece]]:
    """Cut `tokens` after `before` others at multiples of `at`: a piece for each rank, or two as in `head_tail`.

    Raises:
        ValueError: there are too few tokens for so many pieces.
    """
    count, origin = ranks, before // at * at
    blocks = -(-(before + tokens - origin) // at)
    inner = [blocks * i // count for i in range(1, count)]
    if both_ends and ranks > 1:
        count = 2 * ranks
        inner = [-(-blocks // count) * i for i in range(1, count)]
    bounds = [before, *(origin + at * i for i in inner), before + tokens]
    each = [Piece(*bound) for bound in pairwise(bounds)]
    if any(piece.length < 1 for piece in each):
        raise ValueError(
            f"{tokens} tokens are too few for {count} pieces over {ranks} ranks: pieces begin at multiples of "
            f"{at} tokens, by which this pipeline chooses blocks"
        )
    return [[each[rank], each[-1 - rank]] if count > ranks else [each[rank]] for rank in range(ranks)]


def taken(x: Tensor, pieces: Sequence[Piece], dim: int, *, before: int = 0) -> list[Tensor]:
    """The tokens of `x` along `dim` that stand in each piece; the first token of `x` stands at `before`."""
    return [x.narrow(dim, piece.start - before, piece.length) for piece in pieces]


def split(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """`x` `[B, H, N, ...]`, in which these pieces stand one behind the other, cut into them."""
    return list(x.split([piece.length for piece in pieces], dim=2))


def joined(parts: Callable[[], list[Tensor]], pieces: Sequence[Sequence[Piece]]) -> Callable[[], Tensor]:
    """A function that waits for the shards of all ranks, and returns their pieces in order, `[B, H, N, D]`."""
    waiting, found = [parts], list[Tensor]()

    def join() -> Tensor:
        if waiting:  # after the first call, nothing holds the shards any more
            each: dict[Piece, Tensor] = {}
            for its, part in zip(pieces, waiting.pop()(), strict=True):
                each.update(zip(its, split(part, its), strict=True))
            found.append(torch.cat([each[piece] for piece in sorted(each)], dim=2))
        return found[0]

    return join


def refuse_cuts(pieces: Sequence[Sequence[Piece]], at: int, what: str) -> None:
    """Refuse pieces that begin inside a block, except for the first of all.

    Raises:
        ValueError: names the position.
    """
    starts = sorted(piece.start for its in pieces for piece in its)[1:]
    if wrong := [start for start in starts if start % at]:
        raise ValueError(
            f"shards of {what} must begin at multiples of {at} tokens, by which this pipeline chooses blocks, as "
            f"shard() cuts them: one begins at position {wrong[0]}"
        )
