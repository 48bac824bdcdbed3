"""The base class of orders of image and video tokens (SpargeAttn, section 3.7 and appendix A.1)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from attrs import converters, field, frozen, validators
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import Rule, count, is_whole, maybe_whole, optional, whole
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter


def three(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Converter: whole numbers in a tuple become Python `int`s."""
    return tuple(map(whole, sizes)) if isinstance(sizes, tuple) else sizes  # type: ignore[return-value]


three_sizes = Rule(
    "three whole numbers (T, H, W), each at least 1; an image is (1, H, W)",
    lambda x: isinstance(x, tuple) and len(x) == 3 and all(map(is_whole, x)),
    lambda x: min(x) >= 1,
)


def given(grid: tuple[int, int, int] | None, stage: object) -> tuple[int, int, int]:
    """The grid `(T, H, W)` of a stage.

    Raises:
        ValueError: it has none.
    """
    if grid is None:
        name = type(stage).__name__
        raise ValueError(
            f"{name} has no grid: give it as {name}((T, H, W)) in tokens, after patching; only "
            "integrations.diffusers.attach takes it from the model"
        )
    return grid


@frozen(cache_hash=True)
class GridOrder(Permuter[GlobalPermutation]):
    """An order of tokens that stand for the cells of a video; all heads have the same order.

    Tokens must arrive as models flatten them: `prefix` tokens of text, then the cells frame by frame and row by
    row, then `suffix` tokens of text. Only cells move. Queries get the order of the keys if they are the same
    tokens: if there are as many queries as keys, or if the call is causal, where the queries are the last tokens.
    In a call that is not causal and has another number of queries, the queries are other tokens (cross attention)
    and stay in place.

    These orders are made for attention that is not causal. Causal attention is exact too, but many blocks then
    hold pairs above the diagonal. The order is computed on the device of the keys, without a copy from the host.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens, after patching; an image is `(1, H, W)`. None leaves
            it to a host that knows it (`integrations.diffusers`), and the order cannot be called by itself.
        prefix: how many tokens before the cells stay in place.
        suffix: how many tokens after the cells stay in place; None means any number.
    """

    grid: tuple[int, int, int] | None = field(
        default=None, converter=converters.optional(three), validator=validators.optional(three_sizes)
    )
    prefix: int = field(default=0, converter=whole, validator=count, kw_only=True)
    suffix: int | None = field(default=0, converter=maybe_whole, validator=optional(count), kw_only=True)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The grid.

        Raises:
            ValueError: there is none.
        """
        return given(self.grid, self)

    @abstractmethod
    def cells(self, device: torch.device | str) -> Tensor | None:
        """The cell in each place, `[T * H * W]` int64. Cells are counted frame by frame and row by row.

        None means that all cells stay in place.
        """

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        """The order of `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`.

        Raises:
            ValueError: `N` is not the number of cells and text tokens.
        """
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
        if not spec.causal:
            return GlobalPermutation(k_index)
        # The queries are a chunk: they stand in the order in which their own keys stand.
        place = torch.empty_like(position).scatter_(0, order, position)
        return GlobalPermutation(k_index, place[N - M :].argsort().int().expand(B, Hq, M))

    def _check_length(self, N: int) -> None:
        T, H, W = self.sizes
        expected = self.prefix + T * H * W + (self.suffix or 0)
        if expected == N or (self.suffix is None and expected < N):
            return
        tokens = f"prefix {self.prefix} + grid {T} x {H} x {W} = {T * H * W}"
        tokens += " + any suffix" if self.suffix is None else f" + suffix {self.suffix}"
        raise ValueError(
            f"{type(self).__name__} needs {'at least ' if self.suffix is None else ''}{expected} keys "
            f"({tokens}): Nk={N}; give the grid after patching as (T, H, W), text tokens as prefix= and suffix="
        )

    def alignment(self, causal: bool) -> int:
        raise ValueError(f"'{type(self).__name__}' orders all queries of a call together, and a part has some")
