"""BFLA against the authors' code; its scorer and its rescues against what the paper says of them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from tests.papers.golden_cases import cases, differing, load
from tests.papers.golden_inputs import Golden
from tests.specs import grid_of
from torch import Tensor

import blocksparse as bs
from blocksparse.presets.text import bfla
from blocksparse.score.strided import FlattenMaxPoolScorer
from blocksparse.select.positions import Random, Stride, counter_hash
from blocksparse.testing import make_qkv

BFLA = cases("bfla")
TILE = 32  # of the released kernel

Choice = tuple[bs.BlockMass, bs.BlockMask]
Preset = bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask]


def preset(case: Golden, **changed: Any) -> Preset:
    params = case.params
    arguments = {
        "block": params["mask_block_n"],
        "tile": TILE,
        "n_local_tiles": params["local_blocks"],
        "eta": params.get("spec_stride"),
        "rho": params.get("spec_prob"),
        "seed": params.get("spec_seed", 1),
    }
    return bfla(params["keep_mass"], **{**arguments, **changed}, executor=bs.ReferenceExecutor())


def choose(pipeline: Preset, q: Tensor, k: Tensor, *, causal: bool = True) -> Choice:
    """What a pipeline does before it attends."""
    scale = q.shape[-1] ** -0.5
    permutation = pipeline.permuter(q, k, bs.AttentionSpec(scale=scale, causal=causal))
    scores = pipeline.scorer(q, k, permutation, bs.AttentionSpec(scale=scale, causal=causal))
    return scores, pipeline.selector(scores)


def score(
    scorer: FlattenMaxPoolScorer, q: Tensor, k: Tensor, *, causal: bool = True, scale: float = 1.0
) -> Tensor:
    return scorer(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=scale, causal=causal)).values


def positions(rule: bs.PositionSelector, N: int, M: int | None = None, *, block: int = 16, **sizes: int) -> Tensor:
    """What a rule keeps of itself, without diagonal and reach, one entry per query head, `[Hq, rows, cols]`."""
    Hq, Hkv = sizes.get("Hq", 1), sizes.get("Hkv", 1)
    q, k = torch.empty(1, Hq, N if M is None else M, 0), torch.empty(1, Hkv, N, 0)
    grid = grid_of(q, k, block)
    return rule.where(grid).expand(1, Hq, grid.rows, grid.cols)[0]


# The authors' code


@pytest.mark.parametrize("name", BFLA)
def test_bfla_mask(name: str) -> None:
    case = load(name)
    scores, mask = choose(preset(case, as_released=True), case.q, case.k)
    assert differing(mask, case).tolist() == []
    torch.testing.assert_close(scores.values, torch.from_numpy(case.arrays["scores"]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BFLA)
def test_bfla_default_rescues_tiles(name: str) -> None:
    """What the mass keeps is the same; around it the released code rescues coarse blocks, we rescue tiles."""
    case = load(name)
    alone = {"eta": None, "rho": None}
    _, released = choose(preset(case, as_released=True, **alone), case.q, case.k)
    _, coarse = choose(preset(case, coarse_rescue=True, **alone), case.q, case.k)
    _, ours = choose(preset(case, **alone), case.q, case.k)
    assert torch.equal(coarse.keep, released.keep)  # no padded group wins in these cases
    assert bool((ours.keep <= released.keep).all())
    assert not torch.equal(ours.keep, released.keep)


def test_bfla_released_stride_and_random_are_counted_in_the_chunk() -> None:
    """Rows of the released rules start anew with every chunk, those of ours do not."""
    for rule in (Stride(5, 3), Random(0.3, 3)):
        whole, chunk = positions(rule, 320), positions(rule, 320, 160)
        assert torch.equal(chunk, whole[:, 10:])
        released = attrs.evolve(rule, released=True)
        assert torch.equal(positions(released, 320, 160), positions(released, 320)[:, :10])


# The scorer


def best_pairs(q: Tensor, k: Tensor, *, block: int, g: int, causal: bool, mean: bool) -> Tensor:
    """The definition, place by place, in float64: the best pair of groups of a block, `[B, Hq, rows, cols]`."""
    (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
    offset = N - M if causal else 0
    first, last = offset // block, (offset + M - 1) // block
    logits = q.double() @ k.double().repeat_interleave(Hq // Hkv, dim=1).transpose(-1, -2)
    best = torch.full((B, Hq, last - first + 1, (N - 1) // block + 1), float("-inf"), dtype=torch.float64)
    for u in range(first * block, (last + 1) * block, g):
        for v in range(0, N, g):
            places = [t for t in range(g) if offset <= u + t < offset + M and v + t < N]
            if places:
                pair = torch.stack([logits[:, :, u + t - offset, v + t] for t in places]).sum(0)
                at = best[:, :, u // block - first, v // block]
                at.copy_(torch.maximum(at, pair / len(places) if mean else pair))
    if causal:
        row_end = torch.arange(first + 1, last + 2) * block
        best[:, :, torch.arange(best.shape[3]) * block >= row_end.clamp_max(N).unsqueeze(1)] = float("-inf")
    return best


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("N", "M"), [(256, 256), (200, 200), (321, 1), (290, 100), (65, 64)])
@pytest.mark.parametrize("g", [16, 32, 64])
def test_scores_are_the_best_pair_of_groups(g: int, N: int, M: int, causal: bool, per_token: bool) -> None:
    """At any alignment of the chunk and any tail; short groups are compared over the tokens that are there."""
    q, k, _ = make_qkv(B=2, N=N, M=M, D=16, Hq=6, Hkv=2, dtype=torch.float64)
    want = (0.05 * best_pairs(q, k, block=64, g=g, causal=causal, mean=per_token)).softmax(-1)
    got = score(FlattenMaxPoolScorer(64, g, per_token=per_token), q, k, causal=causal, scale=0.05)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("M", [264, 224, 3])
def test_groups_without_a_token_never_win(M: int) -> None:
    """All products are negative: a group of zeros would be the best of its block, and is in the released code."""
    N = 4 * 64 + 8  # the last block holds one short group and three empty ones
    nearness = torch.tensor([-1.0, -0.5, -2.0, -0.5, -1.0]).repeat_interleave(64)[:N]
    q, k = torch.ones(1, 2, M, 1), nearness.view(1, 1, N, 1)
    scorer = FlattenMaxPoolScorer(64, 16, per_token=True)
    ours, padded = (attrs.evolve(scorer, padded_tail=x) for x in (False, True))
    worth = nearness[::64].softmax(0)
    torch.testing.assert_close(score(ours, q, k)[0, 0, -1], worth)  # empty groups of queries
    torch.testing.assert_close(score(padded, q, k)[0, 0, -1], torch.full((5,), 0.2))
    if M >= 64:  # empty groups of keys
        torch.testing.assert_close(score(ours, q, k, causal=False)[0, 0, 0], worth)
        assert float(score(padded, q, k, causal=False)[0, 0, 0].argmax()) == 4
        chosen = bs.TopCdf(0.5)(ours(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0)))
        assert chosen.keep[0, 0, -1].tolist() == [False, True, False, True, True]  # and the diagonal


@pytest.mark.parametrize("k_block", [16, 64, 96])
def test_no_row_looks_past_its_own_queries(k_block: int) -> None:
    """Also where key blocks are wider than query blocks."""
    q, k, _ = make_qkv(N=192, D=16)
    other, t = make_qkv(N=192, D=16, seed=1), 96
    changed = [torch.cat((x[:, :, :t], y[:, :, t:]), dim=2) for x, y in zip((q, k), other, strict=False)]
    scorer = FlattenMaxPoolScorer(32, 16, k_block=k_block, per_token=True)
    assert torch.equal(score(scorer, q, k)[:, :, :3], score(scorer, *changed)[:, :, :3])
    assert not torch.equal(score(scorer, q, k)[:, :, 3:], score(scorer, *changed)[:, :, 3:])


# The rescues


def test_hash_is_the_documented_function(device: str) -> None:
    """Python's unbounded integers give the same bits as int64 tensors, on every device."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B9) % 2**32
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    axes = [0, 1, 2, 7], [0, 3, 4095], [0, 1, 65535, 2**32 - 1]
    h, i, j = (torch.tensor(axis, device=device) for axis in axes)
    for seed in (0, 1, 2**32 - 1):
        want = [
            [[mix(mix(c) ^ mix(mix(b) ^ mix(mix(a) ^ mix(seed)))) for c in axes[2]] for b in axes[1]]
            for a in axes[0]
        ]
        assert counter_hash(seed, h[:, None, None], i[:, None], j).tolist() == want


def assert_rate(kept: Tensor, rate: float, dims: int | tuple[int, ...]) -> None:
    """Shares over `dims` are within five standard deviations of what independent draws of `rate` give."""
    share = kept.double().mean(dims)
    count = kept.numel() / share.numel()
    assert float((share - rate).abs().max()) <= 5 * (rate * (1 - rate) / count) ** 0.5


@pytest.mark.parametrize("rho", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_is_independent_along_every_axis(seed: int, rho: float) -> None:
    """Shares of every row, column and head, and of pairs at any small distance."""
    kept = positions(Random(rho, seed), 16 * 512, Hq=4, Hkv=4)
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        assert_rate(kept, rho, dims)
    for distance in (1, 2, 8, 81):
        assert_rate(kept[:, :, distance:] & kept[:, :, :-distance], rho**2, (0, 1, 2))
        assert_rate(kept[:, distance:] & kept[:, :-distance], rho**2, (0, 1, 2))
    assert_rate(kept[1:] & kept[:-1], rho**2, (0, 1, 2))
    assert_rate(kept & positions(Random(rho, seed + 1), 16 * 512, Hq=4, Hkv=4), rho**2, (0, 1, 2))


def test_query_heads_of_a_group_draw_alike() -> None:
    """So one mask per KV head keeps the rate, which a union of independent draws would not."""
    q, k, _ = make_qkv(B=2, Hq=8, Hkv=2, N=4096, D=1)
    scores = bs.NoScorer(16)(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0))
    mask = bs.SharedByGroup(Random(0.1))(scores)
    below = mask.grid.visible[0, 0] & ~mask.grid.diagonal[0, 0]
    assert mask.keep.shape == (2, 2, 256, 256)
    assert torch.equal(mask.keep[0], mask.keep[1])
    assert_rate(mask.keep[0][:, below], 0.1, 1)
    assert_rate((mask.keep[0, 0] & mask.keep[0, 1])[below], 0.01, 0)


def test_random_bounds_and_rates_per_head() -> None:
    assert not bool(positions(Random(0.0), 640).any())
    assert bool(positions(Random(1.0), 640).all())
    rates = Random([0.0, 0.2, 0.6, 1.0])
    kept = positions(rates, 640, Hq=4, Hkv=1)
    assert bool((kept[:-1] <= kept[1:]).all())
    assert torch.equal(kept[1], positions(Random(0.2), 640)[0])
    with pytest.raises(ValueError, match=r"one entry per query head \(2\): 4"):
        positions(rates, 64, Hq=2, Hkv=1)


@pytest.mark.parametrize("eta", [1, 2, 16, 17, 34, 131])
def test_stride_keeps_one_of_eta(eta: int) -> None:
    """Exactly, along a row; and each column in one row of eta, also where eta shares factors with 17 or 131."""
    kept = positions(Stride(eta), 16 * 1024)[0]
    assert bool((kept[:, :eta].sum(1) == 1).all())
    assert torch.equal(kept[:, eta:], kept[:, :-eta])
    assert_rate(kept, 1 / eta, 0)
    assert_rate((kept[1:] & kept[:-1]).any(1), 1 / eta, 0)  # two rows start alike
    if eta > 1:
        gaps = torch.cat([column.nonzero()[:, 0].diff() for column in kept[:, :16].T]).double()
        assert float((gaps.mean() - eta).abs()) < 5 * eta / len(gaps) ** 0.5
        assert float(gaps.max()) > 2 * eta  # geometric: no pattern along a column
        assert not torch.equal(kept, positions(Stride(eta, 1), 16 * 1024)[0])


# The preset


@pytest.mark.parametrize("coarse", [False, True])
def test_band_covers_the_whole_query_block(coarse: bool) -> None:
    """At every offset of the chunk; the released band ends at the first query's block."""
    q, k, _ = make_qkv(N=192, D=16, Hq=2, Hkv=1)
    pipeline = bfla(0.01, block=64, g=16, tile=16, n_local=40, eta=None, coarse_rescue=coarse)
    position = torch.arange(192)
    for start in range(0, 192, 5):
        _, mask = choose(pipeline, q[:, :, start:], k)
        for row in range(mask.grid.rows):
            query = mask.queries(row)[0, 0] + start
            distance = query.unsqueeze(1) - position
            assert bool(mask.pairs(row)[0, 0][(distance >= 0) & (distance <= 40)].all())
            assert bool(mask.pairs(row)[0, 0][:, :16].logical_or(distance[:, :16] < 0).all())


def test_rescue_is_on_tiles_or_on_blocks() -> None:
    q, k, _ = make_qkv(N=1024, D=16)
    rescue: dict[str, Any] = {"block": 128, "g": 32, "tile": 32, "n_local": 0, "eta": 4, "rho": 0.1, "seed": 3}
    plain: dict[str, Any] = {**rescue, "eta": None, "rho": None}
    for coarse in (False, True):
        _, without = choose(bfla(0.5, **plain, coarse_rescue=coarse), q, k)
        _, mask = choose(bfla(0.5, **rescue, coarse_rescue=coarse), q, k)
        below = mask.grid.visible[0, 0] & ~mask.grid.diagonal[0, 0]
        block = 128 if coarse else 32
        rule = positions(Stride(4, 3), 1024, block=block) | positions(
            Random(0.1, 3), 1024, block=block, Hkv=2, Hq=2
        )
        n = block // 32
        rule = rule.repeat_interleave(n, -1).repeat_interleave(n, -2)
        assert torch.equal((mask.keep & below), (without.keep | rule) & below)
        assert mask.grid.q_block == mask.grid.k_block == 32


def test_mask_is_shared_by_group_and_bounded() -> None:
    q, k, _ = make_qkv(B=2, N=500, M=300, D=16, Hq=6, Hkv=2)
    plain: dict[str, Any] = {"block": 64, "g": 16, "tile": 16, "n_local": 0, "eta": None, "per_token": True}
    scores, mask = choose(bfla(0.6, **plain), q, k)
    union = bs.TopCdf(0.6)(scores).keep.unflatten(1, (2, 3)).any(2)
    fine = union.repeat_interleave(4, -1).repeat_interleave(4, -2)[:, :, 200 % 64 // 16 :][..., : mask.grid.cols]
    fine = fine[:, :, : mask.grid.rows] & mask.grid.visible
    sink = mask.grid.holding_first(32)
    assert torch.equal(mask.keep, fine | sink | mask.grid.diagonal)
    _, dense = choose(bfla(1.0, **plain), q, k)
    assert torch.equal(dense.keep, dense.grid.visible.expand_as(dense.keep))


def test_local_band_in_tokens_or_tiles() -> None:
    assert bfla(n_local_tiles=3, tile=16) == bfla(n_local=48, tile=16) != bfla(tile=16)
    assert bfla() == bfla(n_local=256)


def test_released_band_has_at_least_one_block() -> None:
    q, k, _ = make_qkv(N=256, D=16)
    sizes: dict[str, Any] = {"block": 64, "g": 16, "tile": 16, "n_local": 0, "eta": None}
    for as_released in (False, True):
        _, mask = choose(bfla(0.01, **sizes, coarse_rescue=True, as_released=as_released), q, k)
        before = mask.keep[:, :, 12:, 8:12]
        assert bool(before.all()) == as_released
