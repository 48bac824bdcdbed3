"""A thousand generated bad arguments: each is refused with a message that names it, before any work."""

from __future__ import annotations

import inspect
import operator
import random
from typing import Any

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.check.per_head import HeadValues
from blocksparse.testing import assert_within_budget, every_preset, make_qkv
from tests.arguments import KINDS, TARGETS

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
        (bs.bfla, {"tile": 0}, "'tile' must be a whole number from 1 to 16384: 0"),
        (bs.bfla, {"block": 2**40}, "'block' must be a whole number from 1 to 16384: 1099511627776"),
        (bs.bfla, {"n_local": 1, "n_local_tiles": 1}, "give 'n_local' or 'n_local_tiles', not both: 1 and 1"),
        (bs.bfla, {"tile": 96}, "'block' must be a multiple of 'tile' (96): 256"),
        (bs.s2o, {"block": 0}, "'block' must be a whole number from 1 to 16384: 0"),
        (bs.s2o, {"S": 0}, "'S' must be a whole number from 1 to 16384: 0"),
        (bs.s2o, {"S": 100}, "'S' must be a multiple of 'block' (64): 100"),
        (bs.pbs_attn, {"S": 2.5}, "'S' must be a whole number, at least 1: 2.5"),
        (bs.pbs_attn, {"S": 200}, "'S' must be a multiple of 'block' (128): 200"),
        (bs.pbs_attn_plus, {"S": 200}, "'S' must be a multiple of 'block' (128): 200"),
        (bs.pbs_attn, {"mass": 2}, "'mass' must be a number in (0, 1], or one per query head: 2"),
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
