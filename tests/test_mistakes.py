"""Mistakes that users make, and what each message must say: what was wrong, with what value, and what to do now.

A row is a call and words of its error, in order. `tests/test_bad_arguments.py` draws thousands of wrong values;
here are those that people write.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

import blocksparse as bs
from blocksparse.testing import make_qkv
from blocksparse.tools.cli.main import main
from tests.test_bad_arguments import sentence
from tests.tiny_model import tiny_llama

Q, K, V = make_qkv(Hq=4, Hkv=2, N=256, D=32)
MEAN: Any = bs.mean_pooling()
STAGES: Any = bs.Identity(), bs.MeanPoolScorer(64), bs.TopK(3), bs.AutoExecutor()
ANY: Any = bs  # as a user without a type checker has it


def pipeline(permuter: Any = None, scorer: Any = None, selector: Any = None, executor: Any = None) -> Any:
    given = zip((permuter, scorer, selector, executor), STAGES, strict=True)
    return bs.Pipeline(*(default if part is None else part for part, default in given))


def twice(history: bs.KeyHistory) -> None:
    for _ in range(2):
        MEAN(Q, K, V, history=history)


CALLS: list[tuple[Callable[[], Any], str]] = [
    # Names and numbers of presets.
    (lambda: ANY.auto("best"), "'quality' | 'careful', 'balanced' or 'fast' | 'best'"),
    (lambda: bs.xattention(90), "'mass' | (0, 1] | 90"),
    (lambda: bs.mean_pooling(-0.1), "'mass' | (0, 1] | -0.1"),
    (lambda: bs.xattention(block=100), "'block' | multiple of 'stride' (8) | 100"),
    (lambda: bs.pbs_attn(S=200), "'S' | multiple of 'block' (128) | 200"),
    (lambda: ANY.xattention(threshold=0.9), "xattention() | 'threshold'"),
    (lambda: ANY.TopK(0.1), "'k' | whole number | 0.1"),
    (lambda: bs.TopK(share=2.0), "'share' | (0, 1] | 2.0"),
    (lambda: bs.TopK(), "ValueError: 'TopK' takes either 'k' or 'share' | k=None"),
    (lambda: bs.TopK(2, share=0.5), "ValueError: 'TopK' takes either 'k' or 'share' | k=2"),
    (lambda: ANY.HilbertOrder((16, 16)), "'grid' | (T, H, W) | or None: (16, 16). An image is (1, H, W)."),
    # Tensors.
    (lambda: MEAN(*(x.transpose(1, 2) for x in (Q, K, V))), "Nq=4, Nk=2 | [B, H, N, D], heads before tokens"),
    (lambda: MEAN(Q[0], K[0], V[0]), "ValueError: 'q' | [B, H, N, D] | (4, 256, 32) | heads before tokens"),
    (lambda: MEAN(Q[:, :3], K, V), "ValueError | multiple of the KV heads (2) | 3 | Do not repeat k and v"),
    (lambda: MEAN(Q.half(), K, V), "TypeError | one dtype | float16 | Convert them with .to()"),
    (lambda: MEAN(Q.int(), K.int(), V.int()), "TypeError: 'q' | floating-point | torch.int32 | Convert it"),
    (lambda: MEAN(Q.numpy(), K, V), "TypeError: 'q' must be a tensor | ndarray"),
    (lambda: MEAN(Q, K.to("meta"), V), "ValueError | one device | cpu, meta, cpu | .to()"),
    (lambda: MEAN(Q, K[:, :, :9], V[:, :, :9]), "ValueError | at least as many | Nq=256, Nk=9 | Pass the cached"),
    (lambda: MEAN(Q, K, V[:, :, :9]), "ValueError: 'v' | heads and tokens of 'k' | (1, 2, 9, 32)"),
    (lambda: MEAN(*(torch.randn(1, 2, 9, 512) for _ in range(3))), "ValueError | head dim | at most 256 | 512"),
    (lambda: MEAN(Q, K[..., :9], V[..., :9]), "ValueError | head dim of 'q' (32): 9"),
    (lambda: MEAN(torch.cat((Q, Q)), K, V), "ValueError | one batch size: 2, 1, 1"),
    (lambda: MEAN(Q[:, :, :0], K, V), "ValueError: 'q' must not be empty"),
    # Arguments of a call.
    (lambda: MEAN(Q, K), "missing | 'v'"),
    (lambda: MEAN(Q, K, V, torch.ones(256, 256)), "TypeError | no attention mask | Sequences.padded(mask"),
    (lambda: MEAN(Q, K, V, is_causal=True), "TypeError | is_causal"),
    (lambda: MEAN(Q, K, V, causal=1), "TypeError: 'causal' must be a bool: 1"),
    (lambda: MEAN(Q, K, V, scale="x"), "'scale' | str | float()"),
    (lambda: MEAN(Q, K, V, window=0), "'window' | at least 1 | 0"),
    (lambda: MEAN(Q, K, V, window=64, causal=False), "window=64 | Call with causal=True"),
    (lambda: MEAN(Q, K, V, softcap=-1.0), "'softcap' | -1.0"),
    (lambda: MEAN(Q, K, V, sinks=[0.1, 0.2]), "'sinks' has 2 entries for 4 query heads"),
    (lambda: bs.xattention([0.9, 0.8])(Q, K, V), "one entry per query head (4): 2 | Give one number per query"),
    (lambda: bs.s2o([0.1, 0.2])(Q, K, V), "'tau' has 2 entries for 4 query heads"),
    (lambda: bs.s2o()(Q, K, V, causal=False), "ValueError | 'GlobalIndexMap' | Call | with causal=True"),
    (lambda: bs.s2o()(Q, K, V, window=64), "GatherExecutor | window | 64 tokens | another preset"),
    # Devices and executors.
    (lambda: bs.sparge(executor=bs.Int8Executor())(Q, K, V), "Int8Executor | on cpu | AutoExecutor()"),
    (
        lambda: bs.mean_pooling(executor=bs.FlashAttention4Executor())(Q, K, V),
        "FlashAttention4Executor | not installed | float32 | AutoExecutor()",
    ),
    (
        lambda: pipeline(executor=bs.FlexExecutor())(*(x.double() for x in (Q, K, V))),
        "FlexExecutor | not torch.float64 | ReferenceExecutor()",
    ),
    # Stages.
    (lambda: pipeline(permuter=bs.Identity), "'permuter' | Identity itself; call it: Identity()"),
    (lambda: pipeline(permuter=STAGES[1], scorer=STAGES[0]), "'permuter' | MeanPoolScorer | The order is"),
    (lambda: bs.Pipeline(*STAGES[:3]), "missing | 'executor'"),
    (lambda: pipeline(scorer=bs.NoScorer(64), selector=bs.TopCdf(0.9)), "TopCdf needs a BlockMass | NoScorer"),
    (lambda: pipeline(permuter=bs.GlobalIndexMap(64)), "needs a GlobalPermutation | GlobalIndexMap"),
    (lambda: pipeline(executor=bs.GatherExecutor()), "needs a RankedBlockMask | TopK gives | `Ranked("),
    (lambda: STAGES[2] | "Sink", "'TopK' and 'str'"),
    (lambda: MEAN | "Sink", "'Pipeline' and 'str'"),
    (lambda: evolve(MEAN, select=bs.TopK(1)), "unexpected keyword argument 'select'"),
    (lambda: bs.sparge(order=bs.HilbertOrder())(Q, K, V), "HilbertOrder has no grid | HilbertOrder((T, H, W))"),
    (lambda: bs.sparge(order=bs.HilbertOrder((2, 3, 4)))(Q, K, V), "24 keys | Nk=256 | prefix= and suffix="),
    # Heads and layers.
    (lambda: bs.HeadGroups({(0,): MEAN})(Q, K, V), "each of the 2 KV heads | missing: 1"),
    (lambda: bs.HeadGroups({(0, 1): MEAN, (1,): None}), "'groups' | once | 1"),
    (lambda: ANY.HeadGroups({0: MEAN}), "'groups' | tuples | (2,) for one head | 0"),
    (lambda: bs.Schedule(MEAN, layers={0: MEAN}, dense=(0,)), "'layers' and 'dense' | once in all | 0"),
    (lambda: ANY.Schedule(MEAN, dense=0), "'dense' | sequence | 0"),
    # Batches, chunks and pages.
    (lambda: MEAN(Q, K, V, sequences=bs.Sequences.packed([100, 100])), "200 | 256 | must sum to the tokens"),
    (lambda: MEAN(Q, K, V, sequences=[100, 156]), "'sequences' | list. Sequences.packed(lengths) makes one"),
    (lambda: bs.Sequences.from_cu_seqlens(torch.tensor([9, 256])), "'cu_seqlens_q' | begin with 0 | [9, 256]"),
    (lambda: bs.Sequences.padded(torch.tensor([[1, 0, 1]])), "'attention_mask' | entry 0 | inside"),
    (lambda: twice(bs.KeyHistory()), "'history' has seen 256 keys | its own KeyHistory | rewind(0)"),
    (lambda: MEAN(Q, K, V, history=bs.KeyHistory), "'history' | KeyHistory itself; call it: KeyHistory()"),
    (lambda: bs.xattention()(Q, K, V, history=bs.KeyHistory()), "remembers nothing | Call without 'history'"),
    (lambda: bs.pbs_attn()(Q, K, V, history=bs.KeyHistory()), "SegmentKeySort moves keys | without 'history'"),
    (
        lambda: bs.PageTable(torch.zeros(1, 2, dtype=torch.int32), lengths=[100], page_size=16),
        "'lengths' | 0 to 32 | request 0 has 100",
    ),
    (lambda: MEAN.attend(Q[:, :, :9], K[:, :, :9], V[:, :, :9], MEAN.choose(Q, K)), "256 | 9 | choose() again"),
    (lambda: MEAN.attend(Q, K, V, None), "'choice' must be a Choice: None. Get one from pipeline.choose(q, k)."),
    # PyTorch's function.
    (lambda: ANY.scaled_dot_product_attention(Q, Q, Q), "missing | 'pipeline'"),
    (lambda: bs.scaled_dot_product_attention(Q, K, V, pipeline=MEAN), "'enable_gqa' | 4 heads of queries and 2"),
    (lambda: ANY.scaled_dot_product_attention(Q, Q, Q, pipeline=bs.auto), "auto itself; call it: auto()"),
    (lambda: bs.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.1, pipeline=MEAN), "'dropout_p' | 0.1"),
    (
        lambda: bs.scaled_dot_product_attention(Q[:, :, :9], Q, Q, is_causal=True, pipeline=MEAN),
        "'is_causal' | 9 and 256 | pipeline(q, k, v)",
    ),
]  # fmt: skip


def check(message: str, words: str) -> None:
    """The message has all of these words, in order."""
    pattern = ".*".join(re.escape(word) for word in words.split(" | "))
    assert re.search(pattern, message), f"{message!r} lacks some of {words!r}"


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_a_wrong_call(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError, bs.UnsupportedError)) as error:
        call()
    check(" ".join(f"{type(error.value).__name__}: {error.value}".split()), words)


def test_a_wrong_attachment(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    from blocksparse.hosts.transformers import DensityRecorder, attach

    model = tiny_llama()
    rows: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, bs.auto, {}, "'pipeline' | auto itself; call it: auto()"),
        (MEAN, model, {}, "'model' | Pipeline. The order is attach(model, pipeline)"),
        (model, MEAN, {"recorder": DensityRecorder}, "'recorder' | DensityRecorder itself; call it"),
    ]
    for given, attention, arguments, words in rows:
        with pytest.raises((TypeError, ValueError)) as error:
            attach(given, attention, **arguments)
        check(sentence(error), words)

    def logged(tokens: int, **arguments: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "blocksparse"), attach(model, MEAN, **arguments):
            model(torch.arange(tokens).unsqueeze(0) % 97)
        return caplog.text

    with torch.enable_grad():
        check(logged(600), "LlamaForCausalLM | 2 x gradients (call the model under torch.no_grad())")
    with torch.no_grad():
        check(logged(99), "2 x fewer than min_tokens (longer prompts are sparse; attach takes min_tokens)")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bnch", "'bnch' | demo"),
        ("tune /nowhere --out plan.json", "must be a folder that a transformers model was saved in | /nowhere"),
        ("tune model --strategy best", "--strategy | 'best' | 'kl', 'sparge'"),
        ("build --for-wheel /nowhere", "'--for-wheel' | folder of the package's source | /nowhere"),
    ],
)  # fmt: skip
def test_a_wrong_command(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status: Any
    try:
        status = main(shlex.split(command))
    except SystemExit as end:
        status = end.code
    assert status
    check(" ".join(capsys.readouterr().err.split()), words)
