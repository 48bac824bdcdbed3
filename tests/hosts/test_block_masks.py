"""Masks that come from FlexAttention, and that go to it and to FlashInfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.specs import asked
from tests.stages import PLAIN
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import blocksparse as bs
from blocksparse.hosts.block_masks import from_flex, to_flash_attention_4, to_flashinfer, to_flex
from blocksparse.testing import make_qkv

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BLOCK = 16


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def every_other_block(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """In head 1 the other ones."""
    return (q // BLOCK + k // BLOCK + h) % 2 == 0


def causal_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return causal(b, h, q, k) & every_other_block(b, h, q, k)


def made(mask_mod: Any, heads: int | None = 2, M: int = 72, N: int = 72) -> FlexBlockMask:
    return create_block_mask(mask_mod, None, heads, M, N, device="cpu", BLOCK_SIZE=BLOCK)


@pytest.mark.parametrize(
    ("mask_mod", "is_causal", "heads"),
    [(causal, True, None), (every_other_block, False, 2), (causal_blocks, True, 2)],
)
def test_a_mask_of_flex_attention_runs_in_any_executor(mask_mod: Any, is_causal: bool, heads: int | None) -> None:
    """The tail is half a block."""
    q, k, v = make_qkv(B=2, Hq=2, Hkv=1, N=72, D=16)
    block_mask = made(mask_mod, heads)
    expected = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    mask = from_flex(block_mask, q, k, causal=is_causal)
    for executor in (bs.ReferenceExecutor(), bs.CpuExecutor()):
        out = executor(q, k, v, mask, asked(mask, 0.25)).out
        assert torch.allclose(out, expected, atol=1e-6)


def test_there_and_back() -> None:
    q, k, v = make_qkv(Hq=2, Hkv=1, N=72, D=16)
    for is_causal in (True, False):
        mask = PLAIN.trace(q, k, v, causal=is_causal).mask
        block_mask = to_flex(mask)
        assert torch.equal(from_flex(block_mask, q, k, causal=is_causal).keep, mask.keep)
        out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
        assert torch.allclose(out, PLAIN(q, k, v, causal=is_causal), atol=1e-6)


@pytest.mark.parametrize(
    ("mask_mod", "is_causal", "message"),
    [
        (causal, False, r"'block_mask' forbids query 0 and key 1 in head 0 of entry 0, .* Say causal=True, or"),
        (every_other_block, True, r"allows all pairs of block \(0, 0\) in head 0 of entry 0, .* Say causal=False"),
        (lambda b, h, q, k: (q >= k) & (q - k < 20), True, "forbids query 20 and key 0 .* Leave such rules to"),
        (lambda b, h, q, k: q // 24 == k // 24, False, "forbids query 0 and key 24"),
        (lambda b, h, q, k: q > k, True, "forbids query 0 and key 0"),
    ],
)
def test_rules_that_blocks_do_not_describe_are_refused(mask_mod: Any, is_causal: bool, message: str) -> None:
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=72, D=16)
    with pytest.raises(ValueError, match=message):
        from_flex(made(mask_mod), q, k, causal=is_causal)


def test_full_blocks_need_not_be_listed_apart() -> None:
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=72, D=16)
    whole = made(causal_blocks)
    both = whole.to_dense()
    lists = both.sum(-1, dtype=torch.int32), both.int().argsort(dim=-1, descending=True, stable=True).int()
    alone = FlexBlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=causal_blocks, seq_lengths=(72, 72))
    assert alone.full_kv_num_blocks is None
    expected = from_flex(whole, q, k, causal=True).keep
    assert torch.equal(from_flex(alone, q, k, causal=True).keep, expected)


def test_chunks_and_other_sizes() -> None:
    """PyTorch's causal rule counts queries from key 0, ours from the end."""
    q, k, v = make_qkv(Hq=2, Hkv=1, N=72, D=16)
    chunk = q[:, :, 32:]
    with pytest.raises(ValueError, match="forbids query 0 and key 1 "):
        from_flex(made(causal, M=40), chunk, k, causal=True)
    mask = from_flex(made(lambda b, h, q, k: q + 32 >= k, M=40), chunk, k, causal=True)
    out = bs.ReferenceExecutor()(chunk, k, v, mask, asked(mask, 0.25)).out
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(out, expected[:, :, 32:], atol=1e-6)
    with pytest.raises(ValueError, match=r"must start at a block of 16 tokens: they start at 33"):
        from_flex(made(lambda b, h, q, k: q + 33 >= k, M=39), q[:, :, 33:], k, causal=True)
    with pytest.raises(ValueError, match=r"made for \(B, Hq, M, N\) = \(1, 2, 72, 72\), .* \(1, 2, 40, 72\)"):
        from_flex(made(causal), chunk, k, causal=True)
    with pytest.raises(ValueError, match=r"\(1, 2, 72, 72\), and q and k have \(1, 4, 72, 72\)"):
        from_flex(made(causal), make_qkv(Hq=4, Hkv=1, N=72, D=16)[0], k, causal=True)


def attended(q: Tensor, k: Tensor, v: Tensor, blocks: Any, head: int) -> Tensor:
    """What FlashInfer's lists mean: all pairs of each listed block, for one head."""
    indptr, indices = blocks.lists(head)
    rows, cols = (size[head].tolist() for size in (blocks.block_row_sz, blocks.block_col_sz))
    keys = [torch.arange(n) + sum(cols[:j]) for j, n in enumerate(cols)]
    outputs = []
    for i, queries in enumerate(q.split(rows)):
        seen = torch.cat([keys[j] for j in indices[indptr[i] : indptr[i + 1]]])
        outputs.append((queries @ k[seen].T * 0.25).softmax(-1) @ v[seen])
    return torch.cat(outputs)


def test_lists_for_flashinfer() -> None:
    q, k, v = make_qkv(B=2, Hq=4, Hkv=2, N=72, D=16)
    pipeline: bs.Pipeline[Any, Any, Any] = bs.Pipeline(
        bs.HilbertOrder((2, 6, 6)), bs.MeanPoolScorer(BLOCK), bs.SharedByGroup(bs.TopK(2)), bs.ReferenceExecutor()
    )
    trace = pipeline.trace(q, k, v, causal=False)
    queries = trace.permutation.gather_queries(q)
    keys, values = trace.permutation.gather_keys_and_values(k, v)
    out = torch.empty_like(q)
    for entry in range(2):
        blocks = to_flashinfer(trace.mask, entry=entry)
        assert [x.dtype for x in blocks] == [torch.bool, torch.int32, torch.int32]
        assert blocks.block_row_sz.tolist() == blocks.block_col_sz.tolist() == [[16, 16, 16, 16, 8]] * 2
        for head in range(4):
            part = queries[entry, head], keys[entry, head // 2], values[entry, head // 2]
            out[entry, head] = attended(*part, blocks, head // 2)
    assert torch.allclose(trace.permutation.restore(out), trace.output.out, atol=1e-6)


def test_what_flashinfer_cannot_honour_is_refused() -> None:
    q, k, v = make_qkv(Hq=4, Hkv=2, N=72, D=16)
    mask = PLAIN.trace(q, k, v, causal=False).mask
    with pytest.raises(ValueError, match=r"one mask per KV head, and this one has 4 for 2\. Use SharedByGroup"):
        to_flashinfer(mask)
    with pytest.raises(ValueError, match="'entry' must be less than the batch of 1: 1"):
        to_flashinfer(mask.share_heads(), entry=1)
    with pytest.raises(ValueError, match="attend to all pairs of a block, and causality forbids some pairs"):
        to_flashinfer(PLAIN.trace(q, k, v).mask.share_heads())


def test_a_function_that_tells_heads_apart_is_tried_in_every_head() -> None:
    """FlexAttention calls it with each head, also where the blocks were made for all of them at once."""
    q, k, _ = make_qkv(B=2, Hq=2, Hkv=1, N=72, D=16)
    for name, other in {"head 1 of entry 0": lambda b, h: h, "head 0 of entry 1": lambda b, h: b}.items():
        block_mask = made(
            lambda b, h, q, k, other=other: causal(b, h, q, k) & ((other(b, h) == 0) | (k < 20)), None
        )
        with pytest.raises(ValueError, match=f"forbids query 20 and key 20 in {name}"):
            from_flex(block_mask, q, k, causal=True)


def test_a_mask_without_partial_blocks() -> None:
    q, k, _ = make_qkv(B=2, Hq=2, Hkv=1, N=64, D=16)
    block_mask = made(lambda b, h, q, k: q // BLOCK >= k // BLOCK, None, 64, 64)
    keep = from_flex(block_mask, q, k, causal=False).keep
    assert torch.equal(keep[1, 1], torch.ones_like(keep[1, 1]).tril())


@pytest.mark.parametrize("to_other", [to_flex, to_flash_attention_4, to_flashinfer])
def test_rows_with_orders_of_their_own_are_refused(to_other: Any) -> None:
    """Kernels of others read keys in one order, and would read those of the first rows in all of them."""
    q, k, _ = make_qkv(Hq=2, Hkv=2, N=96, D=16)
    pipeline = bs.Pipeline(bs.GlobalIndexMap(32), bs.NoScorer(block=BLOCK), bs.Everything(), bs.CpuExecutor())
    mask = pipeline.choose(q, k).mask
    with pytest.raises(ValueError, match="takes keys in one order, and rows of this mask have"):
        to_other(mask)
