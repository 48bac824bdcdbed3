"""Shared parts of the checks: the cases, and errors that name the stage and the case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.order.global_index_map import GlobalIndexMap
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.spec import AttentionSpec
from blocksparse.testing.inputs import make_qkv

LENGTHS = ((1, 1), (40, 40), (129, 129), (200, 77), (200, 1))
"""The default cases `(N, M)`: N keys, and M queries at their end."""
SCALE = 0.25


@frozen
class Case:
    """One call that a stage is checked with."""

    N: int
    M: int
    causal: bool

    def spec(self, **more: Any) -> AttentionSpec:
        """The attention options of the call."""
        return AttentionSpec(scale=SCALE, causal=self.causal, **more)

    def inputs(
        self, *, D: int = 16, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`q` `[2, 4, M, D]`, `k` and `v` `[2, 2, N, D]`."""
        return make_qkv(B=2, Hq=4, Hkv=2, N=self.N, M=self.M, D=D, dtype=dtype, device=device, seed=self.N)


def cases(lengths: tuple[tuple[int, int], ...], causal: bool | None) -> list[Case]:
    """A case for every length: causal, not causal, or one of each if `causal` is None."""
    return [Case(N, M, c) for N, M in lengths for c in ((True, False) if causal is None else (causal,))]


def orders(q: Tensor, k: Tensor, needed: tuple[type | UnionType, ...], *, causal: bool) -> list[Permutation]:
    """The permutations of a check: identity, shuffled tokens and, if `needed` allows, a map per query group."""
    given: list[Permutation] = [GlobalPermutation(), shuffled(q, k)]
    if causal and all(issubclass(Permutation, need) for need in needed):
        given.append(GlobalIndexMap(64)(q, k, AttentionSpec(scale=SCALE)))
    return given


def shuffled(q: Tensor, k: Tensor) -> GlobalPermutation:
    """The queries of each head and the keys of each KV head in a random order."""
    (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
    draw = uniform(0)
    keys, queries = (draw(shape).argsort(-1).int() for shape in ((B, Hkv, 1, N), (B, Hq, M)))
    return GlobalPermutation(keys.to(k.device), queries.to(q.device))


def uniform(seed: int) -> Callable[[Sequence[int]], Tensor]:
    """A function that draws fp32 numbers in [0, 1) on the CPU, whatever the default device and dtype are."""
    draw = torch.Generator("cpu").manual_seed(seed)
    return lambda shape: torch.rand(tuple(shape), generator=draw, dtype=torch.float32, device="cpu")


def require(holds: bool | Tensor, sentence: str) -> None:
    """Raise an `AssertionError` that says `sentence` unless it holds."""
    if not bool(holds):
        raise AssertionError(sentence)


@contextmanager
def about(stage: object, case: object) -> Iterator[None]:
    """Put the stage and the case in front of the message of an error that a check or the library raises."""
    try:
        yield
    except (AssertionError, TypeError, ValueError) as found:
        raise AssertionError(f"{stage!r} with {case!r}: {found}") from found


@contextmanager
def unchanged(**tensors: Tensor) -> Iterator[None]:
    """Require that nothing is written into these tensors."""
    before = {name: x.clone() for name, x in tensors.items()}
    yield
    for name, x in tensors.items():
        same = torch.equal(x.nan_to_num(nan=0.5), before[name].nan_to_num(nan=0.5))
        require(same, f"it wrote into '{name}', which belongs to the caller")
