"""What every rank of two or of four processes does, by name; a case raises where a scheme is not one process."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import attrs
import pytest
import torch
from benchmarks.distributed import SCHEMES as BENCHMARKED
from benchmarks.distributed import Here, Shape, at_length, near
from benchmarks.distributed_report import as_results, table
from benchmarks.distributed_stages import uniform
from benchmarks.timing import WrongOutputError
from torch.distributed.device_mesh import DeviceMesh

import blocksparse as bs
from blocksparse.distributed import AllGatherKV, Ring, Ulysses
from blocksparse.distributed.scheme import Scheme
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.testing import every_preset, make_qkv, video_presets
from tests.distributed.watched import compare

Case = Callable[[DeviceMesh], None]
Make = Callable[[AnyPipeline, DeviceMesh], Scheme]


def in_place(scorer: bs.Scorer[Any, Any], selector: bs.Selector[Any, Any]) -> AnyPipeline:
    return bs.Pipeline(bs.Identity(), scorer, selector, bs.CpuExecutor())


PBS: AnyPipeline = bs.pbs_attn(0.7, block=16, S=32)
PER_HEAD: AnyPipeline = bs.mean_pooling([0.4, 0.9, 0.6, 0.7], block=16)
BFLA = in_place(
    bs.FlattenMaxPoolScorer(32, 8),
    bs.Refined(bs.SharedByGroup(bs.TopCdf(0.5)), 2) | bs.OnTiles(bs.Band(8) | bs.Stride(3), 2),
)
DRAWN = in_place(bs.PrefixOrderScorer(16), bs.TopCdf(0.3) | (bs.Random(0.2) | bs.Stride(5)))
QUERIES_SORTED: AnyPipeline = attrs.evolve(
    in_place(bs.MeanPoolScorer(16), bs.TopK(share=0.4) & bs.TopCdf(0.9)),
    permuter=bs.SegmentQuerySort(32, block=16, keys=bs.SegmentKeySort(32, last_q=70)),
)
STOPS_EARLY: AnyPipeline = bs.s2o(0.1, S=32, block=16, band=40)
NOT_CAUSAL: AnyPipeline = bs.sparge(0.6, block=16, k_block=16)


def over_ranks(kind: Any, pipeline: AnyPipeline, mesh: DeviceMesh, **options: Any) -> Scheme:
    made: Scheme = kind(pipeline, mesh, "ranks", **options)
    return made


ulysses, gathered, ring = (partial(over_ranks, kind) for kind in (Ulysses, AllGatherKV, Ring))


def equal(make: Make, pipeline: AnyPipeline, *, causal: bool = True, **sizes: Any) -> Case:
    """A case: the scheme is one process on these inputs."""

    def case(mesh: DeviceMesh) -> None:
        compare(lambda watched: make(watched, mesh), pipeline, make_qkv(**sizes), causal=causal)

    return case


def measured(mesh: DeviceMesh) -> None:
    """Densities measured on ranks are those of one process, and heads spread by them give the same output."""
    q, k, v = make_qkv(Hq=8, Hkv=4)
    pipeline = bs.mean_pooling([0.2, 0.3, 0.9, 0.95, 0.3, 0.3, 0.9, 0.8], block=16)
    plain = Ulysses(pipeline, mesh, "ranks")
    local = [plain.shard(x) for x in (q, k, v)]
    density = plain.measured(*local)
    assert torch.equal(density, pipeline.trace(q, k, v).density()[0])
    balanced = attrs.evolve(plain, density=density)
    torch.testing.assert_close(balanced(*local), plain(*local))
    compare(lambda watched: Ulysses(watched, mesh, "ranks", density=density), pipeline, (q, k, v))


def unequal_shards(mesh: DeviceMesh) -> None:
    """Ranks may have any numbers of tokens, in memory as models have them, and a negative scale."""
    rank, (q, k, v) = mesh.get_local_rank("ranks"), make_qkv(N=160, M=100, B=2)
    queries, keys = ([slice(0, 33), slice(0, 128)], [slice(33, 100), slice(128, 160)])[rank]
    q, want = q.transpose(1, 2).contiguous().transpose(1, 2), PBS(q, k, v, scale=-0.2)
    for scheme in (Ulysses(PBS, mesh, "ranks"), AllGatherKV(bs.mean_pooling(block=1), mesh, "ranks")):
        want = scheme.attention(q, k, v, scale=-0.2)
        got = scheme(q[:, :, queries], k[:, :, keys], v[:, :, keys], scale=-0.2)
        torch.testing.assert_close(got, want[:, :, queries])
    ends = slice(0, 64) if rank == 0 else slice(64, 160)
    got = Ring(PBS, mesh, "ranks")(k[:, :, ends], k[:, :, ends], v[:, :, ends])
    torch.testing.assert_close(got, PBS(k, k, v)[:, :, ends])


def uneven_shards_of_28_and_7_heads(mesh: DeviceMesh) -> None:
    """Four ranks with other numbers of tokens each; heads that they do not divide are refused, with a way out."""
    (q, k, v), pipeline = make_qkv(Hq=28, Hkv=7, N=201, D=16), bs.auto(block=16)
    its = slice(*((0, 16), (16, 128), (128, 160), (160, 201))[mesh.get_local_rank("ranks")])

    def assert_one_process(kind: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        got = kind(pipeline, mesh, "ranks")(q[:, :, its], k[:, :, its], v[:, :, its])
        torch.testing.assert_close(got, pipeline(q, k, v)[:, :, its])

    for kind in (AllGatherKV, Ring):
        assert_one_process(kind, q, k, v)
    with pytest.raises(ValueError, match=r"28 query heads and 7 KV heads .* over 4 ranks.* Or use AllGatherKV"):
        assert_one_process(Ulysses, q, k, v)
    assert_one_process(Ulysses, q[:, :16], k[:, :4], v[:, :4])


@attrs.frozen(eq=False)
class Dense(bs.Executor[bs.GlobalPermutation, bs.BlockMask]):
    """Like `AutoExecutor` on a GPU: dense where there is little work, by the sizes of the whole call."""

    least: int

    def unsupported(self, *given: Any) -> list[str]:
        return []

    def dense_because(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Any) -> str | None:
        return "there is little work" if q.shape[1] * q.shape[2] * k.shape[2] < self.least else None

    def __call__(self, *given: Any, **more: Any) -> bs.AttentionOutput:
        return bs.CpuExecutor()(*given, **more)


def decided_as_a_whole(mesh: DeviceMesh) -> None:
    """Whether a call is dense follows from all of its heads and tokens, not from those of a rank."""
    q, k, v = make_qkv(N=128)
    work = 4 * 128 * 128
    for least in (work, work + 1):
        pipeline = attrs.evolve(PBS, executor=Dense(least))
        want = pipeline(q, k, v)
        assert torch.equal(want, PBS(q, k, v)) == (least == work)
        for scheme in (Ulysses(pipeline, mesh, "ranks"), AllGatherKV(pipeline, mesh, "ranks", head_tail=True)):
            part = [scheme.shard(x) for x in (q, k, v)]
            torch.testing.assert_close(scheme(*part), scheme.shard(want))
            torch.testing.assert_close(scheme.with_lse(*part).out, scheme.shard(PBS(q, k, v)))


def packed(mesh: DeviceMesh) -> None:
    """Prompts that lie across the ranks' shards, one of them a chunk; what belongs to none is 0."""
    q, k, v = make_qkv(N=230, M=190)
    spans = [(0, 0, 70, 0, 70), (0, 70, 60, 70, 100), (0, 135, 55, 170, 55)]
    sequences = bs.Sequences(spans, batch=1, queries=190, keys=230)
    for pipeline in (PBS, STOPS_EARLY, PER_HEAD):
        scheme = Ulysses(pipeline, mesh, "ranks")
        got = scheme(*(scheme.shard(x) for x in (q, k, v)), sequences=sequences)
        torch.testing.assert_close(got, scheme.shard(pipeline(q, k, v, sequences=sequences)))
    # Prompts that continue the same keys: there are more queries than keys.
    scheme = Ulysses(PBS, mesh, "ranks")
    shared = bs.Sequences([(0, i, 60, 0, 60) for i in (0, 60, 120)], batch=1, queries=190, keys=60)
    got = scheme(*(scheme.shard(x) for x in (q, k[:, :, :60], v[:, :, :60])), sequences=shared)
    torch.testing.assert_close(got, scheme.shard(PBS(q, k[:, :, :60], v[:, :, :60], sequences=shared)))


def chunk_of_a_prompt(mesh: DeviceMesh) -> None:
    """Ranks with a chunk give what one process gives, which is what the whole prompt gives."""
    q, k, v = make_qkv(N=300)
    want = ENDS(q, k, v)[:, :, :272]
    chunk = [x[:, :, :272] for x in (q, k, v)]
    for kind in SCHEMES:
        scheme = kind(ENDS, mesh, "ranks")
        got = scheme(*(scheme.shard(x) for x in chunk), remaining=28)
        torch.testing.assert_close(got, scheme.shard(want))
    ulysses, sequences = Ulysses(ENDS, mesh, "ranks"), bs.Sequences.packed([272], remaining=[28])
    got = ulysses(*(ulysses.shard(x) for x in chunk), sequences=sequences)
    torch.testing.assert_close(got, ulysses.shard(want))


def compiled(mesh: DeviceMesh) -> None:
    """A call is one node of a graph."""
    q, k, v = make_qkv(N=128)
    scheme = Ulysses(PBS, mesh, "ranks")
    part = [scheme.shard(x) for x in (q, k, v)]
    graph = torch.compile(lambda q, k, v: scheme(q, k, v) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(*part), scheme(*part) + 1)


def benchmarked(mesh: DeviceMesh) -> None:
    """The benchmark measures every scheme and dense attention, and tells them as a table."""
    here = Here(mesh.get_local_rank("ranks"), 2, torch.device("cpu"), mesh)
    shape = Shape(4, 2, 16, 16, torch.float32)
    rows = list(at_length(here, shape, 768, None, Namespace(budget=1.0, schemes=BENCHMARKED)))
    *schemes, _ = BENCHMARKED
    assert [row["scheme"] for row in rows] == ["one process", "ulysses", "one process", *schemes]
    assert all(row["ms"] > 0 and row["attention_ms"] > 0 and row["longest_over_mean"] >= 1 for row in rows)
    assert {row["calls"] for row in rows} <= set(range(1, 21))
    assert [row["same_masks"] for row in rows if row["ranks"] == 2] == [None] + [True] * 4
    assert len(table(rows).strip().splitlines()) == 2 + len(rows)
    shown = as_results(rows)["rows"]
    assert shown[1][1] == "dense, `Ulysses`"
    assert shown[3][5] == f"{rows[2]['ms'] / rows[3]['ms']:.2f}x"
    assert shown[3][6] == f"{rows[1]['ms'] / rows[3]['ms']:.1f}x"


def benchmark_fails_together(mesh: DeviceMesh) -> None:
    """What one rank cannot do is a row on all ranks; other blocks and outputs are errors on all of them."""
    here = Here(mesh.get_local_rank("ranks"), 2, torch.device("cpu"), mesh)

    def work() -> dict[str, Any]:
        if here.rank == 1:
            raise ValueError("too long")
        return {}

    why = "ValueError: too long" if here.rank == 1 else "another rank failed"
    assert here.attempt(work) == {"why": why}
    qkv = make_qkv(Hq=4, Hkv=2, N=512)
    want, other = (uniform(bs.auto(alpha=alpha, block=16))(*qkv) for alpha in (0.06, 0.062))
    near(here, want, want, 512, by_row=True)
    with pytest.raises(WrongOutputError, match="other blocks than one process"):
        near(here, other if here.rank == 1 else want, want, 512, by_row=True)
    with pytest.raises(WrongOutputError, match="from one process"):
        near(here, want * 1.02 if here.rank == 1 else want, want, 512)


_KEPT: Any = bs.TopCdf(0.3) | (bs.Band(8) | bs.LastQueries(40)) | bs.LastKeys(20) | bs.DecayingTopK(3)
ENDS = in_place(bs.MeanPoolScorer(16), _KEPT)
TEXT = in_place(bs.MeanPoolScorer(16), bs.TopCdf(0.3) | bs.LastKeys(20) | bs.LastQueries(20))
SCHEMES: tuple[Any, ...] = (Ulysses, AllGatherKV, Ring)


def _refused(
    kind: Any, pipeline: AnyPipeline, mesh: DeviceMesh, qkv: Any, want: torch.Tensor, causal: bool
) -> str:
    """Why a scheme refuses these heads; nothing where it is one process."""
    try:
        scheme = kind(pipeline, mesh, "ranks")
        got = scheme(*(scheme.shard(x, causal=causal) for x in qkv), causal=causal)
    except ValueError as error:
        return str(error)
    torch.testing.assert_close(got, scheme.shard(want, causal=causal))
    return ""


def every_preset_in_every_scheme(mesh: DeviceMesh) -> None:
    """It is one process, or is refused with a way out that works for these heads."""
    grid, more = (2, 16, 20), {"lva": {"period": 2, "radius": 3}, "svg2": {"q_clusters": 9, "k_clusters": 12}}
    for Hq, Hkv in ((4, 2), (14, 7)):
        qkv = make_qkv(Hq=Hq, Hkv=Hkv, N=640, D=16)
        for name, preset in (every_preset | video_presets).items():
            given: dict[str, Any] = {"grid": grid} if "grid" in signature(preset).parameters else {}
            pipeline, causal = preset(**given, **more.get(name, {})), name in every_preset
            want = pipeline(*qkv, causal=causal)
            for kind in SCHEMES:
                if not (because := _refused(kind, pipeline, mesh, qkv, want, causal)):
                    continue
                assert name != "auto" or (kind is Ulysses and Hkv == 7), because
                if "as auto() does" in because:  # which has just been tried
                    continue
                others = [each for each in SCHEMES if f"Use {each.__name__}" in because]
                assert others, because
                for other in others:
                    assert not _refused(other, pipeline, mesh, qkv, want, causal), because


TWO: dict[str, Case] = {
    "every preset in every scheme": every_preset_in_every_scheme,
    "gathered, the end of a prompt": equal(gathered, ENDS, N=201, M=150),
    "gathered, head and tail, the end of a prompt": equal(partial(gathered, head_tail=True), ENDS, N=201),
    "gathered, not causal, the end of a prompt": equal(gathered, TEXT, causal=False, M=90, N=130),
    "ring, the end of a prompt": equal(ring, ENDS, N=201),
    "ring, not causal, the end of a prompt": equal(partial(ring, head_tail=True), TEXT, causal=False, N=250),
    "a chunk whose prompt goes on": chunk_of_a_prompt,
    "ulysses, ragged": equal(ulysses, PBS, N=201, B=2),
    "ulysses, last queries": equal(ulysses, bs.flex_prefill(0.7, block=16), M=75),
    "ulysses, options per head": equal(partial(ulysses, density=[1, 5, 1, 1], parts=1), PER_HEAD, Hkv=4),
    "ulysses, early stop": equal(partial(ulysses, parts=3), STOPS_EARLY, Hq=12, Hkv=6, N=161),
    "ulysses, shared masks": equal(ulysses, BFLA, Hq=6, Hkv=2, Dv=32),
    "ulysses, not causal": equal(ulysses, NOT_CAUSAL, causal=False, M=90, N=130),
    "ulysses, bfloat16": equal(ulysses, PBS, dtype=torch.bfloat16),
    "ulysses, float64": equal(ulysses, PBS, dtype=torch.float64),
    "ulysses, measured densities": measured,
    "gathered, keys ordered by queries of both ranks": equal(gathered, QUERIES_SORTED, N=129),
    "gathered, chunk": equal(gathered, PBS, M=75, N=300, B=2),
    "gathered, head and tail": equal(partial(gathered, head_tail=True), PBS, M=200, N=370),
    "gathered, early stop": equal(partial(gathered, head_tail=True), STOPS_EARLY, N=201),
    "gathered, shared masks": equal(gathered, BFLA, Hq=6, Hkv=2, Dv=32),
    "gathered, random blocks": equal(partial(gathered, head_tail=True), DRAWN, M=150, N=200),
    "gathered, antidiagonals": equal(gathered, bs.pbs_attn_plus(0.7, stride=4, block=16, S=32), N=201),
    "gathered, options per head": equal(gathered, PER_HEAD, M=100),
    "gathered, float64": equal(partial(gathered, head_tail=True), PBS, dtype=torch.float64),
    "gathered, not causal": equal(gathered, NOT_CAUSAL, causal=False, M=90, N=130),
    "ring, ragged": equal(ring, PBS, N=201, B=2),
    "ring, queries sorted": equal(partial(ring, head_tail=True), QUERIES_SORTED, N=201),
    "ring, chunk": equal(ring, PBS, M=150, N=310),
    "ring, head and tail of a chunk": equal(partial(ring, head_tail=True), PBS, M=224, N=320),
    "ring, shared masks": equal(ring, BFLA, Hq=6, Hkv=2, Dv=32),
    "ring, antidiagonals": equal(ring, bs.xattention(0.7, stride=4, block=16), N=201),
    "ring, options per head": equal(ring, PER_HEAD, M=104),
    "ring, bfloat16": equal(ring, PBS, dtype=torch.bfloat16),
    "ring, not causal": equal(ring, NOT_CAUSAL, causal=False, M=90, N=130),
    "unequal shards": unequal_shards,
    "dense or sparse as a whole": decided_as_a_whole,
    "compiled": compiled,
    "packed": packed,
    "benchmarked": benchmarked,
    "benchmark fails together": benchmark_fails_together,
}


def both(inner: type[AllGatherKV] | type[Ring]) -> Make:
    """Heads over one dimension of a mesh, sequences over the other."""
    return lambda pipeline, mesh: Ulysses(inner(pipeline, mesh, "sequence", head_tail=True), mesh, "heads")


def refused_by_one(mesh: DeviceMesh) -> None:
    """The ranks of the scheme inside are told as well, so that none of the others waits."""
    q, k, v = make_qkv(N=64)
    rank = mesh.get_rank()
    with pytest.raises(RuntimeError if rank else TypeError, match="refused its inputs" if rank else "one dtype"):
        both(AllGatherKV)(PBS, mesh)(q if rank else q.double(), k, v)
    said = "refused its inputs" if rank else "'sequences' are for a Ulysses around a pipeline"
    options: dict[str, Any] = {} if rank else {"sequences": bs.Sequences.packed([64])}
    with pytest.raises(RuntimeError if rank else ValueError, match=said):
        both(AllGatherKV)(PBS, mesh)(q, k, v, **options)


FOUR: dict[str, Case] = {
    "ulysses, replicated keys": equal(ulysses, PER_HEAD, N=201),
    "ulysses, replicated keys, own orders": equal(
        partial(ulysses, density=range(1, 9)), bs.pbs_attn(0.7, block=16, S=32, per_query_head=True), Hq=8, Hkv=2
    ),
    "uneven shards of 28 and 7 heads": uneven_shards_of_28_and_7_heads,
    "gathered, few tokens": equal(gathered, PBS, M=97, N=98 + 32),
    "gathered, head and tail": equal(partial(gathered, head_tail=True), PBS, N=250, B=2),
    "ring": equal(partial(ring, head_tail=True), PBS, N=250),
}
TWO_BY_TWO: dict[str, Case] = {
    "heads and gathered sequences": equal(both(AllGatherKV), PBS, N=201, B=2),
    "heads and gathered chunk": equal(both(AllGatherKV), PBS, M=200, N=370),
    "heads and a part with fewer keys than queries": equal(both(AllGatherKV), PER_HEAD, M=241, N=257),
    "one rank is refused": refused_by_one,
    "heads and gathered sequences, options per head": equal(both(AllGatherKV), PER_HEAD),
    "heads and ring": equal(both(Ring), PBS, N=201),
}
