"""Bad input gets one clear sentence before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv

nan = float("nan")


def wrong(value: Any) -> Any:
    """What a type checker would refuse."""
    return value


def shaped(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "kind", "sentence"),
    [
        (shaped(4, 8, 16), shaped(1, 2, 8, 16), shaped(1, 2, 8, 16), ValueError, r"'q' must have the shape \[B, H, N, D\]: \(4, 8, 16\)"),
        (shaped(1, 4, 8, 16), shaped(1, 3, 8, 16), shaped(1, 3, 8, 16), ValueError, r"multiple of the KV heads \(3\): 4; do not repeat"),
        (shaped(1, 4, 9, 16), shaped(1, 2, 8, 16), shaped(1, 2, 8, 16), ValueError, "at least as many keys as queries.*Nq=9, Nk=8"),
        (shaped(1, 4, 8, 16), shaped(1, 2, 8, 16).half(), shaped(1, 2, 8, 16), TypeError, "one dtype: torch.float32, torch.float16"),
        (shaped(1, 4, 8, 16), shaped(1, 2, 8, 16, dtype=torch.int32), shaped(1, 2, 8, 16), TypeError, "'k' must be a floating-point tensor: torch.int32"),
        (shaped(1, 4, 8, 16), shaped(1, 2, 8, 16).to("meta"), shaped(1, 2, 8, 16), ValueError, "one device: cpu, meta, cpu"),
        (shaped(1, 4, 8, 257), shaped(1, 2, 8, 257), shaped(1, 2, 8, 257), ValueError, "head dim must be at most 256: 257"),
        (shaped(1, 4, 8, 16), shaped(1, 2, 8, 8), shaped(1, 2, 8, 8), ValueError, r"head dim of 'q' \(16\): 8"),
        (shaped(1, 4, 8, 16), shaped(1, 2, 8, 16), shaped(1, 2, 9, 16), ValueError, "heads and tokens of 'k'"),
        (shaped(2, 4, 8, 16), shaped(1, 2, 8, 16), shaped(1, 2, 8, 16), ValueError, "one batch size: 2, 1, 1"),
        (shaped(1, 4, 0, 16), shaped(1, 2, 8, 16), shaped(1, 2, 8, 16), ValueError, "'q' must not be empty"),
        ([[1.0]], shaped(1, 2, 8, 16), shaped(1, 2, 8, 16), TypeError, "'q' must be a tensor: list"),
    ],
)  # fmt: skip
def test_tensors(q: Any, k: Any, v: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        bs.pbs_attn()(q, k, v)


def test_gradients() -> None:
    q, k, v = make_qkv(N=16)
    with (
        torch.enable_grad(),
        pytest.raises(ValueError, match=r"no gradients: call it under torch.no_grad\(\), or detach"),
    ):
        bs.pbs_attn()(q.requires_grad_(), k, v)
    bs.pbs_attn(executor=bs.ReferenceExecutor())(q, k, v)  # under no_grad it is no matter


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        ({"attn_mask": torch.ones(16, 16)}, TypeError, "takes no attention mask, its selector makes one; slice padding off"),
        ({"causal": 1}, TypeError, "'causal' must be a bool: 1"),
        ({"scale": nan}, ValueError, "'scale' must be finite: nan"),
        ({"scale": "1"}, TypeError, "'scale' must be a number"),
        ({"dropout_p": 0.1}, TypeError, "dropout_p"),
        ({"is_causal": True}, TypeError, "is_causal"),
    ],
)  # fmt: skip
def test_arguments(arguments: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        bs.pbs_attn()(*make_qkv(N=16), **arguments)


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: bs.TopCdf(nan), ValueError, r"'mass' must be in \(0, 1\]: nan"),
        (lambda: bs.TopCdf(0.0), ValueError, r"'mass' must be in \(0, 1\]: 0.0"),
        (lambda: bs.TopCdf(1.5), ValueError, r"'mass' must be in \(0, 1\]: 1.5"),
        (lambda: bs.TopCdf([0.5, nan]), ValueError, r"'mass' must be in \(0, 1\]"),
        (lambda: bs.TopCdf(wrong("0.9")), TypeError, r"'mass' must be a number or a tensor \[Hq\]: '0.9'"),
        (lambda: bs.TopCdf(True), TypeError, "'mass' must be a number"),
        (lambda: bs.Threshold(nan), ValueError, "'value' must be a number, not NaN: nan"),
        (lambda: bs.TopK(0), ValueError, "'k' must be > 0: 0"),
        (lambda: bs.TopK(share=0.0), ValueError, r"'share' must be in \(0, 1\]"),
        (lambda: bs.TopK(), ValueError, "'TopK' takes either 'k' or 'share'"),
        (lambda: bs.TopK(2, share=0.5), ValueError, "'TopK' takes either 'k' or 'share'"),
        (lambda: bs.SegmentKeySort(0), ValueError, "'S' must be > 0: 0"),
        (lambda: bs.SegmentKeySort(wrong(2.5)), TypeError, "'S' must be <class 'int'>"),
        (lambda: bs.SegmentKeySort(256, probe=-1), ValueError, "'probe' must be > 0: -1"),
        (lambda: bs.MeanPoolScorer(0), ValueError, "'block' must be > 0: 0"),
        (lambda: bs.MeanPoolScorer(128, segment=200), ValueError, r"'segment' must be a multiple of 'block' \(128\): 200"),
        (lambda: bs.pbs_attn(block=128, S=200), ValueError, r"'segment' must be a multiple of 'block' \(128\): 200"),
        (lambda: bs.Band(-1), ValueError, "'tokens' must be >= 0: -1"),
        (lambda: bs.Sink(0), ValueError, "'tokens' must be > 0: 0"),
        (lambda: bs.Refined(bs.Everything(), 0), ValueError, "'n' must be > 0: 0"),
        (lambda: bs.Refined(bs.Everything(), 2, rescue=wrong(bs.TopK(3))), TypeError, "'rescue' must be .*PositionSelector"),
        (lambda: bs.Pipeline(wrong(bs.TopCdf(0.9)), bs.MeanPoolScorer(), bs.TopCdf(0.9), bs.ReferenceExecutor()), TypeError, "'permuter' must be .*Permuter"),
        (lambda: bs.Permutation(torch.zeros(1, 1, 4)), ValueError, r"'k_index' must have the shape \[B, H, G, N\]: \(1, 1, 4\)"),
        (lambda: bs.Permutation(torch.zeros(1, 1, 2, 4)), ValueError, "'group' must be given for more than one key map: G=2"),
        (lambda: bs.GlobalPermutation(group=64), ValueError, "'group' must be None: one map serves every query: 64"),
    ],
)  # fmt: skip
def test_stages(make: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        make()


def test_per_head_values_need_one_entry_per_head() -> None:
    with pytest.raises(ValueError, match=r"one entry per query head \(4\): 3"):
        bs.mean_pooling([0.5, 0.6, 0.7])(*make_qkv(N=16))


def test_refine_needs_a_divisor() -> None:
    selector = bs.Refined(bs.Everything(), 3)
    with pytest.raises(ValueError, match=r"'n' must divide both blocks \(16 x 16\): 3"):
        bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), selector, bs.ReferenceExecutor())(*make_qkv(N=40))


def test_masks_of_different_grids_do_not_mix() -> None:
    q, k, _ = make_qkv(N=64)
    masks = [
        bs.Everything()(bs.MeanPoolScorer(block)(q, k, bs.GlobalPermutation(), causal=True, scale=1.0))
        for block in (16, 32)
    ]
    with pytest.raises(ValueError, match=r"masks must share a grid: .*refine\(\) the coarser one"):
        masks[0] | masks[1]


def test_a_frozen_object_is_its_configuration() -> None:
    both = (bs.TopCdf(0.5) | bs.Sink(4)) & bs.TopK(3)
    pipeline = bs.Pipeline(bs.SegmentKeySort(64), bs.MeanPoolScorer(32, segment=64), both, bs.ReferenceExecutor())
    again = eval(repr(pipeline), vars(bs))
    assert repr(again) == repr(pipeline)
    inputs = make_qkv(N=200)
    assert torch.equal(pipeline(*inputs), again(*inputs))
    for preset in every_preset.values():
        assert repr(eval(repr(preset()), vars(bs))) == repr(preset())
    with pytest.raises(AttributeError):
        pipeline.selector = bs.Everything()  # type: ignore[misc]
