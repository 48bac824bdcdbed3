"""How tensors lie in memory changes no bit: of q, k and v, and of what stages of your own hand over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests import stages
from tests.layouts import LAYOUTS
from tests.meaning import assert_same_bits
from tests.on_kernels import pretend_gpu
from tests.specs import asked, grid_of

# One for each way in which a kernel may take a wrong step: along a row, from row to row, from head to head.
THREE = ("head dim not innermost", "every second token", "one head expanded")
SIZES: dict[str, Any] = {"B": 2, "Hq": 2, "Hkv": 2, "N": 20, "D": 16}


# References in plain torch are quick, kernels that are interpreted slow.
in_torch_and_kernels = pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])


@pytest.fixture
def _on_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    callspec = request.node.callspec.params
    if callspec.get("kernels", True):
        pretend_gpu(monkeypatch)


def contiguous(*tensors: Tensor) -> Any:
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


@pytest.mark.slow
@pytest.mark.usefixtures("_on_kernels")
@pytest.mark.parametrize(
    ("moved", "layout"),
    [*(("keys", layout) for layout in LAYOUTS), *(("queries", layout) for layout in THREE)],
)
@pytest.mark.parametrize(
    "executor",
    [bs.ReferenceExecutor(), bs.TritonExecutor(), bs.GatherExecutor(0.1), bs.Int8Executor(False)],
    ids=stages.name,
)
def test_executors(executor: bs.Executor[Any, Any], layout: str, moved: str, device: str) -> None:
    q, k, v = (LAYOUTS[layout](x) for x in make_qkv(**SIZES, M=18, device=device))
    shuffled = stages.Shuffle()(q, k, bs.AttentionSpec(scale=0.25))
    permutation = bs.GlobalPermutation(**{name: getattr(shuffled, name) for name in (f"{moved[0]}_index",)})
    grid = grid_of(q, k, 16, permutation=permutation)
    keep = (torch.rand(2, 2, grid.rows, grid.cols) < 0.7).to(device) & grid.visible
    mask = bs.RankedBlockMask(keep, grid, torch.zeros_like(keep, dtype=torch.int32))
    in_rows = contiguous(q, k, v)
    want = executor(in_rows[0], in_rows[1], in_rows[2], mask, asked(mask, 0.25))
    assert_same_bits(executor(q, k, v, mask, asked(mask, 0.25)), want)


INDEX_LAYOUTS: dict[str, Any] = {
    "transposed": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "heads innermost": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one batch entry expanded": lambda x: x[:1].expand(x.shape),
    "one head expanded": lambda x: x[:, :1].expand(x.shape),
    "offset by one element": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


@pytest.mark.usefixtures("_on_kernels")
@in_torch_and_kernels
@pytest.mark.parametrize(
    "layout", [x if x == "heads innermost" else pytest.param(x, marks=pytest.mark.slow) for x in INDEX_LAYOUTS]
)
@pytest.mark.parametrize(
    "executor", [bs.ReferenceExecutor(), bs.TritonExecutor(), bs.GatherExecutor(0.1)], ids=stages.name
)
def test_orders(executor: bs.Executor[Any, Any], layout: str, kernels: bool, device: str) -> None:
    """The grid, scores and outputs of maps that lie in any way; lengths of whole blocks, which nobody pads."""
    q, k, v = make_qkv(B=2, Hq=2, Hkv=2, N=32, D=16, device=device)
    shuffled = stages.Shuffle()(q, k, bs.AttentionSpec(scale=0.25))
    assert shuffled.k_index is not None
    k_index, q_index = (INDEX_LAYOUTS[layout](x) for x in (shuffled.k_index[:, :, 0], shuffled.q_index))
    given = bs.GlobalPermutation(k_index.unsqueeze(2), q_index)
    in_rows, q_in_rows = contiguous(k_index, q_index)
    plain = bs.GlobalPermutation(in_rows.unsqueeze(2), q_in_rows)
    outputs = []
    for permutation in (given, plain):
        scores = bs.MeanPoolScorer(16)(q, k, permutation, bs.AttentionSpec(scale=0.25))
        mask = bs.Ranked(bs.TopK(1))(scores)
        outputs.append((scores.values, mask.keep, executor(q, k, v, mask, asked(mask, 0.25))))
    for got, want in zip(*(x[:2] for x in outputs), strict=True):
        assert torch.equal(got, want)
    assert_same_bits(outputs[0][2], outputs[1][2])


IN_ALL_LAYOUTS = bs.TopCdf(torch.tensor([0.3, 9.0, 0.6, 9.0])[::2]) | bs.Sink(1)
IN_THREE = (
    bs.TopK(1),
    bs.TopK(share=torch.tensor([0.5, 0.2]).expand(2)),
    bs.Threshold(0.5) & bs.Band(8),
    bs.GlobalTopCdf(0.5),
    bs.Refined(bs.SharedByGroup(bs.TopCdf(0.3)), 2) | bs.OnTiles(bs.Band(4), 2),
    bs.Ranked(bs.TopCdf(0.3)),
)


@pytest.mark.slow
@pytest.mark.usefixtures("_on_kernels")
@in_torch_and_kernels
@pytest.mark.parametrize(
    ("selector", "layout"),
    [
        *(pytest.param(IN_ALL_LAYOUTS, layout, id=f"first-{layout}") for layout in LAYOUTS),
        *(pytest.param(x, layout, id=f"{stages.name(x)}-{layout}") for x in IN_THREE for layout in THREE),
    ],
)
def test_scores(selector: bs.Selector[Any, Any], layout: str, kernels: bool, device: str) -> None:
    """Values and forced blocks that lie in any way."""
    q, k, _ = make_qkv(**SIZES, device=device)
    grid = grid_of(q, k, 4)
    values = LAYOUTS[layout](torch.rand(2, 2, grid.rows, grid.cols).to(device))
    forced = LAYOUTS[layout]((torch.rand(2, 2, grid.rows, grid.cols) < 0.2).to(device))
    got = selector(bs.BlockMass(values, grid, forced))
    in_rows = contiguous(values, forced)
    want = selector(bs.BlockMass(in_rows[0], grid, in_rows[1]))
    assert torch.equal(got.keep, want.keep)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_masks_join_from_any_place_in_memory(offset: int, device: str) -> None:
    """Rows of whole eights, which are joined as numbers of 64 bits, from memory that begins at an odd place."""
    q, k, _ = make_qkv(B=1, Hq=2, Hkv=1, N=64, D=16, device=device)
    grid = grid_of(q, k, 8)
    memory = (torch.rand(2, 128 + offset) < 0.5).to(device)
    mine, its = (bs.BlockMask(x[offset:].view(1, 2, 8, 8), grid) for x in memory)
    assert torch.equal((mine | its).keep, mine.keep | its.keep)
    assert torch.equal((mine & its).keep, mine.keep & its.keep)
