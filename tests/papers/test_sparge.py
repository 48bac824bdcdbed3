"""SpargeAttn against the authors' code, and its stages against their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.papers.golden_cases import cases, load
from tests.papers.golden_inputs import Golden
from tests.specs import grid_of, not_none
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.score import block_mean
from blocksparse.kernels.score.block_mean import block_similarity
from blocksparse.presets.video import sparge
from blocksparse.score import combined as similarity_gated
from blocksparse.score.combined import SimilarityGatedScorer
from blocksparse.score.strided import AntidiagonalScorer, FlattenMaxPoolScorer
from blocksparse.testing import make_qkv

MAPS = cases("sparge")
EXAMPLE = "spargeex_01_n512_d64"  # the authors' Triton example: its caller smooths the keys; scores in fp16
INNER: tuple[bs.Scorer[bs.GlobalPermutation, bs.BlockMass], ...] = (
    bs.MeanPoolScorer(32, k_block=16),
    bs.MeanPoolScorer(16, k_block=32),
    bs.MeanPoolScorer(16),
    AntidiagonalScorer(4, block=16),
    FlattenMaxPoolScorer(16, 8, per_token=True),
)
each_inner = pytest.mark.parametrize("inner", INNER, ids=repr)
Trace = bs.Trace[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask]


def smooths(case: Golden) -> bool:
    """Whether keys were smoothed: in the fused function of the public API, and before the example's."""
    return bool(case.params.get("smooth_k", case.config["case"] == EXAMPLE))


def run(case: Golden, *, as_released: bool) -> Trace:
    params = case.params
    mass, theta, executor = params.get("cdfthreshd"), params["simthreshd1"], bs.ReferenceExecutor()
    blocks: Any = {"block": params["BLKQ"], "k_block": params["BLKK"], "attention_sink": False}
    how: Any = {"share": params.get("topk"), "smooth_k": smooths(case), "as_released": as_released}
    pipeline = sparge(mass, theta, **blocks, **how, executor=executor)
    return pipeline.trace(case.q, case.k, case.v, causal=params["is_causal"])


def golden(case: Golden, name: str) -> Tensor:
    return torch.from_numpy(case.arrays[name])


@pytest.mark.parametrize("name", [*MAPS, EXAMPLE])
def test_mask_and_scores(name: str) -> None:
    """Theirs, and the diagonal where causal, which their code may lose. No block of ours needs its fragility.

    Our masses, as shares of what similar key blocks hold, are their softmax over similar key blocks.
    """
    case = load(name)
    trace = run(case, as_released=True)
    assert torch.equal(trace.mask.keep, golden(case, "mask") | trace.mask.grid.diagonal)
    values = trace.scores.values
    ours = values / values.sum(-1, keepdim=True)
    atol = 1e-3 if name == EXAMPLE else 2e-6
    torch.testing.assert_close(ours, golden(case, "scores").float(), rtol=0, atol=atol, equal_nan=True)
    assert bool(values.isfinite().all())  # their softmax is NaN in rows without a similar key block; ours never
    if name == EXAMPLE:  # whose kernel has int8 logits and adds in fp16; ours is exact
        error = (trace.output.out[:, :, golden(case, "out_rows")] - golden(case, "out").float()).abs()
        assert float(error.max()) < 0.08
        assert float(error.mean()) < 0.004


@pytest.mark.parametrize("name", MAPS)
def test_similar_blocks(name: str) -> None:
    """Their flags and pooled tokens. A partial last block is never similar to them."""
    case = load(name)
    sides = ((case.q, case.params["BLKQ"], False, "q"), (case.k, case.params["BLKK"], smooths(case), "k"))
    for x, block, centred, side in sides:
        similarity = block_similarity(x, block, centred=centred).repeat_interleave(4 // x.shape[1], dim=1)
        flag = similarity > case.params["simthreshd1"]
        if x.shape[2] % block:
            flag[..., -1] = False
        assert torch.equal(flag, golden(case, f"sim_{side}"))
        centre = x.mean(2, keepdim=True) if centred else torch.zeros(())
        pooled = block_mean.block_mean(x - centre, block).repeat_interleave(4 // x.shape[1], dim=1)
        torch.testing.assert_close(pooled, golden(case, f"pool_{side}"), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", MAPS)
def test_default_differs_where_it_says(name: str) -> None:
    """Keys smoothed alike, only a tail and the base of `topk` make a difference."""
    case = load(name)
    ours, theirs = run(case, as_released=False), run(case, as_released=True)
    keep, released = ours.mask.keep, theirs.mask.keep
    if "topk" not in case.params:
        whole = case.q.shape[2] // case.params["BLKQ"]
        assert torch.equal(keep[:, :, :whole], released[:, :, :whole])  # no whole row reaches the last column
        assert bool((keep <= released).all())  # the last row was dense
        assert torch.equal(keep, released) == (case.q.shape[2] % case.params["BLKK"] == 0)
        return
    share, visible = case.params["topk"], ours.mask.grid.visible.sum(-1)
    expected = (share * visible).ceil() if case.params["is_causal"] else torch.tensor(3.0)  # .3 of 8, rounded up
    counted = keep & ~ours.mask.grid.diagonal
    assert bool((counted.sum(-1) <= expected).all())
    assert bool((keep.sum(-1) >= expected).all())
    assert bool((keep <= released).all()) == case.params["is_causal"]


def pairwise(x: Tensor, block: int, lead: int) -> Tensor:
    """The definition, all pairs in float64; a token of zeros has the cosine 0 with every token."""
    N = x.shape[2]
    similarity = []
    for j in range(-(-(lead + N) // block)):
        tokens = x[:, :, max(j * block - lead, 0) : (j + 1) * block - lead].double()
        length = tokens.norm(dim=-1)
        cosine = (tokens @ tokens.mT / (length.unsqueeze(-1) * length.unsqueeze(-2))).nan_to_num(0.0)
        similarity.append(cosine.mean((-1, -2)))
    return torch.stack(similarity, dim=-1)


@pytest.mark.parametrize(("N", "lead"), [(37, 0), (37, 3), (32, 0), (5, 3), (5, 6), (1, 15), (33, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_self_similarity_is_the_mean_pairwise_cosine(N: int, lead: int, dtype: torch.dtype) -> None:
    x = make_qkv(B=2, Hq=2, N=N, D=8)[0].to(dtype)
    x[:, :, 0] = 0
    got = block_similarity(x, 16, lead=lead)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), pairwise(x, 16, lead), rtol=0, atol=1e-6)


def gate(inner: bs.Scorer[bs.GlobalPermutation, bs.BlockMass], theta: Any, **fields: Any) -> SimilarityGatedScorer:
    return SimilarityGatedScorer(inner, theta, **fields)


def score(
    scorer: bs.Scorer[bs.GlobalPermutation, bs.BlockMass], q: Tensor, k: Tensor, *, causal: bool = True
) -> bs.BlockMass:
    return scorer(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=q.shape[-1] ** -0.5, causal=causal))


def test_the_threshold_is_strict() -> None:
    """A block of similarity 1/2 is not similar at theta 1/2, whichever side it is on."""
    half, whole = torch.eye(2).repeat(2, 1).view(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
    for q, k in ((half, whole), (whole, half)):
        for theta, forced in ((0.49, False), (0.5, True)):
            scores = score(gate(bs.MeanPoolScorer(2), theta, smooth_k=False), q, k, causal=False)
            assert bool((not_none(scores.forced) == forced).all())


@each_inner
@pytest.mark.parametrize("causal", [True, False])
def test_below_every_similarity_the_gate_is_open(
    inner: bs.Scorer[bs.GlobalPermutation, bs.BlockMass], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a number for each head similarities are measured, and of one number they are not."""
    q, k, _ = make_qkv(B=2, N=83, M=60, D=16)
    ours, plain = score(gate(inner, [-1] * q.shape[1]), q, k, causal=causal), score(inner, q, k, causal=causal)
    monkeypatch.delattr(similarity_gated, "block_similarity")
    unmeasured = score(gate(inner, -0.1), q, k, causal=causal)
    assert torch.equal(unmeasured.values, plain.values)
    if plain.forced is None:
        assert unmeasured.forced is None
    else:
        assert torch.equal(not_none(unmeasured.forced), plain.forced)
    assert torch.equal(ours.values, plain.values)
    assert ours.forced is not None
    forced = torch.zeros_like(ours.forced) if plain.forced is None else plain.forced & plain.grid.visible
    assert torch.equal(ours.forced, forced.expand_as(ours.forced))


@each_inner
@pytest.mark.parametrize("causal", [True, False])
def test_at_one_everything_is_kept(inner: bs.Scorer[bs.GlobalPermutation, bs.BlockMass], causal: bool) -> None:
    """Also for tokens that are all the same, whose similarity rounds to 1 or over it."""
    q, k, _ = make_qkv(B=2, N=83, M=60, D=16)
    for x, y in ((q, k), (torch.full_like(q, 0.3), torch.full_like(k, 0.3))):
        mask = bs.TopCdf(0.3, crossing=False)(score(gate(inner, 1), x, y, causal=causal))
        assert torch.equal(mask.keep, mask.grid.visible.expand_as(mask.keep))


@pytest.mark.parametrize(("M", "N"), [(129, 129), (100, 129), (37, 129), (129, 128), (3, 83), (1, 1)])
@pytest.mark.parametrize("causal", [True, False])
@each_inner
def test_gate_by_its_definition(
    inner: bs.Scorer[bs.GlobalPermutation, bs.BlockMass], M: int, N: int, causal: bool
) -> None:
    """Not similar: key blocks hold nothing and are forced for every row, query blocks force their row."""
    if causal and M > N:
        pytest.skip("causal queries are the last ones of the keys")
    q, k, _ = make_qkv(B=2, Hq=6, Hkv=2, M=M, N=N, D=16)
    theta = [0.35, 0.45, 0.55, 0.35, 0.45, 0.55]
    ours, plain = score(gate(inner, theta, smooth_k=False), q, k, causal=causal), score(inner, q, k, causal=causal)
    grid, least = ours.grid, torch.tensor(theta).view(1, 6, 1)
    similar_q = pairwise(q, grid.q_block, grid.q_lead) > least
    similar_k = pairwise(k, grid.k_block, 0).repeat_interleave(3, dim=1) > least
    forced = ~similar_q[..., :, None] | ~similar_k[..., None, :]
    if plain.forced is not None:
        forced = forced | plain.forced
    assert torch.equal(not_none(ours.forced), forced & grid.visible)
    assert torch.equal(ours.values, plain.values * similar_k[..., None, :])


@pytest.mark.parametrize("gap", [0.0, 60.0, 200.0])
def test_shares_are_the_softmax_over_similar_blocks(gap: float) -> None:
    """Also where a key block that is not similar outweighs the others by e^60; by e^200, only it is left."""
    logits = torch.tensor([0.0, 3.0, 1.0, -1.0])
    k = torch.zeros(1, 1, 64, 4)
    k[..., 0] = logits.repeat_interleave(16)
    k[..., 1] = 9.0
    k[:, :, :16, 0] = gap
    k[:, :, :16:2, 2], k[:, :, 1:16:2, 2] = 1e3, -1e3  # the mean is (gap, 9, 0, 0), the tokens are far from it
    q = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 64, 4)
    scores = gate(bs.MeanPoolScorer(16), 0.5, smooth_k=False)(
        q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0, causal=False)
    )
    assert not_none(scores.forced)[0, 0].tolist() == [[True, False, False, False]] * 4
    kept = bs.TopCdf(0.9, crossing=False)(scores).keep[0, 0]
    if gap == 200.0:
        assert bool((scores.values == 0).all())
        assert kept.tolist() == [[True, False, False, False]] * 4
        return
    share = scores.values[0, 0] / scores.values[0, 0].sum(-1, keepdim=True)
    torch.testing.assert_close(share[:, 1:], logits[1:].softmax(0).expand(4, 3), rtol=1e-5, atol=0)
    assert kept.tolist() == [[True, True, False, False]] * 4  # .867; .984 with the next


def test_smoothed_keys_see_the_whole_call() -> None:
    q, k, _ = make_qkv(N=256, D=16)
    k = k + 2.0
    later = k.clone()
    later[:, :, 192:] -= 8.0
    flags = {}
    for smooth_k in (True, False):
        before, after = (score(gate(bs.MeanPoolScorer(32), 0.5, smooth_k=smooth_k), q, x) for x in (k, later))
        flags[smooth_k] = torch.equal(not_none(before.forced)[:, :, :6], not_none(after.forced)[:, :, :6])
    assert flags == {True: False, False: True}
    for causal in (True, False):  # by default, keys are smoothed where every query sees all of them
        by_default = score(gate(bs.MeanPoolScorer(32), 0.5), q, k, causal=causal)
        asked = score(gate(bs.MeanPoolScorer(32), 0.5, smooth_k=not causal), q, k, causal=causal)
        assert torch.equal(not_none(by_default.forced), not_none(asked.forced))


def test_a_short_last_block_is_judged_by_its_tokens() -> None:
    """A lone last token is similar to itself; in the released code it is not, and its row is dense."""
    q, k, _ = make_qkv(N=257, D=16)
    q[:], k[:] = 1.0, 1.0
    for as_released in (False, True):
        pipeline = sparge(0.2, 0.5, block=32, k_block=16, smooth_k=False, as_released=as_released)
        scores = score(pipeline.scorer, q, k)
        assert scores.forced is not None
        assert bool((scores.forced[:, :, -1] == as_released).all())
        assert not bool(scores.forced[:, :, :-1].any())


def test_sink() -> None:
    q, k, v = make_qkv(N=256, D=16)
    for attention_sink in (False, True):
        pipeline = sparge(
            0.1, -1, block=32, k_block=16, attention_sink=attention_sink, executor=bs.ReferenceExecutor()
        )
        assert bool(pipeline.trace(q, k, v).mask.keep[..., 0].all()) == attention_sink


def rows_of(mask: bs.BlockMask) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask.keep[0, 0]]


def test_top_k_with_forced_blocks_on_top() -> None:
    q = torch.zeros(1, 1, 64, 8)
    grid = grid_of(q, q, 16, causal=False)
    values = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(1, 1, 4, 4)
    forced = torch.tensor([True, False, False, False]).expand(1, 1, 4, 4)
    for k, first, expected in ((1, True, [0]), (1, False, [0, 1]), (2, True, [0, 1]), (2, False, [0, 1, 2])):
        mask = bs.TopK(k, forced_first=first)(bs.BlockScores(values, grid, forced))
        assert rows_of(mask) == [expected] * 4
    mask = bs.TopK(share=0.5, forced_first=False)(bs.BlockScores(values, grid, None))
    assert rows_of(mask) == [[0, 1]] * 4


def test_top_k_shares() -> None:
    """Of what a causal row reaches, rounded up, or of all keys, rounded down; the diagonal on top of it."""
    q = torch.zeros(1, 1, 80, 8)
    grid = grid_of(q, q, 16)
    scores = bs.BlockScores(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]).expand(1, 1, 5, 5), grid)

    def shares(share: float, **fields: bool) -> list[list[int]]:
        return rows_of(bs.TopK(share=share, forced_first=False, **fields)(scores))

    assert shares(0.5) == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4]]
    assert shares(0.5, of_all_keys=True) == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert shares(0.1, of_all_keys=True) == [[0], [0, 1], [0, 2], [0, 3], [0, 4]]
    wide = torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 1600, 8)
    grid = bs.Grid.of(
        *wide, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0, causal=False), q_block=16, k_block=16
    )
    mask = bs.TopK(share=0.07)(bs.BlockScores(torch.zeros(1, 1, 1, 100), grid))
    assert int(mask.keep.sum()) == 7  # .07 * 100 is 7.000000000000001 in float64
