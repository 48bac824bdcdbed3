"""What is refused, in one sentence before any work: mistakes of users, and drawn calls and arguments."""

from __future__ import annotations

import inspect
import logging
import operator
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import blocksparse as bs
from blocksparse.check.per_head import HeadValues
from blocksparse.testing import assert_within_budget, every_preset, make_qkv
from tests.arguments import KINDS, TARGETS
from tests.tiny_model import tiny_llama

# A thousand generated bad arguments: each is refused with a message that names it


ARGUMENTS: list[tuple[Any, ...]] = [
    (target, given, *pair.split("=")) for target, given, arguments in TARGETS for pair in arguments.split()
]


def sentence(error: pytest.ExceptionInfo[Exception] | Exception) -> str:
    """The message, which has one line."""
    error = error.value if isinstance(error, pytest.ExceptionInfo) else error
    text = str(error)
    assert len(error.args) == 1, error.args
    assert "\n" not in text
    assert 10 < len(text) < 300, text
    return text


def test_every_argument_is_listed() -> None:
    for target, given, arguments in TARGETS:
        listed = {pair.split("=")[0] for pair in arguments.split()}
        assert listed == set(inspect.signature(target).parameters), (
            f"give each argument of {target.__name__} a rule of blocksparse.check, or a kind in tests/arguments.py"
        )
        target(**given)
    targets = {target for target, _, _ in TARGETS}
    assert targets.issuperset(every_preset.values()), "add the preset to TARGETS of tests/arguments.py"


def test_a_thousand_bad_arguments() -> None:
    rng = random.Random(0)
    wrong, count = [], 0
    for target, given, name, kind in ARGUMENTS:
        # The one rule for what is legal: None, where a "?" says that it means something.
        bad = KINDS[kind.rstrip("?")] + ([] if kind.endswith("?") else [lambda _: None])
        for draw in rng.sample(bad, 6):
            value, count = draw(rng), count + 1
            case = f"{getattr(target, '__name__', target)}({name}={value!r:.60})"
            others = {} if (target, name) == (bs.TopK, "share") else given
            try:
                target(**{**others, name: value})
            except (TypeError, ValueError) as error:
                if f"'{name}'" not in sentence(error):
                    wrong.append(f"{case} says {error}")
            except Exception as error:
                wrong.append(f"{case} raises {error!r}")
            else:
                wrong.append(f"{case} is accepted")
    assert not wrong, "\n".join(wrong)
    assert count > 1000


@pytest.mark.parametrize("other", [3, None, "Sink", bs.Identity(), bs.Sink, True])
def test_selectors_join_with_selectors_alone(other: Any) -> None:
    for join in (operator.or_, operator.and_):
        for pair in ((bs.Sink(), other), (other, bs.TopCdf(0.5) | bs.Sink())):
            with pytest.raises(TypeError, match="unsupported operand type") as error:
                join(*pair)
            sentence(error)


def trace_of(**sizes: Any) -> Any:
    return bs.mean_pooling(block=16, executor=bs.ReferenceExecutor()).trace(*make_qkv(N=40, D=8, **sizes))


@pytest.mark.parametrize("row", [-1, 3, 2**40, True, 1.0, None, "0", torch.tensor(0)])
def test_rows_that_are_not_there(row: Any) -> None:
    mask = trace_of().mask
    for rows_of in (mask.pairs, mask.queries, mask.slots):
        with pytest.raises((TypeError, ValueError), match="'row' must be") as error:
            rows_of(row)
        sentence(error)
    assert mask.pairs(np.int64(2)).shape == (1, 4, 8, 40)
    with pytest.raises(TypeError, match="unsupported operand"):
        mask | row


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None, 3, 2**70])
def test_refining_by_what_does_not_divide(n: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="'n' must") as error:
        trace_of().mask.refine(n)
    sentence(error)


@pytest.mark.parametrize(
    ("preset", "arguments", "said"),
    [
        (bs.bfla, {"n_local": 1, "n_local_tiles": 1}, "give 'n_local' or 'n_local_tiles', not both: 1 and 1"),
        (bs.bfla, {"tile": 96}, "'block' must be a multiple of 'tile' (96): 256"),
        (bs.s2o, {"S": 100}, "'S' must be a multiple of 'block' (64): 100"),
        (bs.pbs_attn, {"S": 200}, "'S' must be a multiple of 'block' (128): 200"),
        (bs.pbs_attn_plus, {"S": 200}, "'S' must be a multiple of 'block' (128): 200"),
        (bs.xattention, {"block": 20}, "'block' must be a multiple of 'stride' (8): 20"),
        (bs.sparge, {"mass": [0.5], "share": 0.5}, "give 'mass' or 'share', not both: [0.5] and 0.5"),
        (
            bs.mean_pooling,
            {"executor": 0},
            "'executor' must be an Executor: 0. The order is permuter, scorer, selector, executor.",
        ),
    ],
)
def test_presets_use_the_names_of_their_arguments(preset: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        preset(**arguments)
    assert sentence(error) == said


def test_numbers_of_other_libraries_become_pythons() -> None:
    two: Any = np.int8(2)
    assert repr(bs.SegmentKeySort(two, last_q=two)) == repr(bs.SegmentKeySort(2, last_q=2))
    assert repr(bs.NoScorer(two, k_block=two)) == repr(bs.NoScorer(2, k_block=2))
    assert repr(bs.TileOrder((two, 2, 2), (1, two, 2))) == repr(bs.TileOrder((2, 2, 2), (1, 2, 2)))
    assert repr(bs.Schedule(None, dense=[two])) == repr(bs.Schedule(None, dense=[2]))
    assert repr(bs.Schedule(None, layers={two: None})) == repr(bs.Schedule(None, layers={2: None}))
    assert repr(bs.HeadGroups({(two, 1): None})) == repr(bs.HeadGroups({(2, 1): None}))
    assert repr(bs.bfla(tile=two * 32, n_local_tiles=two * 50)) == repr(bs.bfla(n_local=6400))
    half: Any
    for half in (np.float64(0.5), np.float16(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16)):
        assert repr(bs.TopCdf(half)) == repr(bs.TopCdf(0.5))
        assert type(bs.TopCdf(half).mass) is float


@pytest.mark.parametrize(
    "given",
    [
        [0.5, 1],
        (np.float32(0.5), torch.tensor(1)),
        torch.tensor([0.5, 1]),
        torch.tensor([0.5, 1], dtype=torch.float8_e4m3fn),
        torch.tensor([0.5, 9, 1])[::2],
    ],
)
def test_one_number_per_head(given: Any) -> None:
    values = bs.TopCdf(given).mass
    assert isinstance(values, HeadValues)
    assert values.values.tolist() == [0.5, 1.0]
    assert values.values.dtype == torch.float64


def test_numbers_that_wait_for_a_gradient() -> None:
    """Nobody would ever compute it."""
    for given in (torch.ones(2, requires_grad=True), torch.tensor(0.5, requires_grad=True)):
        with torch.enable_grad(), pytest.raises(TypeError, match=r"that requires grad \(detach it\)"):
            bs.TopCdf(given)
        bs.TopCdf(given)  # under no_grad it is no matter


def test_budgets_are_of_tensors_of_one_shape() -> None:
    x: Any = torch.ones(3)
    for arguments, name in (((3, x, x), "got"), ((x, x.int(), x), "want"), ((x, x, torch.ones(1)), "yardstick")):
        with pytest.raises((TypeError, ValueError), match=f"'{name}' must") as error:
            assert_within_budget(*arguments)
        sentence(error)


def test_more_queries_than_keys_are_drawn() -> None:
    q, k, v = make_qkv(M=7, N=5, D=4)
    assert (q.shape[2], k.shape[2], v.shape[2]) == (7, 5, 5)
    assert torch.equal(make_qkv(M=3, N=5, D=4)[0], make_qkv(N=5, D=4)[0][:, :, 2:])


# Calls that cannot be


Call = dict[str, Any]
CALLED: dict[str, Any] = {
    "pipeline": bs.pbs_attn(block=16, S=32, executor=bs.ReferenceExecutor()),
    "early stop": bs.s2o(S=32, block=16),
    "groups": bs.HeadGroups({(0,): bs.mean_pooling(block=16, executor=bs.ReferenceExecutor()), (1,): None}),
}


PIPELINE, GROUPS = CALLED["pipeline"], CALLED["groups"]


@pytest.mark.parametrize(
    ("run", "more"),
    [
        (lambda q, k, v, more: PIPELINE.choose(q, k, **more), {"sequences": bs.Sequences.packed([20, 20])}),
        (lambda q, k, v, more: PIPELINE.with_lse(q, k, v, **more), {"sequences": bs.Sequences.packed([20, 20])}),
        (lambda q, k, v, more: GROUPS(q, k, v, **more), {"history": bs.KeyHistory()}),
        (lambda q, k, v, more: GROUPS.trace(q, k, v, **more), {"dropout_p": 0.1, "sinks": [0.1] * 4}),
    ],
)
def test_no_argument_is_taken_and_ignored(run: Any, more: Call) -> None:
    message = f"window, softcap, sinks and remaining, but no {next(iter(more))}"
    with pytest.raises(TypeError, match=message) as error:
        run(*make_qkv(N=40, D=8), more)
    sentence(error)


def compiled(run: Any) -> Any:
    return torch.compile(run, fullgraph=True, backend="eager")


def vmapped(run: Any) -> Any:
    return lambda *x: torch.vmap(run)(*(each[None] for each in x))


@pytest.mark.parametrize("under", [compiled, vmapped])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("is_causal", False, "but no is_causal"),
        ("causal", 1, "'causal' must be "),
        ("window", 0, "'window' must be a whole number, at least 1, or None: "),
        ("window", 100.7, "'window' must be a whole number, at least 1, or None: "),
        ("window", True, "'window' must be a whole number, at least 1, or None: "),
        ("softcap", 0.0, "'softcap' must be a number from 1e-30 to 1e30, or None: "),
        ("softcap", False, "'softcap' must be a number from 1e-30 to 1e30, or None: "),
        ("sinks", True, "'sinks' must be a number up to 2**100, or -inf for no sink, or one"),
        ("sinks", [0.5, True, 0.5, 0.5], "'sinks' must be a number up to 2**100, or -inf for no sink, or one"),
        ("sinks", torch.zeros(4, requires_grad=True), "that requires grad"),
    ],
)
def test_a_graph_refuses_what_a_call_refuses(under: Any, name: str, value: Any, said: str) -> None:
    """Its node takes numbers, in which a window of 0 is none, and True is 1."""
    q, k, v = make_qkv(N=40, D=8)
    for call in (lambda *x: GROUPS(*x, **{name: value}), under(lambda *x: GROUPS(*x, **{name: value}))):
        with (
            torch.enable_grad(),
            pytest.raises((TypeError, ValueError, torch._dynamo.exc.Unsupported), match=re.escape(said)),
        ):
            call(q, k, v)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_jit_trace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^torch\.jit\.trace would keep the blocks of its example"):
        torch.jit.trace(lambda *x: bs.mean_pooling()(*x), tuple(make_qkv()), check_trace=False)


@pytest.mark.parametrize("under", [compiled, vmapped])
@pytest.mark.parametrize(("called", "method"), [(PIPELINE, "trace"), (PIPELINE, "with_lse"), (GROUPS, "trace")])
def test_graphs_and_transforms_take_calls_only(called: Any, method: str, under: Any) -> None:
    said = rf"torch.compile and torch.func take calls of a pipeline, .*not '{method}'\. Leave it out of them"
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=said):
        under(getattr(called, method))(*make_qkv(N=40, D=8))


# Mistakes that people write: a call, and words of its error, in order


Q, K, V = make_qkv(Hq=4, Hkv=2, N=256, D=32)
MEAN: Any = bs.mean_pooling()
STAGES: Any = bs.Identity(), bs.MeanPoolScorer(64), bs.TopK(3), bs.AutoExecutor()
ANY: Any = bs  # as a user without a type checker has it


def pipeline(permuter: Any = None, scorer: Any = None, selector: Any = None, executor: Any = None) -> Any:
    given = zip((permuter, scorer, selector, executor), STAGES, strict=True)
    return bs.Pipeline(*(default if part is None else part for part, default in given))


# Of every call there is, each a pipeline's, and one that gives a trace.
INPUTS: list[tuple[Callable[[Any], Any], str]] = [
    # Tensors.
    (lambda call: call(*(x.transpose(1, 2) for x in (Q, K, V))), "Nq=4, Nk=2 | [B, H, N, D], heads before tokens"),
    (lambda call: call(Q[0], K[0], V[0]), "ValueError: 'q' | [B, H, N, D] | (4, 256, 32) | heads before tokens"),
    (lambda call: call(Q[:, :3], K, V), "ValueError | multiple of the KV heads (2) | 3 | Do not repeat k and v"),
    (lambda call: call(Q.half(), K, V), "TypeError | one dtype | float16 | Convert them with .to()"),
    (lambda call: call(Q.int(), K.int(), V.int()), "TypeError: 'q' | floating-point | torch.int32 | Convert it"),
    (lambda call: call(Q.numpy(), K, V), "TypeError: 'q' must be a tensor | ndarray"),
    (lambda call: call(Q, K, V.tolist()), "TypeError: 'v' must be a tensor | list"),
    (lambda call: call(Q, K.to("meta"), V), "ValueError | one device | cpu, meta, cpu | .to()"),
    (lambda call: call(Q, K[:, :, :9], V[:, :, :9]), "ValueError | at least as many | Nq=256, Nk=9 | Pass the"),
    (lambda call: call(Q, K, V[:, :, :9]), "ValueError: 'v' | heads and tokens of 'k' | (1, 2, 9, 32)"),
    (lambda call: call(K, Q, V), "ValueError: 'v' | heads and tokens of 'k' | (1, 2, 256, 32)"),
    (lambda call: call(V, Q, Q), "ValueError | multiple of the KV heads (4) | 2"),
    (lambda call: call(*3 * [torch.randn(1, 2, 9, 512)]), "ValueError | head dim | at most 256 | 512"),
    (lambda call: call(Q, K[..., :9], V[..., :9]), "ValueError | head dim of 'q' (32): 9"),
    (lambda call: call(torch.cat((Q, Q)), K, V), "ValueError | one batch size: 2, 1, 1"),
    (lambda call: call(Q[:, :, :0], K, V), "ValueError: 'q' must not be empty"),
    (lambda call: call(Q.clone().requires_grad_(), K, V), "no gradients. Call it under torch.no_grad(), or"),
    # Arguments of a call.
    (lambda call: call(Q, K), "missing | 'v'"),
    (lambda call: call(Q, K, V, attn_mask=torch.ones(256, 256)), "TypeError | mask"),
    (lambda call: call(Q, K, V, is_causal=True), "TypeError | is_causal"),
    (lambda call: call(Q, K, V, causal=1), "TypeError: 'causal' must be a bool: 1"),
    (lambda call: call(Q, K, V, scale="x"), "'scale' | str | float()"),
    (lambda call: call(Q, K, V, sinks=[0.1, 0.2]), "'sinks' has 2 entries for 4 query heads"),
]  # fmt: skip
CORRECTED = bs.MeanCorrectionExecutor(bs.ReferenceExecutor())


CALLS: list[tuple[Callable[[], Any], str]] = [
    # Sizes and options that do not go together.
    (lambda: bs.FlattenMaxPoolScorer(96), "'block' | multiple of 'g' (64): 96"),
    (lambda: bs.FlattenMaxPoolScorer(64, 32, k_block=48), "'k_block' | multiple of 'g' (32): 48"),
    (lambda: bs.AntidiagonalScorer(8, block=16, k_block=20), "'k_block' | multiple of 'stride' (8): 20"),
    (lambda: bs.VerticalSlashCdf(0.9, min_budget=64, max_budget=32), "'max_budget' | 'min_budget' (64): 32"),
    (lambda: bs.TopK(3, of_all_keys=True), "'of_all_keys' applies to 'share' alone"),
    (lambda: bs.s2o(0.1, executor=bs.GatherExecutor(0.2)), "'tau' belongs to the executor"),
    (lambda: bs.Int8Executor(scales="block", tiles=bs.HopperTiles(2, 128, 2)), "'scales' | 'token'"),
    (lambda: bs.MeanCorrectionExecutor(CORRECTED), "would count twice. Give the executor"),
    (lambda: bs.sol_attn(mean_correction=True, executor=CORRECTED), "would count twice. Give the executor"),
    (lambda: bs.MeanCorrectionExecutor(ANY.GatherExecutor(0.1)), "RankedBlockMask, and MeanCorrection"),
    # Names and numbers of presets.
    (lambda: ANY.auto("best"), "'quality' | 'careful', 'balanced' or 'fast' | 'best'"),
    (lambda: ANY.xattention(threshold=0.9), "xattention() | 'threshold'"),
    (lambda: bs.TopK(), "ValueError: 'TopK' takes either 'k' or 'share' | k=None"),
    (lambda: bs.TopK(2, share=0.5), "ValueError: 'TopK' takes either 'k' or 'share' | k=2"),
    (lambda: ANY.HilbertOrder((16, 16)), "'grid' | (T, H, W) | or None: (16, 16). An image is (1, H, W)."),
    # Numbers per head, and what a preset's stages take.
    (lambda: MEAN(Q, K, V, torch.ones(256, 256)), "TypeError | no attention mask | Sequences.padded(mask"),
    (lambda: MEAN(Q, K, V, window=64, causal=False), "window=64 | Call with causal=True"),
    (lambda: bs.xattention([0.9, 0.8])(Q, K, V), "one entry per query head (4): 2 | Give one number per query"),
    (lambda: bs.s2o([0.1, 0.2])(Q, K, V), "'tau' has 2 entries for 4 query heads"),
    (lambda: bs.s2o()(Q, K, V, causal=False), "ValueError | 'GlobalIndexMap' | Call | with causal=True"),
    # Devices and executors.
    (lambda: bs.sparge(executor=bs.Int8Executor())(Q, K, V), "Int8Executor | on cpu | AutoExecutor()"),
    (
        lambda: pipeline(executor=bs.FlexExecutor())(*(x.double() for x in (Q, K, V))),
        "FlexExecutor | not torch.float64 | ReferenceExecutor()",
    ),
    # Stages.
    (lambda: pipeline(permuter=bs.Identity), "'permuter' | Identity itself; call it: Identity()"),
    (lambda: pipeline(permuter=STAGES[1], scorer=STAGES[0]), "'permuter' | MeanPoolScorer | The order is"),
    (lambda: bs.Pipeline(*STAGES[:3]), "missing | 'executor'"),
    (lambda: STAGES[2] | "Sink", "'TopK' and 'str'"),
    (lambda: MEAN | "Sink", "'Pipeline' and 'str'"),
    (lambda: evolve(MEAN, select=bs.TopK(1)), "unexpected keyword argument 'select'"),
    # Heads and layers.
    (lambda: bs.HeadGroups({(0, 1): MEAN, (1,): None}), "'groups' | once | 1"),
    (lambda: ANY.HeadGroups({0: MEAN}), "'groups' | tuples | (2,) for one head | 0"),
    (lambda: bs.Schedule(MEAN, layers={0: MEAN}, dense=(0,)), "'layers' and 'dense' | once in all | 0"),
    (lambda: ANY.Schedule(MEAN, dense=0), "'dense' | sequence | 0"),
    # Batches, chunks and pages.
    (lambda: MEAN(Q, K, V, history=bs.KeyHistory), "'history' | KeyHistory itself; call it: KeyHistory()"),
    (lambda: MEAN.attend(Q[:, :, :9], K[:, :, :9], V[:, :, :9], MEAN.choose(Q, K)), "256 | 9 | choose() again"),
    (lambda: MEAN.attend(Q, K, V, None), "'choice' must be a Choice: None. Get one from pipeline.choose(q, k)."),
    # PyTorch's function.
    (lambda: ANY.scaled_dot_product_attention(Q, Q, Q, pipeline=bs.auto), "auto itself; call it: auto()"),
]  # fmt: skip


def check(message: str, words: str) -> None:
    """The message has all of these words, in order."""
    pattern = ".*".join(re.escape(word) for word in words.split(" | "))
    assert re.search(pattern, message), f"{message!r} lacks some of {words!r}"


@pytest.mark.parametrize("called", CALLED.values(), ids=CALLED)
@pytest.mark.parametrize(("call", "words"), INPUTS, ids=[words for _, words in INPUTS])
def test_inputs_of_a_wrong_call(call: Callable[[Any], Any], words: str, called: Any) -> None:
    for run in (called, called.trace):
        with torch.enable_grad(), pytest.raises((TypeError, ValueError)) as error:
            call(run)
        check(f"{type(error.value).__name__}: {sentence(error)}", words)


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
