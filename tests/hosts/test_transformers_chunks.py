"""A prompt that a transformers model reads in chunks keeps the blocks of the whole prompt."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.hosts.test_transformers import LAYERS, in_chunks, make, tokens
from tests.stages import ByReference
from transformers import DynamicCache, GenerationMixin

import blocksparse as bs
from blocksparse.hosts.transformers import attach

N, BLOCK = 400, 16


class Kept(ByReference):
    """Notes the mask of every call."""

    def rows(self, blocks: int) -> Tensor:
        """What the layers kept, `[layers, B, H, blocks, blocks]`, each row once; the masks are forgotten."""
        kept = torch.zeros(LAYERS, *self.masks[0].keep.shape[:2], blocks, blocks, dtype=torch.bool)
        for call, mask in enumerate(self.masks):
            first = mask.grid.first_row
            kept[call % LAYERS, :, :, first : first + mask.grid.rows, : mask.grid.cols] |= mask.keep
        self.masks.clear()
        return kept


def pipeline(kept: Kept) -> bs.Pipeline[Any, Any, Any]:
    return bs.xattention(0.5, stride=4, block=BLOCK, pattern="sum", executor=kept) | (
        bs.Band(8) | bs.LastQueries(40)
    )


@pytest.mark.parametrize("size", [16, 64, 256])
def test_generate_tells_how_long_a_prompt_is(size: int) -> None:
    model, ids, kept = make("llama").double(), tokens(N), Kept()
    before = GenerationMixin._prefill
    with attach(model, pipeline(kept), min_tokens=1, min_queries=2):
        model.generate(ids, max_new_tokens=3, do_sample=False)
        whole = kept.rows(N // BLOCK)
        model.generate(ids, max_new_tokens=3, do_sample=False, prefill_chunk_size=size)
        assert torch.equal(kept.rows(N // BLOCK), whole)
        in_chunks(model, ids, size)
        assert not torch.equal(kept.rows(N // BLOCK), whole)  # each call has its own end
    assert GenerationMixin._prefill is before


def test_auto_keeps_the_same_blocks() -> None:
    """With a greater alpha than those of `auto`, since attention of random weights is even."""
    model, ids, kept = make("llama", max_position_embeddings=2100).double(), tokens(2000), Kept()
    rule = bs.RowShare(0.5) | bs.Band(128) | bs.LastQueries(128)
    scorer = bs.AntidiagonalScorer(16, pattern="sum")
    with attach(model, bs.Pipeline(bs.Identity(), scorer, rule, kept)):
        model(ids)
        whole = kept.rows(16)
        for size in (512, 1024):
            model.generate(ids, max_new_tokens=2, do_sample=False, prefill_chunk_size=size)
            assert torch.equal(kept.rows(16), whole)
            in_chunks(model, ids, size)
            assert not torch.equal(kept.rows(16), whole)


@pytest.mark.parametrize("size", [16, 48, 256])
def test_a_loop_of_chunks_can_tell(size: int) -> None:
    model, ids, kept = make("llama").double(), tokens(N), Kept()
    with attach(model, pipeline(kept), min_tokens=1, min_queries=2) as attachment:
        model(ids)
        whole = kept.rows(N // BLOCK)
        for tells in (attachment.prompt(N), nullcontext()):
            with tells:
                in_chunks(model, ids, size)
            same = torch.equal(kept.rows(N // BLOCK), whole)
            assert same == (not isinstance(tells, nullcontext))
    for wrong, error in ((0, ValueError), ("all", TypeError)):
        with pytest.raises(error, match="'tokens' must be a whole number, at least 1"):
            attachment.prompt(wrong)  # type: ignore[arg-type]


def test_prompts_that_are_padded_on_the_left() -> None:
    model, ids, kept = make("llama").double(), tokens(N, batch=2), Kept()
    mask = torch.ones_like(ids)
    mask[0, : 5 * BLOCK] = 0
    with attach(model, pipeline(kept), min_tokens=1, min_queries=2):
        ends = []
        for how in ({}, {"prefill_chunk_size": 64}):
            kept.masks.clear()
            model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, **how)
            ends.append({(m.grid.k_len, m.grid.prompt_end) for m in kept.masks})
    assert ends[0] == {(320, 320), (400, 400)}
    assert {end for _, end in ends[1]} == {320, 400}


def test_a_second_turn_ends_where_its_mask_does() -> None:
    model, ids, kept = make("llama").double(), tokens(N), Kept()
    with attach(model, pipeline(kept), min_tokens=1, min_queries=2):
        cache = DynamicCache(config=model.config)
        model(ids[:, :112], past_key_values=cache)
        kept.masks.clear()
        model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False, prefill_chunk_size=64)
        assert [m.grid.k_len for m in kept.masks[::2]] == [176, 240, 304, 368, 400]
        assert {m.grid.prompt_end for m in kept.masks} == {400}


def test_attachments_in_any_order_give_the_method_back() -> None:
    before = GenerationMixin._prefill
    models = make("llama"), make("llama")
    one, other = (attach(model, pipeline(Kept())) for model in models)
    one.detach()
    assert GenerationMixin._prefill is not before
    other.detach()
    assert GenerationMixin._prefill is before
