"""What is refused, on every rank, with the reason and at most one fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import blocksparse as bs
from blocksparse.distributed import AllGatherKV, Ring, Ulysses
from blocksparse.distributed.scheme import Scheme
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.testing import make_qkv
from tests.distributed.cases import BFLA, PBS, STOPS_EARLY, Case, Dense, in_place

Error = type[Exception]
POOLED: AnyPipeline = bs.mean_pooling(block=16)


def refused(words: str, call: Callable[[DeviceMesh], object], error: Error = ValueError) -> Case:
    """A case: the call is refused with an error that has these words, on one line."""

    def case(mesh: DeviceMesh) -> None:
        with pytest.raises(error, match=words) as caught:
            call(mesh)
        assert "\n" not in str(caught.value)

    return case


def call_of(
    make: Callable[[DeviceMesh], Callable[..., object]], *, causal: bool = True, **sizes: Any
) -> Callable[..., object]:
    """A call with shards of equal length."""

    def call(mesh: DeviceMesh) -> object:
        rank, size = mesh.get_local_rank("ranks"), mesh.size()
        q, k, v = (x.tensor_split(size, 2)[rank] for x in make_qkv(**{"N": 128, **sizes}))
        return make(mesh)(q, k, v, causal=causal)

    return call


def windowed(scheme: Callable[..., Scheme]) -> Callable[[DeviceMesh], Callable[..., object]]:
    return lambda mesh: partial(scheme(POOLED, mesh, "ranks"), window=40)


def packed_over(kind: type[Scheme], method: str) -> Callable[[DeviceMesh], Callable[..., object]]:
    sequences = bs.Sequences.packed([60, 68])
    return lambda mesh: partial(getattr(kind(POOLED, mesh, "ranks"), method), sequences=sequences)


def gather(pipeline: AnyPipeline, **sizes: Any) -> Callable[..., object]:
    return call_of(lambda mesh: AllGatherKV(pipeline, mesh, "ranks"), **sizes)


def on_rank_1(**changed: Any) -> Case:
    """A case: rank 1 makes another call than rank 0, and both say so."""

    def case(mesh: DeviceMesh) -> None:
        rank = mesh.get_local_rank("ranks")
        arguments = {"N": 32, **(changed if rank else {})}
        options = {
            name: arguments.pop(name) for name in ("causal", "scale", "remaining", "softcap") if name in arguments
        }
        parts, attention = arguments.pop("parts", 2), arguments.pop("attention", POOLED)
        message = r"^the ranks of mesh dimension 'ranks' must make one call with the same"
        with pytest.raises(ValueError, match=message):
            Ulysses(attention, mesh, "ranks", parts=parts)(*make_qkv(seed=rank, **arguments), **options)

    return case


def one_rank_is_refused(mesh: DeviceMesh) -> None:
    """The rank whose inputs are refused says why, and the other that it has."""
    rank, (q, k, v) = mesh.get_local_rank("ranks"), make_qkv(N=32)
    for scheme in (kind(POOLED, mesh, "ranks") for kind in (Ulysses, AllGatherKV, Ring)):
        if rank == 1:
            with pytest.raises(ValueError, match="'k' must have the head dim of 'q'"):
                scheme(q, k[..., :8], v)
        else:
            with pytest.raises(RuntimeError, match="rank 1 of mesh dimension 'ranks' refused its inputs"):
                scheme(q, k, v)


def uneven_head_and_tail(mesh: DeviceMesh) -> object:
    q, k, v = make_qkv(N=80 - 16 * mesh.get_local_rank("ranks"))
    return AllGatherKV(POOLED, mesh, "ranks", head_tail=True)(q, k, v)


def around_a_ring(_: DeviceMesh) -> object:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "ranks"))
    scheme = Ulysses(Ring(PBS, mesh, "ranks"), mesh, "one")
    return scheme(*make_qkv(N=64), sequences=bs.Sequences.packed([30, 34]))


class NoLse(Dense):
    """An executor without lse."""

    def __call__(self, *arguments: Any, **options: Any) -> bs.AttentionOutput:
        return dataclasses.replace(super().__call__(*arguments, **options), lse=None)


def without_lse(kind: type[Scheme]) -> Callable[[DeviceMesh], object]:
    pipeline = evolve(POOLED, executor=NoLse(0))
    return lambda mesh: kind(pipeline, mesh, "ranks").with_lse(*make_qkv(N=64))


@attrs.frozen(eq=False)
class OwnSelector(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A stage of a user."""

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        return bs.BlockMask(scores.grid.visible.expand(scores.values.shape), scores.grid)


def pipeline(selector: bs.Selector[Any, Any], scorer: bs.Scorer[Any, Any] | None = None) -> AnyPipeline:
    return in_place(scorer or bs.MeanPoolScorer(16), selector)


BY_VALUES = bs.OutputAwareScorer(4, block=16, lengths=(1.0, 0.2))

REFUSED: dict[str, Case] = {
    "no such dimension": refused(
        "the mesh has no dimension 'sp'. It has 'ranks'", lambda mesh: Ulysses(PBS, mesh, "sp")
    ),
    "a number": refused(
        "'dim' must be the name", lambda mesh: Ring(PBS, mesh, 0), TypeError  # type: ignore[arg-type]
    ),
    "no mesh": refused(
        "'mesh' must be a DeviceMesh", lambda _: Ring(PBS, "cpu", "x"), TypeError  # type: ignore[arg-type]
    ),
    "no pipeline": refused(
        "must be a Pipeline", lambda mesh: AllGatherKV(Ring(PBS, mesh, "ranks"), mesh, "ranks"), TypeError
    ),
    "one dimension twice": refused(
        "along another dimension", lambda mesh: Ulysses(Ring(PBS, mesh, "ranks"), mesh, "ranks")
    ),
    "packed by a list": refused(
        "'sequences' must be a Sequences or None: list",
        lambda mesh: Ulysses(PBS, mesh, "ranks")(*make_qkv(N=64), sequences=[64, 64]),  # type: ignore[arg-type]
        TypeError,
    ),
    "packed otherwise": refused(
        "The lengths of packed sequences must sum to the tokens",
        call_of(lambda mesh: partial(Ulysses(PBS, mesh, "ranks"), sequences=bs.Sequences.packed([30, 33])), N=64),
    ),
    "packed around a scheme": refused("'sequences' are for a Ulysses around a pipeline", around_a_ring),
    "three heads": refused(
        "3 query heads and 3 KV heads cannot be spread evenly over 2 ranks",
        call_of(lambda mesh: Ulysses(PBS, mesh, "ranks"), Hq=3, Hkv=3),
    ),
    "split heads with one order": refused(
        "per_query_head=True", call_of(lambda mesh: Ulysses(PBS, mesh, "ranks"), Hkv=1)
    ),
    "split heads with one mask": refused(
        "'SharedByGroup' joins", call_of(lambda mesh: Ulysses(BFLA, mesh, "ranks"), Hkv=1)
    ),
    "draws by head": refused(
        "'Random' needs the index of the KV head",
        call_of(lambda mesh: Ulysses(pipeline(bs.Random(0.5)), mesh, "ranks")),
    ),
    "density of other heads": refused(
        r"'density' must have one entry per query head \(4\): 3",
        call_of(lambda mesh: Ulysses(PBS, mesh, "ranks", density=[1, 2, 3])),
    ),
    "options of other heads": refused(
        r"a per-head value needs one entry per query head \(4\): 2",
        call_of(lambda mesh: Ulysses(bs.mean_pooling([0.5, 0.6], block=16), mesh, "ranks")),
    ),
    "last queries": refused(
        "'VerticalSlashScorer' scores by the last queries of a call, .*. Use Ulysses",
        gather(bs.minference(block=16)),
    ),
    "budget of a head": refused("'GlobalTopCdf' has one budget for all rows", gather(pipeline(bs.GlobalTopCdf()))),
    "own stage": refused("OwnSelector does not say where queries may be cut", gather(pipeline(OwnSelector()))),
    "own stage in a union": refused(
        "OwnSelector does not say where", gather(pipeline(bs.TopK(1) | OwnSelector()))
    ),
    "share of all keys": refused("'of_all_keys'", gather(pipeline(bs.TopK(share=0.5, of_all_keys=True)))),
    "mean of all keys": refused(
        "'smooth_k'",
        gather(pipeline(bs.TopK(1), bs.SimilarityGatedScorer(bs.MeanPoolScorer(16), 0.5, smooth_k=True))),
    ),
    "ways out of heads that Ulysses refuses": refused(
        "which only its last part has. Give a pipeline that chooses in each row of blocks by itself, as auto",
        gather(bs.minference(block=16), Hq=3, Hkv=3),
    ),
    "ring of values": refused(
        "OutputAwareScorer scores blocks by values, .*. Use AllGatherKV",
        call_of(lambda mesh: Ring(pipeline(bs.TopK(1), BY_VALUES), mesh, "ranks")),
    ),
    "ranks at other places of a prompt": on_rank_1(remaining=5),
    "rows of a chunk": refused("'Stride' with 'released'", gather(pipeline(bs.Stride(3, released=True)))),
    "band without positions": refused(
        "'Band' needs the positions of queries", gather(pipeline(bs.Band(3)), causal=False)
    ),
    "order of a video": refused(
        "'HilbertOrder' orders all queries of a call together",
        gather(bs.sparge(order=bs.HilbertOrder((2, 8, 8)), block=16, k_block=16), causal=False),
    ),
    "cut inside a block": refused(
        "shards of queries must begin at multiples of 16 tokens",
        lambda mesh: AllGatherKV(POOLED, mesh, "ranks")(*make_qkv(N=72)),
    ),
    "head and tail of other lengths": refused(
        "head-tail shards must be pieces of one length", uneven_head_and_tail
    ),
    "more queries than keys": refused(
        "Nq=130, Nk=128 over all ranks", call_of(lambda mesh: Ulysses(PBS, mesh, "ranks"), M=130)
    ),
    "too few tokens": refused(
        "20 tokens are too few for 4 pieces over 2 ranks.* Use fewer ranks or leave out head_tail",
        lambda mesh: AllGatherKV(POOLED, mesh, "ranks", head_tail=True).shard(torch.arange(20), 0),
    ),
    "ring of own orders": refused("its own order", lambda mesh: Ring(STOPS_EARLY, mesh, "ranks")),
    "ring that stops early": refused(
        "visits all blocks of a row in one order",
        lambda mesh: Ring(evolve(pipeline(bs.Ranked(bs.TopK(2))), executor=bs.GatherExecutor(0.1)), mesh, "ranks"),
    ),
    "ring with sinks": refused(
        "the call has sinks, and a ring, .* would count them each time. Use AllGatherKV",
        call_of(lambda mesh: partial(Ring(POOLED, mesh, "ranks"), sinks=3.0)),
    ),
    **{
        f"{scheme.__name__} with a window": refused(
            "the call has a sliding window of 40 tokens, and no scheme supports windows",
            call_of(windowed(scheme)),
        )
        for scheme in (Ulysses, AllGatherKV, Ring)
    },
    "with a window in a graph": refused(
        "no scheme supports windows", call_of(lambda mesh: torch.compile(windowed(Ring)(mesh), backend="eager"))
    ),
    **{
        f"packed, {name} of {kind.__name__}": refused(
            r"'sequences' are for a plain call of a Ulysses, .* or call once for each prompt\.",
            call_of(packed_over(kind, name)),
            TypeError,
        )
        for kind, name in (
            (AllGatherKV, "__call__"), (Ring, "with_lse"), (Ulysses, "with_lse"), (Ulysses, "measured")
        )
    },
    "ring of a chunk inside a block": refused(
        "must begin at a multiple of 16 tokens", call_of(lambda mesh: Ring(POOLED, mesh, "ranks"), M=60)
    ),
    "ulysses without lse": refused("NoLse gives no lse for tensors on cpu", without_lse(Ulysses)),
    "gathered without lse": refused("NoLse gives no lse for tensors on cpu", without_lse(AllGatherKV)),
    "ring without lse": refused("NoLse gives no lse .* by which a ring merges", without_lse(Ring)),
    "ranks with other sizes": on_rank_1(D=32),
    "ranks with other scales": on_rank_1(scale=0.5),
    "ranks with other causality": on_rank_1(causal=False),
    "ranks with other dtypes": on_rank_1(dtype=torch.float16),
    "ranks with other options": on_rank_1(parts=1),
    "ranks with other pipelines": on_rank_1(attention=bs.mean_pooling(0.5, block=16)),
    "ranks with other softcaps": on_rank_1(softcap=3.0),
    "one rank is refused": one_rank_is_refused,
}  # fmt: skip
