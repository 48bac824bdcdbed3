"""Every argument of stages, presets, schedules and `testing`: of what kind it is, and what is bad for its kind.

An argument of a stage says in its error what it must be, and `RULES` has the kind of each such rule.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import attrs
import numpy as np
import torch

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv, video_presets
from tests import stages

nan, inf, far = float("nan"), float("inf"), 10**400
PIPELINE = bs.pbs_attn()
Draw = Callable[[random.Random], Any]


def one(*values: Any) -> list[Draw]:
    """Each of these."""
    return [lambda _, value=value: value for value in values]  # type: ignore[misc]


def beyond(limit: float, sign: int) -> list[Draw]:
    """Numbers above a limit, or with `sign` -1 below it; also far, also in one of several heads."""
    some, wrong = [limit - sign * 0.1, limit + sign], limit + sign
    return [
        lambda rng: limit + sign * (rng.random() * 9 + 1e-6),
        *one(sign * inf, sign * 2.0**70, some, torch.tensor(some), np.float32(wrong), torch.tensor(float(wrong))),
    ]


def whole_below(limit: int) -> list[Draw]:
    """Whole numbers below a limit."""
    return [lambda rng: limit - rng.randrange(1, 99), *one(-(2**40), -far, np.int8(limit - 1))]


def no(*roles: type) -> list[Draw]:
    """No instance of these roles: other stages, classes, anything else."""
    others: tuple[Any, ...] = (
        bs.Identity(), bs.MeanPoolScorer(), bs.Ranked(bs.Sink()), bs.ReferenceExecutor(), PIPELINE, object(),
        bs.TopK, bs.TritonTiles(16, 16, 4, 2), "TopK", b"", 0, 1, False, True, 0.5, nan, 1j, [], (), {},
        torch.ones(()),
    )  # fmt: skip
    return one(*(x for x in others if not isinstance(x, roles)))


NO_NUMBER = one(
    True, False, 1j, object(), {}, int, max, bs.TopK(1), "", "1", "0.5", "none", b"1", "x\ny" * 99, Decimal("0.5"),
    [], (), [[1]], ["1"], [True], np.zeros((3, 4)), np.bool_(1), torch.ones(2, 3), torch.tensor(True),
)  # fmt: skip
NO_WHOLE = [
    *NO_NUMBER, *one(nan, inf, -inf, torch.tensor(3), np.float64(2.0), [3]),
    lambda rng: rng.uniform(0.5, 400), lambda rng: float(rng.randrange(1, 999)),
]  # fmt: skip
NO_NUMBERS = NO_NUMBER + one(
    nan, -far, [0.5, None], [0.5, "0.5"], [0.5, nan], [0.5, 1j], torch.tensor([0.5, nan]), torch.ones(3, 3),
    torch.ones(0), torch.tensor([1j]), torch.tensor([True, False]), torch.ones(3, device="meta"),
    torch.ones(2).to_sparse(),
)  # fmt: skip
SIZE = NO_WHOLE + whole_below(1)
COUNT = NO_WHOLE + whole_below(0)
WRONG_GROUPS: list[Any] = [
    3, "0", {}, [PIPELINE], {0: None}, {"0": None}, {(0, True): None}, {(): None}, {(-1,): None}, {(0.5,): None},
    {(0, 0): None}, {(0,): None, (1, 0): None}, *({(0,): x} for x in ("pbs", bs.TopK(1), bs.Schedule(None))),
]  # fmt: skip
KINDS: dict[str, list[Draw]] = {
    "size": SIZE,
    "count": COUNT,
    "block": [*SIZE, lambda rng: rng.randrange(16385, 2**60), *one(far)],
    "seed": COUNT + one(2**32, far),
    "warps": SIZE + one(3, 64, 2**40),
    "consumers": SIZE + one(3, 4),
    "tile": SIZE + one(32, 65),
    "flag": no(bool) + one("no", "yes", 1, np.bool_(1), torch.tensor(True)),
    "option": no(str) + one("", "All", "none", "x\ny"),
    "share": NO_NUMBERS + beyond(0, -1) + beyond(1, 1) + one(0, far, [0.0, 0.5]),
    "probability": NO_NUMBERS + beyond(0, -1) + beyond(1, 1) + one(far),
    "cosine": NO_NUMBERS + beyond(-1, -1) + beyond(1, 1) + one(far),
    "at_least_0": NO_NUMBERS + beyond(0, -1),
    "positive": NO_NUMBERS + beyond(0, -1) + one(0, [1.0, 0.0], inf, far),
    "negative": NO_NUMBERS + beyond(0, 1) + one(0, far, [-1.0, 0.0], -inf),
    "budget": [*NO_NUMBERS, *beyond(1, -1), lambda rng: rng.randrange(1, 99) + 0.5, *one(0, far, inf, [3, 2.5])],
    "number": NO_NUMBERS + one(far),
    "three": NO_NUMBERS + one((1, 2), [1, 2, 3], (1, 2, 0), (1, True, 2), (1, 2.0, 3), "123", (-1, -1, 1), 4),
    "three_from_0": NO_NUMBERS + one((1, 2), [1, 2, 3], (1, 2, -1), (1, True, 2), (1, 2.0, 3), "123", 4),
    "band": NO_NUMBERS + one(0.5, (0.5,), [0.1, 0.2], (0.5, 0.5), (0.6, 0.2), (-0.1, 1), (0, 1.1), (nan, 1)),
    "part": [*NO_NUMBER, *beyond(0, -1), *beyond(1, 1), *one(0, nan, inf, [1.0], torch.tensor(1.0))],
    "from_0": [*NO_NUMBER, *beyond(0, -1), *one(nan, inf, [1.0], torch.tensor(1.0))],
    "lengths": NO_NUMBERS + one(0.5, (0.5,), [0.1, 0.2], (0.5, -0.1), (inf, 1), (0, inf), (nan, 1), (True, 1)),
    "above_0": NO_NUMBER + beyond(0, -1) + one(0, nan, inf, [1.0], torch.tensor(1.0)),
    "finite": NO_NUMBERS + one(inf, -inf, [0.5, inf], far),
    "permuter": no(bs.Permuter),
    "scorer": no(bs.Scorer),
    "selector": no(bs.Selector),
    "executor": no(bs.Executor),
    "operations": [*NO_NUMBER, *beyond(0, -1), *one(nan, inf, [1.0], torch.tensor(1e12), 1e31, far)],
    "softcap": [*NO_NUMBER, *beyond(0, -1), *one(0, nan, inf, [1.0], torch.tensor(50.0), 1e31, far)],
    "sinks": NO_NUMBERS + one(inf, [0.5, inf], 1e31, [0.5, 1e31], far),
    "scale": [*NO_NUMBER, *one(nan, inf, [1.0], 1e31, 1e-31, far)],
    "rule": no(bs.PositionSelector) + one(bs.TopK(2)),
    "rules": one(3, "ab", [], (), [3], [bs.TopK(2)], bs.Sink(), {"a": 1}, [bs.Sink(), None]),
    "order": one(3, "0123", torch.rand(4), [0, 1, 2], *([0, 1, 2, wrong] for wrong in (2, -1, 2**70, True, 3.0))),
    "tiles": no(bs.TritonTiles, bs.HopperTiles),
    "hopper": no(bs.HopperTiles),
    "dtype": one("float32", float, torch.int32, torch.bool, torch.complex64, 1),
    "device": no(str, torch.device),
    "pipeline": no(bs.Pipeline),
    "attention": one("pbs", 0, False, bs.TopK(1), bs.pbs_attn, [PIPELINE], nan),
    "groups": one(*WRONG_GROUPS),
    "layers": one([None], {"0": None}, {True: None}, {0.0: None}, {0: 3}, {1: bs.TopK(1)}, 3, "0", {None: None}),
    "sharing": one(0, "01", [0], [(0,)], [(0, True)], [(0.0, 1)], [(0, 1), (1, 2)], {0: (1, 2)}, [(None, 1)]),
    "dense": one(0, "01", [0.0], [True], [None], ["0"], {0}, (0, 0), object()),
    "flags": one(0, "no", ["no", "yes"], [0, 1], [None], torch.tensor([True]), [nan]),
}

RULES = {
    "True or False": "flag",
    "a whole number, at least 1": "size",
    "a whole number, at least 0": "count",
    "a whole number from 1 to 16384": "block",
    "a whole number from 0 to 2**32 - 1": "seed",
    "a whole number, at least 1, or one per query head": "budget",
    "a number in (0, 1], or one per query head": "share",
    "a number in [0, 1], or one per query head": "probability",
    "a number in [-1, 1], or one per query head": "cosine",
    "a number, at least 0, or one per query head": "at_least_0",
    "a number that fp64 can hold, not NaN, or one per query head": "number",
    "a finite number, or one per query head": "finite",
    "a finite number greater than 0, or one per query head": "positive",
    "a finite number below 0, or one per query head": "negative",
    "a finite number above 0": "above_0",
    "a finite number, at least 0": "from_0",
    "a number in (0, 1]": "part",
    "a number of floating-point operations from 0 to 1e30": "operations",
    "two numbers (begin, end) from 0 to 1, of which the second is greater": "band",
    "two finite numbers (mean, deviation), of which the second is at least 0": "lengths",
    "three whole numbers (T, H, W), each at least 1": "three",
    "three whole numbers (t, h, w), each at least 0": "three_from_0",
    "a Permuter": "permuter",
    "a Scorer": "scorer",
    "a Selector": "selector",
    "a PositionSelector": "rule",
    "an Executor": "executor",
    "a HopperTiles or a TritonTiles": "tiles",
}


def kinds_of(target: Callable[..., Any], given: dict[str, Any]) -> str:
    """The kind of each argument, by the rule that an error names; "?" where None means something."""
    kinds = []
    for name, argument in inspect.signature(target).parameters.items():
        try:
            target(**{**given, name: object()})
        except (TypeError, ValueError) as error:
            says = re.match(rf"'{name}' must be (.+?)(, or None)?: <object object", str(error))
            if says and (kind := "option" if says[1].startswith("'") else RULES.get(says[1])):
                takes_none = says[2] or re.search("None|Optional", str(argument.annotation))
                kinds.append(f"{name}={kind}{'?' if takes_none else ''}")
    return " ".join(kinds)


# A target, what it must be given, and the kind of each argument, where errors do not name a rule.
TARGETS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        bs.GivenOrder,
        {"grid": (1, 2, 2), "order": [0, 2, 1, 3]},
        "grid=three order=order prefix=count suffix=count?",
    ),
    (bs.KeyHistory().rewind, {"tokens": 3}, "tokens=count"),
    (
        bs.AttentionSpec,
        {"scale": 0.1},
        "scale=scale causal=flag window=size? softcap=softcap? sinks=sinks? remaining=count",
    ),
    (
        bs.TritonTiles,
        {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2},
        "block_m=size block_n=size num_warps=warps num_stages=size tma=flag",
    ),
    (
        bs.HopperTiles,
        {"consumers": 1, "block_n": 64, "num_stages": 2},
        "consumers=consumers block_n=tile num_stages=size per_sm=size",
    ),
    (
        bs.Pipeline,
        {name: getattr(PIPELINE, name) for name in ("permuter", "scorer", "selector", "executor")},
        "permuter=permuter scorer=scorer selector=selector executor=executor replay=flag",
    ),
    (bs.HeadGroups, {"groups": {(0,): None}}, "groups=groups"),
    (bs.HeadGroups.dense_where, {"dense": [False], "pipeline": PIPELINE}, "dense=flags pipeline=pipeline"),
    (bs.Schedule, {"default": None}, "default=attention? layers=layers dense=dense same_choice=sharing"),
    (bs.Schedule(None).resolve, {"layers": 4}, "layers=size"),
    (
        make_qkv,
        {"N": 5, "D": 4},
        "B=size Hq=size Hkv=size M=size? N=size D=size Dv=size? dtype=dtype device=device seed=seed",
    ),
]
# Presets, and stages with the arguments of their examples.
OTHERS: dict[Callable[..., Any], dict[str, Any]] = {
    **{preset: {} for preset in (*every_preset.values(), *video_presets.values())},
    bs.lva: {"period": 2, "radius": 1},
    bs.triangle_mix: {"starting_layer": 1},
    **{
        cls: {each.alias: getattr(example, each.name) for each in attrs.fields(cls) if each.init}
        for cls, example in stages.BY_CLASS.items()
        if cls is not bs.GivenOrder
    },
}
TARGETS += [(target, given, kinds_of(target, given)) for target, given in OTHERS.items()]
