"""Values that do not fit one another are refused when they are made or meet, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests import stages
from tests.machine import GPU
from tests.specs import asked, grid_of, wrong

Q, K, V = make_qkv(Hq=4, Hkv=2, N=64, D=16)


def order(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Tokens in order along the last axis."""
    return torch.arange(shape[-1], dtype=dtype).expand(shape)


def grid(
    permutation: bs.Permutation | None = None,
    q: Tensor = Q,
    k: Tensor = K,
    *,
    block: int = 16,
    causal: bool = True,
) -> bs.Grid:
    return grid_of(q, k, block, permutation=permutation or bs.GlobalPermutation(), causal=causal)


def everything(cut: bs.Grid, heads: int = 4) -> bs.RankedBlockMask:
    keep = cut.visible.expand(cut.batch, heads, -1, -1)
    return bs.RankedBlockMask(keep, cut, torch.full(keep.shape, -1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: bs.GlobalPermutation(order(1, 2, 1, 64, dtype=torch.int64)), TypeError, r"'k_index' must be int32: torch.int64. Convert it with .int\(\)"),
        (lambda: bs.GlobalPermutation(q_index=order(1, 4, 64).float()), TypeError, "'q_index' must be int32: torch.float32"),
        (lambda: bs.GlobalPermutation(wrong([1, 2])), TypeError, r"'k_index' must be an int32 tensor \[B, H, G, slots\] or None: list"),
        (lambda: bs.Permutation(order(1, 2, 2, 64), group=0), ValueError, "'group' must be a number of positions, at least 1: 0"),
        (lambda: grid(bs.GlobalPermutation(order(1, 2, 1, 60))), ValueError, "'k_index' must name each of the 64 keys once: it has 60 slots"),
        (lambda: grid(bs.GlobalPermutation(order(1, 1, 1, 64))), ValueError, r"must have B=1 batch entries and Hkv=2 or Hq=4 heads: \(1, 1, 1, 64\). Use expand\(\)"),
        (lambda: grid(bs.GlobalPermutation(order(3, 2, 1, 64))), ValueError, "must have B=1 batch entries"),
        (lambda: grid(bs.GlobalPermutation(q_index=order(1, 4, 63))), ValueError, r"'q_index' must have the shape \[B, Hq, M\] = \(1, 4, 64\): \(1, 4, 63\)"),
        (lambda: grid(bs.GlobalPermutation(order(1, 2, 1, 64).to("meta"))), ValueError, r"'k_index' must be on the device of q and k \(cpu\): meta"),
        (lambda: grid(bs.Permutation(order(1, 2, 3, 64), group=32)), ValueError, "for each group of 32 positions that queries 0 to 63 lie in, 2 in all: 3"),
        (lambda: bs.BlockMask(torch.ones(1, 4, 4, 5, dtype=torch.bool), grid()), ValueError, r"'keep' must have the shape \[B, H, rows, cols\] = \(1, 4, 4, 4\), or Hkv=2 heads.*: \(1, 4, 4, 5\)"),
        (lambda: bs.BlockMask(torch.ones(1, 3, 4, 4, dtype=torch.bool), grid()), ValueError, r"\(1, 3, 4, 4\)"),
        (lambda: bs.BlockMask(torch.ones(1, 4, 4, 4), grid()), TypeError, "'keep' must be bool: torch.float32"),
        (lambda: bs.RankedBlockMask(everything(grid()).keep, grid(), torch.zeros(1, 4, 4, 4)), TypeError, "'rank' must be int32: torch.float32"),
        (lambda: bs.RankedBlockMask(everything(grid()).keep, grid(), torch.zeros(1, 2, 4, 4).int()), ValueError, "'rank' must have the shape of 'keep'"),
        (lambda: bs.BlockScores(torch.zeros(1, 2, 4, 4), grid()), ValueError, r"'values' must have the shape \[B, Hq, rows, cols\] = \(1, 4, 4, 4\): \(1, 2, 4, 4\)"),
        (lambda: bs.BlockScores(torch.zeros(1, 4, 4, 4).half(), grid()), TypeError, "'values' must be float32: torch.float16"),
        (lambda: bs.BlockScores(torch.zeros(1, 4, 4, 4), grid(), torch.zeros(1, 4, 4, 3).bool()), ValueError, "'forced' must have the shape"),
        (lambda: bs.BlockScores(torch.zeros(1, 4, 4, 4), grid(), torch.zeros(1, 4, 4, 4)), TypeError, "'forced' must be bool"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(make: Callable[[], object], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        make()


@pytest.mark.parametrize(
    ("permutation", "sentence"),
    [
        (bs.GlobalPermutation(order(1, 2, 1, 64) - 1), "'k_index' must name key 0 to 63: -1"),
        (bs.GlobalPermutation(order(1, 2, 1, 64) + 1), "'k_index' must name key 0 to 63: 64"),
        (bs.GlobalPermutation(order(1, 2, 1, 64) // 2), "'k_index' must name each key once: key 0 twice"),
        (bs.GlobalPermutation(q_index=order(1, 4, 64) * 0), "'q_index' must name each query once: query 0 twice"),
        (bs.Permutation(order(1, 2, 2, 64) - 2, group=32), "'k_index' must name key 0 to 63, or be -1 .*: -2"),
        (
            bs.Permutation((order(1, 2, 2, 64) - 1) // 2, group=32),
            "'k_index' must name each key once: key 0 twice",
        ),
    ],
)
def test_contents_on_request(permutation: bs.Permutation, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        permutation.check_contents(Q, K)
    bs.Permutation((order(1, 2, 2, 64) - 1), group=32).check_contents(Q, K)  # an empty slot is no error there


@pytest.mark.parametrize("executor", stages.EXECUTORS, ids=stages.name)
def test_a_mask_of_another_call(executor: bs.Executor[Any, Any]) -> None:
    with pytest.raises(ValueError, match="were made with causal=True, and the call has causal=False"):
        executor(Q, K, V, everything(grid()), bs.AttentionSpec(scale=0.25, causal=False))
    with pytest.raises(ValueError, match=r"were made with window=None, and the call has window=9\. Pass the spec"):
        executor(Q, K, V, everything(grid()), bs.AttentionSpec(scale=0.25, window=9))
    shorter = everything(grid(q=Q[:, :, :40], k=K[:, :, :40]))
    with pytest.raises(
        ValueError, match=r"\(B, Hq, Hkv, M, N\) = \(1, 4, 2, 40, 40\), and q and k have \(1, 4, 2, 64, 64\)"
    ):
        executor(Q, K, V, shorter, asked(shorter, 0.25))
    with pytest.raises((ValueError, TypeError), match="'v' must have the heads, tokens and device of 'k'"):
        executor(Q, K, V[:, :, 1:], everything(grid()), asked(everything(grid()), 0.25))
    with pytest.raises(TypeError, match="one dtype"):
        executor(Q, K, V.half(), everything(grid()), asked(everything(grid()), 0.25))


def test_masks_of_different_orders_do_not_mix() -> None:
    """`FlexExecutor` and others would read the union in the order of the first."""
    here, there = everything(grid()), everything(grid(bs.GlobalPermutation(order(1, 2, 1, 64).flip(-1))))
    with pytest.raises(ValueError, match="cut from different permutations"):
        here | there
    with pytest.raises(ValueError, match="cut from different permutations"):
        here & there
    assert torch.equal((here | everything(grid())).keep, here.keep)  # two grids of tokens in place are one order


@pytest.mark.parametrize("causal", [True, False])
def test_a_map_in_any_memory_layout(causal: bool, device: str) -> None:
    """Kernels read a map as consecutive numbers."""
    q, k, v = (x.to(device) for x in (Q, K, V))
    index = torch.rand(1, 2, 1, 64, generator=torch.Generator().manual_seed(1)).argsort(-1).int().to(device)
    q_index = torch.rand(1, 4, 64, generator=torch.Generator().manual_seed(2)).argsort(-1).int().to(device)
    across = index.transpose(1, 3).contiguous().transpose(1, 3)
    q_across = q_index.mT.contiguous().mT
    assert across.stride(-1) != 1
    assert q_across.stride(-1) != 1

    def run(permutation: bs.GlobalPermutation, executor: bs.Executor[Any, Any]) -> Tensor:
        scores = bs.MeanPoolScorer(16)(q, k, permutation, bs.AttentionSpec(scale=0.25, causal=causal))
        mask = bs.TopCdf(0.5)(scores)
        return executor(q, k, v, mask, asked(mask, 0.25)).out

    for executor in (bs.ReferenceExecutor(), bs.TritonExecutor()):
        straight = run(bs.GlobalPermutation(index, q_index), executor)
        assert torch.equal(run(bs.GlobalPermutation(across, q_across), executor), straight)


class Zeros(bs.Permuter[bs.GlobalPermutation]):
    """Breaks its type parameters."""

    def __call__(self, q: Tensor, k: Tensor, spec: bs.AttentionSpec) -> Any:
        return torch.zeros(1)


class OfItsOwn(bs.Scorer[bs.Permutation, bs.BlockScores]):
    """Cuts a grid from an order that nobody gave it."""

    def __init__(self, *, causal: bool = True, permutation: bs.Permutation | None = None) -> None:
        self.causal, self.permutation = causal, permutation

    def __call__(
        self, q: Tensor, k: Tensor, permutation: bs.Permutation, spec: bs.AttentionSpec
    ) -> bs.BlockScores:
        cut = grid(self.permutation or permutation, q, k, causal=self.causal)
        return bs.BlockScores(torch.zeros(cut.batch, cut.q_heads, cut.rows, cut.cols), cut)


class GivesScores(bs.Selector[bs.BlockScores, bs.BlockMask]):
    def __call__(self, scores: bs.BlockScores) -> Any:
        return scores


class GivesATensor(stages.ByReference):
    """An executor without an output."""

    def __call__(self, q: Tensor, *given: Any, **more: Any) -> Any:
        return q


@pytest.mark.parametrize(
    ("stages_", "kind", "sentence"),
    [
        ((Zeros(), bs.NoScorer(16), bs.TopK(1), bs.ReferenceExecutor()), TypeError, "Zeros must give a Permutation, and gave a Tensor"),
        ((bs.Identity(), OfItsOwn(causal=False), bs.TopK(1), bs.ReferenceExecutor()), ValueError, "made with causal=False, and the call has causal=True"),
        ((bs.Identity(), OfItsOwn(permutation=bs.GlobalPermutation(order(1, 2, 1, 64))), bs.TopK(1), bs.ReferenceExecutor()), ValueError, "another permutation"),
        ((bs.Identity(), bs.NoScorer(16), GivesScores(), bs.ReferenceExecutor()), TypeError, "GivesScores must give a BlockMask, and gave a BlockScores"),
        ((bs.Identity(), bs.NoScorer(16), bs.TopK(1), GivesATensor()), TypeError, "GivesATensor must give an AttentionOutput, and gave a Tensor"),
    ],
)  # fmt: skip
def test_a_stage_that_breaks_its_promise(stages_: tuple[Any, ...], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        bs.Pipeline(*stages_)(Q, K, V)


def test_gpu_maps_must_lie_with_the_keys() -> None:
    if not GPU:
        pytest.skip("needs a GPU")
    with pytest.raises(ValueError, match="'k_index' must be on the device of q and k"):
        grid(bs.GlobalPermutation(order(1, 2, 1, 64)), Q.cuda(), K.cuda())
