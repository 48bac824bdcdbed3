"""Prompts padded, packed and in chunks: each is sparse by itself, and keeps the blocks of the whole prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers
from tests.hosts.small_models import VERSION
from tests.hosts.test_transformers import (
    DENSE_LIMIT,
    LAYERS,
    SIZES,
    SPARSE,
    WINDOW,
    all_dense,
    all_sparse,
    assert_close,
    assert_same_logits,
    attached,
    each_cache,
    in_chunks,
    make,
    tokens,
)
from tests.machine import needs_gpu
from tests.stages import ByReference
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.masking_utils import sdpa_mask

import blocksparse as bs
from blocksparse import Everything, MeanPoolScorer, Pipeline, Schedule, SegmentKeySort, Sequences, TritonExecutor
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.hosts.transformers.call import LastLengths
from blocksparse.hosts.transformers.mask_request import mask_of as requested

# Batches


def mask_of(*spans: tuple[int, int], N: int) -> Tensor:
    """1 from the first number of each span to the second."""
    mask = torch.zeros(len(spans), N, dtype=torch.int64)
    for row, (first, end) in zip(mask, spans, strict=True):
        row[first:end] = 1
    return mask


def prompts(model: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """The logits of every prompt alone."""
    return [model(row[real][None]).logits[0] for row, real in zip(ids, mask.bool(), strict=True) if real.any()]


PADDINGS = {
    "left": mask_of((17, 80), (0, 80), (79, 80), N=80),
    "right": mask_of((0, 70), (0, 80), (0, 33), N=80),
    "both": mask_of((5, 70), (40, 80), (0, 20), N=80),
}


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("side", PADDINGS)
def test_padded_prompts_are_sparse(name: str, side: str) -> None:
    """In the dense limit they are what the model computes; sparse, what each prompt is alone."""
    model, recorder, mask = make(name), DensityRecorder(), PADDINGS[side]
    if name == "gemma3":
        mask = mask[:, :WINDOW]  # layers with a window are sparse within it
    ids, real = tokens(mask.shape[1], batch=3), mask.bool()
    assert_same_logits(model, lambda model: model(ids, attention_mask=mask).logits[real], recorder)
    lengths = mask.sum(1).tolist()
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), sum(n >= 16 for n in lengths))
    short = Counter("decode" if n == 1 else "fewer than min_tokens" for n in lengths if 0 < n < 16)
    assert all(reasons == short for reasons in recorder.dense_calls().values())
    alone = DensityRecorder()
    with attached(model, alone, SPARSE):
        expected = torch.cat(prompts(model, ids, mask))
    recorder.clear()
    with attached(model, recorder, SPARSE):
        assert_close(model(ids, attention_mask=mask).logits[real], expected)
    assert torch.equal(recorder.density(), alone.density())
    assert float(recorder.density().max()) < 0.9


@each_cache
def test_chunks_of_padded_prompts_are_sparse(room: int | None) -> None:
    """As `generate` makes them: a prompt may begin in a later chunk, or end in an earlier one."""
    recorder, ids = DensityRecorder(), tokens(100, batch=4)
    mask = mask_of((0, 100), (3, 100), (60, 100), (0, 65), N=100)

    def run(model: Any) -> Tensor:
        return in_chunks(model, ids, [40, 20, 40], room, mask=mask)[mask.bool()]

    assert_same_logits(make("llama"), run, recorder)
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 3 + 3 + 4)
    assert recorder.dense_calls() == {}


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 30}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("min_tokens", [16, 100], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padding_behind_a_prompt_generates_the_same_tokens(
    name: str, min_tokens: int, how: dict[str, Any]
) -> None:
    """transformers goes on from the last row, which is padding that sees its prompt, in a window its end."""
    model, ids = make(name), tokens(70, batch=3)
    mask = mask_of((0, 70), (0, 23), (4, 69 if name == "llama" else 50), N=70)
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, **how}
    expected = model(ids, attention_mask=mask).logits[:, -1]
    answers = model.generate(ids, **given)
    recorder = DensityRecorder()
    with attached(model, recorder, min_tokens=min_tokens, min_queries=1, min_window=1):
        assert_close(model(ids, attention_mask=mask).logits[:, -1], expected)
        assert torch.equal(model.generate(ids, **given), answers)
    assert bool(recorder.sparse_calls()) == (min_tokens < 70)


@pytest.mark.parametrize("host", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [WINDOW - 1, WINDOW])
def test_a_row_of_padding_that_sees_no_key_is_as_sdpa_has_it(host: str, padding: int) -> None:
    """Eager attention gives it the mean of all values, so beside that alone `generate` goes on otherwise."""
    N = 80
    model, given = make("mistral"), {"attention_mask": mask_of((0, N - padding), (0, N), N=N)}
    ids = tokens(N, batch=2)
    model.set_attn_implementation(host)
    plain = model(ids, **given).logits[:, -1]
    with attached(model, DensityRecorder()):
        last = model(ids, **given).logits[:, -1]
    assert_close(last[1], plain[1])
    if host == "sdpa" or padding < WINDOW:
        assert_close(last, plain)
    else:
        assert float((last[0] - plain[0]).abs().max()) > 0.1


def test_padding_inside_of_a_prompt_is_dense() -> None:
    recorder, ids, mask = DensityRecorder(), tokens(60, batch=2), mask_of((0, 60), (0, 60), N=60)
    mask[1, 20:30] = 0
    assert_same_logits(make("llama"), lambda m: m(ids, attention_mask=mask).logits[mask.bool()], recorder)
    assert all_dense(recorder, "mask")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_mask_is_of_the_tokens_before_its_chunk(name: str) -> None:
    """A static cache counts on in place while layers run, and the mask of a chunk is made as late as that."""
    model, ids = make(name), tokens(90, batch=2)
    mask = mask_of((0, 90), (0, 90), N=90)
    mask[1, 20:30] = 0
    cache = StaticCache(config=model.config, max_cache_len=100)

    def run() -> Tensor:
        cache.reset()  # which leaves a cache that has counted, so that the first chunk is not another case
        return in_chunks(model, ids, [25, 30, 35], cache, mask=mask)[mask.bool()]

    run()
    expected = run()
    with attached(model, recorder := DensityRecorder()):
        assert_close(run(), expected)
    assert sum(reasons["mask"] for reasons in recorder.dense_calls().values()) > 0


def test_dense_layers_read_padded_prompts_one_by_one() -> None:
    recorder, ids, mask = DensityRecorder(), tokens(80, batch=3), PADDINGS["both"]
    schedule = Schedule(DENSE_LIMIT, dense=[0])
    assert_same_logits(
        make("llama"), lambda m: m(ids, attention_mask=mask).logits[mask.bool()], recorder, schedule
    )
    assert recorder.sparse_calls() == {1: 3}
    assert recorder.dense_calls() == {0: Counter({"no pipeline for this layer": 3})}


LENGTHS = (33, 12, 1, 44)
PACKED: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None], "use_cache": False}
ENDS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
FLASH: dict[str, Any] = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 44, "max_length_k": 44}


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("flash", [{}, FLASH], ids=["positions", "cu_seq_lens"])
def test_packed_prompts_are_sparse(name: str, flash: dict[str, Any]) -> None:
    model, recorder, ids = make(name), DensityRecorder(), tokens(sum(LENGTHS))
    expected = model(ids, **PACKED).logits
    with attached(model, recorder):
        assert_close(model(ids, **PACKED, **flash).logits, expected)
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 2)
    assert recorder.dense_calls()[1] == {"fewer than min_tokens": 1, "decode": 1}
    with attached(model, recorder, SPARSE):
        expected = torch.cat([model(prompt).logits for prompt in ids.split(LENGTHS, 1)], 1)
        assert_close(model(ids, **PACKED, **flash).logits, expected)


def test_packed_prompts_beyond_a_window_attend_within_it() -> None:
    """In the layers that have the window."""
    recorder, ids = DensityRecorder(), tokens(100)
    positions = torch.cat((torch.arange(WINDOW + 2), torch.arange(98 - WINDOW)))[None]
    assert_same_logits(make("gemma3"), lambda m: m(ids, position_ids=positions, use_cache=False).logits, recorder)
    assert recorder.sparse_calls() == {0: 2, 1: 2}
    assert recorder.dense_calls() == {}


def test_cu_seq_lens_count_where_no_mask_tells() -> None:
    """With a cache transformers makes no mask for packed prompts: FlashAttention obeys these, sdpa does not."""
    model, recorder, ids = make("llama"), DensityRecorder(), tokens(sum(LENGTHS))
    expected = model(ids, **PACKED).logits
    given = {"position_ids": PACKED["position_ids"], **FLASH}
    for pipeline in (DENSE_LIMIT, Schedule(None)):
        with attached(model, recorder, pipeline):
            assert_close(model(ids, **given).logits, expected)
    with torch.enable_grad(), attached(model, recorder):
        assert_close(model(ids, **given).logits.detach(), expected)
    assert recorder.sparse_calls() == {0: 2, 1: 2}
    assert recorder.dense_calls()[0]["gradients"] == 1
    one = torch.tensor([0, sum(LENGTHS)])
    recorder.clear()
    with attached(model, recorder):
        model(ids, cu_seq_lens_q=one, cu_seq_lens_k=one)
    assert all_sparse(recorder)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("static", [False, True])
def test_cu_seq_lens_count_in_windows_too(name: str, static: bool) -> None:
    """The mask of a window that transformers makes beside a cache does not know of prompts."""
    model, recorder, lengths = make(name), DensityRecorder(), (WINDOW + 30, WINDOW, 25)
    ids, ends = tokens(sum(lengths)), torch.tensor([0, *lengths]).cumsum(0)
    expected = torch.cat([model(prompt).logits for prompt in ids.split(lengths, 1)], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    given = {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    for pipeline in (DENSE_LIMIT, Schedule(None)):
        cache = StaticCache(model.config, max_cache_len=300) if static else None
        with attached(model, recorder, pipeline):
            assert_close(model(ids, **given, past_key_values=cache).logits, expected)
    assert recorder.sparse_calls() == {0: 3, 1: 3}
    assert recorder.dense_calls() == {layer: {"no pipeline for this layer": 3} for layer in range(LAYERS)}
    with attached(model, recorder), pytest.raises(ValueError, match="sequences lie in"):
        model(ids, cu_seq_lens_q=ends[:-1], cu_seq_lens_k=ends[:-1])


def test_the_host_reads_lengths_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when they are others, in the same tensor too."""
    reads: list[Tensor] = []
    made = Sequences.from_cu_seqlens

    def read(*ends: Tensor) -> Sequences:
        reads.append(ends[0])
        return made(*ends)

    monkeypatch.setattr(Sequences, "from_cu_seqlens", read)
    model, ends = make("llama"), torch.tensor([0, 30, 60])
    with attached(model, DensityRecorder()):
        for middle in (30, 20, 20):
            if middle == 20:
                ends[1] = middle
            first = model(tokens(60), cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
    assert len(reads) == 3
    assert first.shape[1] == 60


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("write", [lambda x, y: x.copy_(y), lambda x, y: x.data.copy_(y)], ids=["op", "data"])
def test_a_buffer_for_lengths_may_be_filled_anew(write: Callable[..., object], mode: Callable[[], Any]) -> None:
    """Servers keep one. No version tells of a write to an inference tensor, nor of one by `.data`."""
    model, ids = make("llama"), tokens(90)
    with mode():
        ends = torch.zeros(3, dtype=torch.int32)
        want = [torch.cat([model(x).logits for x in ids.split((cut, 90 - cut), 1)], 1) for cut in (30, 60)]
        with attached(model, DensityRecorder()):
            for cut, expected in zip((30, 60), want, strict=True):
                write(ends, torch.tensor([0, cut, 90]))
                positions = torch.cat((torch.arange(cut), torch.arange(90 - cut)))[None]
                given: Any = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 60, "max_length_k": 60}
                assert_close(model(ids, position_ids=positions, **given).logits, expected)


def test_layers_may_have_lengths_of_their_own() -> None:
    """As layers with a window have in continuous batching."""
    lengths, first, second = LastLengths(), torch.tensor([0, 30, 60]), torch.tensor([0, 20, 60])
    for layer, ends in enumerate((first, second, second, first)):
        assert lengths.of(layer, ends).spans == Sequences.from_cu_seqlens(ends).spans


def test_a_mask_that_joins_prompts_is_dense() -> None:
    """A function of a model's own that only looks like packed prompts where neighbours meet."""

    def odd(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (((key < 20) == (query < 20)) | ((query == 39) & (key == 3)))

    request: dict[str, Any] = {"batch_size": 2, "q_length": 40, "kv_length": 40, "device": torch.device("cpu")}
    mask: Any = requested(**request, mask_function=odd, allow_is_causal_skip=False)
    assert mask.sequences is None
    assert torch.equal(mask.made(), sdpa_mask(**request, mask_function=odd, allow_is_causal_skip=False))
    assert mask.made().shape == (2, 1, 40, 40)
    even: Any = requested(
        **request, mask_function=lambda b, h, q, k: (k <= q) & ((k < 20) == (q < 20)), allow_is_causal_skip=False
    )
    assert [span.keys for span in even.sequences.spans] == [20, 20, 20, 20]


@pytest.mark.parametrize("how", ["positions", "left", "right", "both"])
def test_a_mask_of_prompts_is_the_mask_that_sdpa_gets(how: str) -> None:
    """To whoever looks at it, rows of padding included."""
    model, seen = make("llama"), []
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *_: seen.append(_[2]["attention_mask"]), with_kwargs=True)
    given = PACKED if how == "positions" else {"attention_mask": PADDINGS[how]}
    ids = tokens(sum(LENGTHS)) if how == "positions" else tokens(80, batch=3)
    model.set_attn_implementation("sdpa")
    model(ids, **given)
    with attached(model, DensityRecorder()):
        model(ids, **given)
    expected, mask = seen
    assert torch.equal(mask.made(), expected.expand(mask.shape))
    assert torch.equal(mask.rows(5, 9), mask.made()[:, :, 5:9])


@needs_gpu
@pytest.mark.parametrize("how", ["left", "right", "packed"])
def test_prompts_on_a_gpu(how: str) -> None:
    """bf16, in the dense limit, by Triton."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"hidden_size": 256})
    model: Any = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model = model.to("cuda", torch.bfloat16).eval()
    lengths, N = (300, 200, 130), 630 if how == "packed" else 300
    real = torch.ones(1, N, dtype=torch.bool, device="cuda")
    if how == "packed":
        positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
        given: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    else:
        ends = [(N - n, N) if how == "left" else (0, n) for n in lengths]
        given = {"attention_mask": mask_of(*ends, N=N).cuda()}
        real = given["attention_mask"].bool()
    ids, recorder = tokens(N, batch=len(real)).cuda(), DensityRecorder()
    expected = model(ids, **given).logits[real].float()
    pipeline = Pipeline(SegmentKeySort(S=128), MeanPoolScorer(64), Everything(), TritonExecutor())
    with attach(model, pipeline, min_tokens=1, recorder=recorder):
        actual = model(ids, **given).logits[real].float()
    assert recorder.sparse_calls() == dict.fromkeys(range(LAYERS), 3)
    assert float((actual - expected).abs().max()) < 0.03 * float(expected.abs().max())


# Chunks


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


@pytest.mark.skipif(VERSION < (5, 21), reason="chunks of a second turn begin with the first turn again")
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
