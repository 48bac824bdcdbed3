"""flash-attn-4 over our lists: equal to the reference where it is installed, every reason why not elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from blocksparse.execute import packages as flash_attention_4
from blocksparse.execute.packages import not_importable
from blocksparse.testing import assert_within_budget, make_qkv
from tests.specs import asked, grid_of, not_none
from tests.stages import Shuffle

INSTALLED = not not_importable("flash_attn.cute", "flash-attn-4", "fa4")
RUNS = INSTALLED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10, 11)
needs_it = pytest.mark.skipif(not RUNS, reason="needs flash-attn-4 and a GPU that it has block-sparse kernels for")


def trace_of(
    permuter: bs.Permuter[Any],
    selector: bs.Selector[Any, Any],
    *,
    block: int = 128,
    causal: bool = True,
    **sizes: Any,
) -> bs.Trace[Any, Any, Any]:
    q, k, v = make_qkv(**sizes)
    pipeline: bs.Pipeline[Any, Any, Any] = bs.Pipeline(
        permuter, bs.MeanPoolScorer(block), selector, bs.ReferenceExecutor()
    )
    return pipeline.trace(q, k, v, causal=causal)


@pytest.mark.skipif(INSTALLED, reason="is installed")
def test_it_says_every_reason() -> None:
    trace = trace_of(bs.Identity(), bs.TopK(2), N=256)
    reasons = bs.FlashAttention4Executor().unsupported(trace.q, trace.k, trace.v, trace.mask, asked(trace.mask))
    assert reasons == [
        "flash-attn-4 is not installed (pip install -e '.[fa4]' in a checkout)",
        "the kernel takes float16 and bfloat16, not torch.float32",
        "the kernel is for NVIDIA GPUs, and these tensors are on cpu",
    ]
    with pytest.raises(ValueError, match=r"NVIDIA GPUs.*Use AutoExecutor\(\), or TritonExecutor\(\)"):
        evolve(bs.mean_pooling(), executor=bs.FlashAttention4Executor())(trace.q, trace.k, trace.v)


@pytest.mark.parametrize(
    ("hopper", "dims", "blocks", "count"),
    [
        (True, (128, 128), (128, 128), 0),
        (True, (64, 96), (64, 64), 0),
        (True, (256, 64), (128, 80), 0),
        (True, (256, 256), (128, 128), 1),
        (True, (128, 128), (32, 128), 1),
        (True, (128, 128), (128, 256), 1),
        (True, (100, 100), (128, 24), 2),
        (False, (128, 128), (256, 128), 0),
        (False, (128, 128), (128, 128), 1),
        (False, (192, 128), (256, 64), 2),
    ],
)
def test_it_names_sizes_without_tiles(
    hopper: bool, dims: tuple[int, int], blocks: tuple[int, int], count: int
) -> None:
    q, k, _ = make_qkv(N=300)
    grid = grid_of(q, k, blocks[0], blocks[1])
    mask = bs.BlockMask(grid.visible.expand(grid.batch, grid.q_heads, -1, -1), grid)
    assert len(flash_attention_4._wrong_sizes(*dims, mask, hopper=hopper)) == count


def assert_equal(trace: bs.Trace[Any, Any, Any], mask: bs.BlockMask) -> None:
    """Output and lse of `mask` are the reference's, within the budget of the dtype."""

    def run(executor: bs.Executor[Any, Any], q: Tensor, k: Tensor, v: Tensor) -> bs.AttentionOutput:
        return executor(q, k, v, mask, asked(mask, trace.spec.scale))

    q, k, v = trace.q, trace.k, trace.v
    want = run(bs.ReferenceExecutor(), q.double(), k.double(), v.double())
    plain, got = run(bs.ReferenceExecutor(), q, k, v), run(bs.FlashAttention4Executor(), q, k, v)
    # The kernel rounds the weights to the dtype of the values, which the reference does not.
    budget = plain.out.double() + torch.finfo(got.out.dtype).eps * want.out.abs().amax()
    assert_within_budget(got.out, want.out, budget)
    torch.testing.assert_close(not_none(got.lse).double(), not_none(want.lse).double(), atol=2e-3, rtol=0)


@needs_it
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("sizes", [{"N": 512}, {"N": 700, "M": 300, "Hq": 6}, {"N": 321, "B": 2}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("permuter", [bs.Identity(), bs.SegmentKeySort(256), Shuffle()], ids=repr)
def test_it_equals_the_reference(permuter: bs.Permuter[Any], causal: bool, sizes: dict[str, Any]) -> None:
    sizes = sizes | {"D": 128, "dtype": torch.bfloat16, "device": "cuda"}
    trace = trace_of(permuter, bs.TopK(share=0.5) | bs.Random(0.2), causal=causal, **sizes)
    assert_equal(trace, trace.mask)


@needs_it
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("D", "block"), [(64, 128), (128, 64), (96, 128), (256, 64)])
def test_it_equals_the_reference_at_other_sizes(D: int, block: int) -> None:
    trace = trace_of(
        bs.Identity(), bs.TopK(share=0.5), block=block, N=600, D=D, dtype=torch.float16, device="cuda"
    )
    assert_equal(trace, trace.mask.share_heads())


@needs_it
@pytest.mark.filterwarnings("default")
def test_a_row_with_nothing_kept_is_zero() -> None:
    trace = trace_of(bs.Identity(), bs.Everything(), N=512, D=128, dtype=torch.bfloat16, device="cuda")
    keep = trace.mask.keep.expand(1, 4, -1, -1).clone()
    keep[:, 1, 2] = False
    mask = bs.BlockMask(keep, trace.mask.grid)
    assert_equal(trace, mask)
    got = bs.FlashAttention4Executor()(trace.q, trace.k, trace.v, mask, asked(mask, trace.spec.scale))
    assert bool((got.out[:, 1, 256:384] == 0).all())
