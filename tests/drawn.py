"""Compositions and inputs as hypothesis draws them. A case prints as Python that makes it again."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

import blocksparse as bs
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.testing import make_qkv
from tests import layouts, stages
from tests.machine import GPU

PHASES, ALLOWED = (Phase.generate, Phase.shrink), (HealthCheck.too_slow, HealthCheck.data_too_large)
LAWS = settings(derandomize=True, deadline=None, database=None, phases=PHASES, suppress_health_check=ALLOWED)
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 83, 100, 129)
BLOCKS = (1, 3, 16, 20, 32, 48, 128)
LAYOUTS = {"plain": Tensor.contiguous, **layouts.LAYOUTS}
VALUES = ("topics", "normal", "constant", "ties", "large", "tiny", "zeros")


@frozen
class Case:
    """A composition and what it is called with."""

    permuter: bs.Permuter[Any]
    scorer: bs.Scorer[Any, Any]
    selector: bs.Selector[Any, Any]
    executor: bs.Executor[Any, Any]
    sizes: dict[str, int]
    causal: bool = True
    scale: float | None = None
    dtype: str = "float32"
    values: str = "topics"
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")
    seed: int = 0

    @property
    def pipeline(self) -> AnyPipeline:
        return bs.Pipeline(self.permuter, self.scorer, self.selector, self.executor)

    @property
    def call(self) -> dict[str, Any]:
        return {"causal": self.causal, "scale": self.scale}

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))  # hypothesis would name the classes of what `|` made

    def qkv(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (LAYOUTS[how](x.to(device)) for x, how in zip(self._plain(), self.layouts, strict=True))
        return q, k, v

    def _plain(self) -> list[Tensor]:
        M, N = self.sizes["M"], self.sizes["N"]
        sizes: dict[str, Any] = {**self.sizes, "M": None, "N": max(M, N)}
        q, k, v = make_qkv(**sizes, dtype=torch.float64, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        return [
            valued(x.contiguous(), self.values, generator).to(getattr(torch, self.dtype))
            for x in (q[:, :, q.shape[2] - M :], k[:, :, :N], v[:, :, :N])
        ]


def valued(x: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """`x`, or other numbers in its place."""
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return {
        "topics": x,
        "normal": noise,
        "constant": torch.ones_like(x),
        "ties": noise.round(),
        "large": 60 * x,
        "tiny": 1e-6 * x,
        "zeros": 0.0 * noise,  # of both signs
    }[kind]


@frozen
class Drawer:
    """What hypothesis draws, a simple value at a time: strategies for whole stages take ten times as long."""

    draw: st.DrawFn

    def one(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def maybe(self, value: Any) -> Any:
        return self.one(None, value)

    def sizes(self, causal: bool, longest: int) -> dict[str, int]:
        N, Hkv = self.one(*(n for n in LENGTHS if n <= longest)), self.number(1, 2)
        M = self.one(N, self.number(1, N if causal else N + 20))
        D = self.one(16, 1, 20, 64)
        Dv = self.one(D, D, 1, 24)
        B, Hq = self.number(1, 2), Hkv * self.number(1, 3)
        return {"B": B, "Hq": Hq, "Hkv": Hkv, "M": M, "N": N, "D": D, "Dv": Dv}

    def permuter(self, kind: type, block: int, N: int) -> bs.Permuter[Any]:
        """An order of `N` tokens whose groups are whole blocks."""
        some, segment = self.number(1, N + 9), block * self.number(1, 4)
        if kind is bs.GridOrder:  # examples, if `N` has room for their grids
            return self.one(*(p for p in stages.PERMUTERS if isinstance(p, kind))) if N > 60 else bs.Identity()
        if kind is bs.SegmentKeySort:
            flags = {"per_query_head": self.flag(), "causal_last_q": self.flag()}
            return kind(self.one(some, segment), last_q=self.number(1, N + 9), **flags)
        if kind is bs.SegmentQuerySort:
            keys = self.one(bs.Identity(), self.permuter(bs.SegmentKeySort, block, N))
            return kind(segment, block=block, keys=keys)
        if kind is bs.GlobalIndexMap:
            options = {"coarse": self.flag(), "per_query_head": self.flag(), "order_queries": self.flag()}
            options["near"] = self.one(0, self.number(1, N + 9))
            return kind(segment, prefix=self.maybe(some), guide=self.maybe(self.number(1, N + 9)), **options)
        plain: bs.Permuter[Any] = kind()
        return plain

    def scorer(self, kind: type, block: int) -> bs.Scorer[Any, Any]:
        """Scores of rows of `block` queries."""
        part = self.one(*(n for n in (1, 2, 4, 8, 16) if block % n == 0))
        # What halves the blocks halves these too.
        columns = self.one(None, 3 * block, *(block // n for n in (2, 4, 8) if block % (2 * n) == 0))
        if kind is bs.MeanPoolScorer:
            return kind(block, k_block=columns, padded_tail=self.flag())
        if kind is bs.FlattenMaxPoolScorer:
            return kind(block, part, per_token=self.flag(), padded_tail=self.flag())
        if kind is bs.AntidiagonalScorer:
            pattern = self.one("antidiagonal", "slash", "sum")
            flags = {"forced": self.flag(), "padded_tail": self.flag()}
            return kind(part, block=block, pattern=pattern, **flags)
        if kind is bs.SimilarityGatedScorer:
            return kind(self.scorer(bs.MeanPoolScorer, block), self.one(-1.0, 0.2, 0.9))
        if kind is bs.VerticalSlashScorer:
            return kind(block, last_q=self.maybe(self.number(1, 140)), pooled=self.flag())
        return kind(block) if kind is stages.AnyOrder else kind(block, k_block=columns)

    def selector(self, scorer: bs.Scorer[Any, Any], block: int, *, ranked: bool) -> bs.Selector[Any, Any]:
        """An example that takes what the scorer gives, alone or joined with a rule of drawn size."""
        share, tokens, seed = self.one(1e-6, 0.3, 0.9, 1.0), self.number(1, 150), self.number(0, 9)
        hashed = bs.Stride(tokens, seed, released=self.flag()), bs.Random(share, seed, released=self.flag())
        place = self.one(*(kind(tokens) for kind in (bs.Band, bs.Sink, bs.LastQueries, bs.LastKeys)), *hashed)
        fitting = [s for s in stages.selectors_for(scorer) if not isinstance(s, bs.GridSelector)]  # any length
        # These give a mask per KV head, a ranked mask, or one on another grid.
        odd = [s for s in fitting if isinstance(s, bs.SharedByGroup | bs.Ranked) or s in stages.REFINED]
        rule = self.one(*(s for s in fitting if s not in odd))
        if ranked:
            first = self.maybe(bs.Band(self.number(0, 150)))
            return bs.Ranked(self.one(rule, place, rule | place), first=first)
        every = (rule, place, rule | place, bs.SharedByGroup(rule), *(odd if block % 2 == 0 else ()))
        drawn: bs.Selector[Any, Any] = self.one(*every)
        return drawn


# The last one has an order for each segment of queries, and is causal only.
PERMUTERS = (bs.Identity, bs.SegmentKeySort, stages.Shuffle, bs.SegmentQuerySort, bs.GridOrder, bs.GlobalIndexMap)
SCORERS = (
    bs.MeanPoolScorer,
    bs.NoScorer,
    stages.AnyOrder,
    bs.FlattenMaxPoolScorer,
    bs.AntidiagonalScorer,
    bs.PrefixOrderScorer,
    bs.SimilarityGatedScorer,
    bs.VerticalSlashScorer,
)
EXECUTORS = (
    bs.ReferenceExecutor(),
    bs.GatherExecutor(0.0),
    bs.GatherExecutor(0.2),
    bs.GatherExecutor(0.3, patience=2, reduction="mean"),
    bs.GatherExecutor(0.1, commit=False),
    *(() if GPU else (bs.CpuExecutor(),)),
)


@st.composite
def cases(draw: st.DrawFn, /, *, executors: tuple[Any, ...] = EXECUTORS, **fixed: Any) -> Case:
    """Compositions whose declared types fit, with inputs; what is `fixed` is not drawn."""
    d = Drawer(draw)
    causal, block = fixed.pop("causal", None), d.one(*fixed.pop("blocks", BLOCKS))
    causal = d.one(True, False) if causal is None else causal
    # The reference takes a row of blocks after the other: rows of one token would take most of the time.
    longest = min(fixed.pop("longest", 200), {1: 33, 3: 65}.get(block, 200))
    sizes = d.sizes(causal, longest) | fixed.pop("sizes", {})
    executor = d.one(*executors)
    scorer = d.scorer(d.one(*fixed.pop("scorers", SCORERS)), block)
    needed = [stages.needs(scorer, bs.Scorer, 0), stages.needs(executor, bs.Executor, 0)]
    per_segment = causal and bs.GlobalPermutation not in needed
    kinds = fixed.pop("permuters", PERMUTERS if per_segment else PERMUTERS[:-1])
    drawn = {
        "permuter": d.permuter(d.one(*kinds), block, sizes["N"]),
        "scorer": scorer,
        "selector": d.selector(scorer, block, ranked=isinstance(executor, bs.GatherExecutor)),
        "executor": executor,
        "sizes": sizes,
        "causal": causal,
        "scale": d.one(None, 0.3, 1.0, 1e-3),
        "dtype": d.one("float32", "float32", "float64", "bfloat16", "float16"),
        "values": d.one(*VALUES),
        "layouts": d.one(3 * (d.one(*LAYOUTS),), tuple(d.one(*LAYOUTS) for _ in "qkv")),
        "seed": d.number(0, 99),
    }
    return Case(**drawn | fixed)
