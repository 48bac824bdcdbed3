"""A check of what every permuter must guarantee."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blocksparse.check.class_line import Declared, check_gave, declared
from blocksparse.order.permutation import Permutation, Permuter
from blocksparse.testing.requirements import LENGTHS, about, cases, require, unchanged


def check_permuter(
    permuter: Permuter[Any],
    *,
    causal: bool | None = None,
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    device: str = "cpu",
) -> None:
    """Call `permuter` with prompts and chunks of prompts, and check the permutations that it gives.

    They must be of the type that the permuter's class declares, fit q and k, name no token twice, and leave keys
    in place if `moves_keys` is False. The same inputs must give the same maps, a batch entry must have the maps
    that it has alone, and nothing may be written into the inputs.

    Args:
        causal: whether calls are causal; None for both kinds.
        lengths: `(N, M)`, the keys and queries of each case; give those that the permuter takes if not all do.

    Raises:
        AssertionError: says in one sentence what is wrong and in which case.
    """
    for case in cases(lengths, causal):
        (q, k, _), spec = case.inputs(device=device), case.spec()
        with about(permuter, case), unchanged(q=q, k=k):
            given = permuter(q, k, spec)
            check_gave((Declared(type(permuter), Permutation), *declared(permuter, Permuter, 0)), given)
            given.check_fits(q, k, causal=case.causal)
            given.check_contents(q, k)
            in_place = given.k_index is None
            require(permuter.moves_keys or in_place, "'moves_keys' is False, and there is a 'k_index'")
            again = permuter(q, k, spec)
            require(_same(given, again), "the same inputs gave other maps the second time")
            alone = permuter(q[1:], k[1:], spec)
            require(_same(given, alone, skipped=1), "a batch entry has another order when it is alone")


def _same(mine: Permutation, its: Permutation, *, skipped: int = 0) -> bool:
    """Whether two permutations hold equal maps, after the first `skipped` batch entries of `mine` are left out."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return (x is None) == (y is None) and (x is None or y is None or torch.equal(x[skipped:], y))

    return mine.group == its.group and equal(mine.k_index, its.k_index) and equal(mine.q_index, its.q_index)
