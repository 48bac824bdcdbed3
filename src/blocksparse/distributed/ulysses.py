"""Sequence shards become head shards: an all-to-all before and one after attention (DeepSpeed-Ulysses)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, final

import torch
from attrs import converters, evolve, field, frozen
from torch import Tensor

from blocksparse.distributed import whole
from blocksparse.distributed.call import Call, checked, lengths
from blocksparse.distributed.heads import of_heads, refuse_apart, spread
from blocksparse.distributed.ranks import Ranks, Transfer
from blocksparse.distributed.scheme import Scheme
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.head_groups import AnyPipeline, Heads
from blocksparse.per_head import HeadValues, PerHead, at_least_0, per_head
from blocksparse.pipeline import Pipeline
from blocksparse.precision import without_autocast
from blocksparse.validators import a, optional, size
from blocksparse.validators import whole as a_whole_number


@final
@frozen(eq=False)
class Ulysses(Scheme):
    """Every rank attends in some heads to whole sequences (DeepSpeed-Ulysses, arXiv 2309.14509).

    An all-to-all turns the ranks' shards of sequences into whole sequences of a share of the heads; attention runs
    there unchanged, with any pipeline that chooses in each KV head by itself; another all-to-all turns its output
    back. Shards are consecutive tokens in the order of ranks, and may be of unequal lengths.

    The ranks must divide the KV heads. If there are more ranks than KV heads, they must be a multiple of them and
    divide the query heads; a KV head is then copied to each rank that has some of its query heads.

        Ulysses(pbs_attn(0.9), init_device_mesh("cuda", (8,), mesh_dim_names=("heads",)), "heads")

    Args:
        attention: a pipeline; or another scheme along another dimension, whose shards are then split.
        mesh: a DeviceMesh.
        dim: the name of the dimension of the mesh over which heads are spread.
        density: the density of each query head, as `measured` gives it, by which heads are spread so that ranks
            have equally many heads and much the same work. Equal densities if None. All ranks must give the same.
        parts: in how many parts a rank attends to its KV heads, one after another, so that the heads of the next
            part travel meanwhile, and so do outputs; at most as many as it has KV heads.
    """

    density: PerHead | None = field(
        default=None, converter=converters.optional(per_head), validator=optional(at_least_0), kw_only=True
    )
    parts: int = field(default=2, converter=a_whole_number, validator=size, kw_only=True)
    _of_heads: dict[tuple[Heads, int], AnyPipeline | Scheme] = field(init=False, repr=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        a(Pipeline, Scheme).check(attention=self.attention)
        if (
            isinstance(self.attention, Scheme)
            and self.attention.mesh is self.mesh
            and self.attention.dim == self.dim
        ):
            raise ValueError(f"'attention' must go along another dimension of the mesh than {self.dim!r}")

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        output, _ = self._run(q, k, v, call)
        return output

    def measured(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> Tensor:
        """Make the call, and return the density of every query head, `[Hq]` float64, the same on every rank.

        Heads differ a lot in it, and are much alike from call to call: `attrs.evolve(ulysses, density=measured)`
        spreads them accordingly.

        Raises:
            ValueError: `attention` is another scheme, of which a rank sees some rows only.
        """
        q, k, v, scale = checked(q, k, v, causal=causal, scale=scale, ranks=self._ranks)
        if isinstance(self.attention, Scheme):
            raise ValueError("densities are measured for whole sequences: give a Ulysses around a pipeline")
        with without_autocast(q):
            _, density = self._run(q, k, v, Call(causal, scale, True, q.shape[1], k.shape[1]))
        return self._ranks.summed(density)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[AttentionOutput, Tensor]:
        """Attention, and the density of the heads of this rank, `[Hq]`, 0 for other heads."""
        ranks, Hq, Hkv = self._ranks, q.shape[1], k.shape[1]
        queries, keys = lengths(q, k, v, call, ranks, options=f"Ulysses {self.parts} {self.density!r}")
        plan = self._plan(Hq, Hkv)
        self._refuse(Hq, Hkv)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if call.with_lse else None
        density = torch.zeros(Hq, dtype=torch.float64, device=q.device)
        begin = partial(_Arriving.of, ranks, q, k, v, queries, keys)
        leaving: list[Transfer] = []
        coming = begin(plan[0])
        for i, part in enumerate(plan):
            here = coming
            if i + 1 < len(plan):
                coming = begin(plan[i + 1])
            heads = part[ranks.rank].queries
            output = self._attend_in(heads, Hq, here, call)
            if output.visited is not None:
                per_head = output.visited.density().mean(0)
                density[list(heads)] = per_head.repeat_interleave(len(heads) // len(per_head))
            _wait(leaving)  # outputs of the part before, which have travelled meanwhile: their memory is free now
            leaving = [_back(ranks, part, queries, output.out, out)]
            if lse is not None and output.lse is not None:
                leaving.append(_back(ranks, part, queries, output.lse.float(), lse))
            del here, output
        _wait(leaving)
        return AttentionOutput(out, lse), density

    def _attend_in(self, heads: Heads, Hq: int, here: _Arriving, call: Call) -> AttentionOutput:
        """Attention to whole sequences, or to those of the inner scheme's shard, in the heads that arrive."""
        if (heads, Hq) not in self._of_heads:
            self._of_heads[heads, Hq] = _for(self.attention, heads, Hq)
        attention = self._of_heads[heads, Hq]
        here.wait()
        if isinstance(attention, Scheme):
            return attention.run(here.q, here.k, here.waited_v(), call)
        M, N, Dv = here.q.shape[2], here.k.shape[2], here.v.shape[3]
        dense = whole.is_dense(attention, here.q, here.k, Dv, call, M=M, N=N)
        return whole.attend(attention, here.q, here.k, here.waited_v, call, dense=dense)

    def _plan(self, Hq: int, Hkv: int) -> list[list[_Share]]:
        """The heads that each rank attends to in each part.

        Raises:
            ValueError: the heads cannot be spread evenly.
        """
        n, group = self._ranks.size, Hq // Hkv
        if Hq % n or (Hkv % n and n % Hkv):
            raise ValueError(
                f"{Hq} query heads and {Hkv} KV heads cannot be spread evenly over the {n} ranks of mesh "
                f"dimension {self.dim!r}: their number must divide the KV heads, or be a multiple of them that "
                "divides the query heads"
            )
        loads = self._loads(Hq)
        if n <= Hkv:
            shares = spread([sum(loads[h * group : (h + 1) * group]) for h in range(Hkv)], n)
            parts = min(self.parts, Hkv // n)
            cuts = [torch.arange(Hkv // n).tensor_split(parts)[i].tolist() for i in range(parts)]
            return [[_Share.of([share[i] for i in cut], group) for share in shares] for cut in cuts]
        per = n // Hkv
        only = []
        for h in range(Hkv):
            for some in spread(loads[h * group : (h + 1) * group], per):
                only.append(_Share((h,), tuple(h * group + i for i in some)))
        return [only]

    def _loads(self, Hq: int) -> list[float]:
        if not isinstance(self.density, HeadValues):
            return [1.0] * Hq
        if len(self.density.values) != Hq:
            raise ValueError(f"'density' must have one entry per query head ({Hq}): {len(self.density.values)}")
        loads: list[float] = self.density.values.tolist()
        return loads

    def _refuse(self, Hq: int, Hkv: int) -> None:
        if self._ranks.size > 1:
            inner = self.attention
            while isinstance(inner, Scheme):
                inner = inner.attention
            refuse_apart(inner, split=self._ranks.size > Hkv)

    def shard(self, x: Tensor, dim: int = 2, *, before: int = 0, causal: bool = True) -> Tensor:
        if isinstance(self.attention, Scheme):
            x = self.attention.shard(x, dim, before=before, causal=causal)
        if x.shape[dim] < self._ranks.size:
            raise ValueError(f"{x.shape[dim]} tokens are too few for {self._ranks.size} ranks")
        return x.tensor_split(self._ranks.size, dim)[self._ranks.rank]


class _Share(NamedTuple):
    """The heads of a rank in one part."""

    keys: Heads
    queries: Heads

    @classmethod
    def of(cls, keys: Sequence[int], group: int) -> _Share:
        return cls(tuple(keys), tuple(h * group + i for h in keys for i in range(group)))


@final
@frozen(eq=False)
class _Arriving:
    """Whole sequences of the heads of a part, on their way; values come after queries and keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    _first: Transfer
    _second: Transfer

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        part: Sequence[_Share],
    ) -> _Arriving:
        mine = part[ranks.rank]
        whole_q, whole_k, whole_v = (
            x.new_empty((x.shape[0], len(heads), sum(tokens), x.shape[3]))
            for x, heads, tokens in ((q, mine.queries, queries), (k, mine.keys, keys), (v, mine.keys, keys))
        )
        to_q, to_kv = [share.queries for share in part], [share.keys for share in part]
        first = ranks.exchange(
            "sending queries and keys",
            [*_heads_for(q, to_q), *_heads_for(k, to_kv)],
            [*_tokens_for(whole_q, queries), *_tokens_for(whole_k, keys)],
        )
        second = ranks.exchange("sending values", _heads_for(v, to_kv), _tokens_for(whole_v, keys))
        return cls(whole_q, whole_k, whole_v, first, second)

    def wait(self) -> None:
        self._first.wait()

    def waited_v(self) -> Tensor:
        self._second.wait()
        return self.v


def _back(ranks: Ranks, part: Sequence[_Share], tokens: Sequence[int], x: Tensor, whole: Tensor) -> Transfer:
    """Begin to send results `x` `[B, heads here, all tokens, ...]` into `whole` `[B, Hq, own tokens, ...]`."""
    what = "sending outputs"
    return ranks.exchange(what, _tokens_for(x, tokens), _heads_for(whole, [share.queries for share in part]))


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _heads_for(x: Tensor, heads: Sequence[Heads]) -> list[tuple[int, Tensor]]:
    """For each rank the tokens of each of its heads, `[N, D]`: consecutive in memory as models lay them out."""
    return [(rank, x[b, h]) for rank, its in enumerate(heads) for b in range(len(x)) for h in its]


def _tokens_for(x: Tensor, tokens: Sequence[int]) -> list[tuple[int, Tensor]]:
    """For each rank its tokens of each head of `x` `[B, H, all tokens, ...]`."""
    ends = list(accumulate(tokens))
    return [
        (rank, x[b, h, end - n : end])
        for rank, (n, end) in enumerate(zip(tokens, ends, strict=True))
        for b in range(x.shape[0])
        for h in range(x.shape[1])
    ]


def _for(attention: AnyPipeline | Scheme, heads: Heads, of: int) -> AnyPipeline | Scheme:
    """`attention` for some query heads."""
    if isinstance(attention, Scheme):
        return evolve(attention, attention=_for(attention.attention, heads, of))
    return of_heads(attention, heads, of)
