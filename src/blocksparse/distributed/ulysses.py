"""Sequence shards become head shards: an all-to-all before and one after attention (DeepSpeed-Ulysses)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack, final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.check.per_head import HeadValues, PerHead, at_least_0, maybe_per_head
from blocksparse.check.validators import a, optional, size
from blocksparse.check.validators import whole as a_whole_number
from blocksparse.distributed.heads import Arriving, back, of_heads, refuse_apart, shares
from blocksparse.distributed.ranks import ShardedCall, Transfer, checked, lengths
from blocksparse.distributed.scheme import Later, Scheme, attend_whole, is_dense
from blocksparse.execute.executor import AttentionOutput
from blocksparse.launch.torch_modes import without_autocast
from blocksparse.layers.head_groups import AnyPipeline, Heads
from blocksparse.pipeline import Pipeline
from blocksparse.spec import AttentionOptions


@final
@frozen(eq=False)
class Ulysses(Scheme):
    """Every rank attends in some heads to whole sequences (DeepSpeed-Ulysses, arXiv 2309.14509).

    An all-to-all turns the ranks' shards of sequences into whole sequences of a share of the heads. Attention runs
    there unchanged, with any pipeline that chooses in each KV head by itself. Another all-to-all turns its output
    back. Shards are consecutive tokens in the order of ranks, and may be of unequal lengths.

    The ranks must divide the KV heads. With more ranks than KV heads, the ranks must be a multiple of the KV heads
    and divide the query heads. A KV head is then copied to each rank that has some of its query heads.

        Ulysses(pbs_attn(0.9), init_device_mesh("cuda", (8,), mesh_dim_names=("heads",)), "heads")

    Args:
        attention: a pipeline, or a scheme along another dimension. Its shards are then split.
        mesh: a DeviceMesh.
        dim: name of the dimension that spreads heads.
        density: that of each query head, by `measured`. With it, ranks have equally many heads and about the same
            work. Equal densities if None. All ranks must give the same.
        parts: in how many parts a rank attends to its KV heads, one after another. At most as many as it has KV
            heads. The heads of the next part travel meanwhile, and so do outputs.
    """

    density: PerHead | None = field(
        default=None, converter=maybe_per_head, validator=optional(at_least_0), kw_only=True
    )
    parts: int = field(default=4, converter=a_whole_number, validator=size, kw_only=True)
    _of_heads: dict[tuple[Heads, int], AnyPipeline | Scheme] = field(init=False, repr=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        a(Pipeline, Scheme).check(attention=self.attention)
        inner = self.attention
        if isinstance(inner, Scheme) and (inner.mesh, inner.dim) == (self.mesh, self.dim):
            raise ValueError(
                f"'attention' must go along another dimension of the mesh than {self.dim!r}. "
                "Give the mesh a second one."
            )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sequences: Sequences | None = None,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Attend as `Scheme` describes.

        Args:
            sequences: where several prompts lie in the tokens of all ranks, the same on every rank. A rank may
                have parts of prompts, and each prompt is attended to by itself. None for one prompt in each entry
                of the batch.

        Raises:
            ValueError: `sequences` do not lie in these tokens, `attention` is another scheme, or torch.compile
                traces the call.
        """
        if sequences is None:
            return super().__call__(q, k, v, **options)
        if torch.compiler.is_compiling():
            raise ValueError(
                "torch.compile takes no 'sequences' over ranks. Call without, or leave the call out of it."
            )
        q, k, v, spec = checked(q, k, v, options, ranks=self._all_ranks, sequences=sequences)
        with without_autocast(q):
            return self.run(q, k, v, ShardedCall(spec, False, q.shape[1], k.shape[1], sequences=sequences)).out

    def measured(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """Make the call, and return the density of every query head, `[Hq]` float64, the same on every rank.

        Densities of heads differ a lot, and are much alike from call to call: `attrs.evolve(ulysses, density=...)`
        spreads heads by them.

        Raises:
            ValueError: `attention` is another scheme, of which a rank sees some rows only.
        """
        if isinstance(self.attention, Scheme):
            raise ValueError("densities are measured for whole sequences. Give a Ulysses around a pipeline.")
        q, k, v, spec = checked(q, k, v, options, ranks=self._all_ranks)
        density = torch.zeros(q.shape[1], dtype=torch.float64, device=q.device)

        def note(heads: Heads, output: AttentionOutput) -> None:
            if output.visited is not None:
                its = output.visited.density().mean(0)
                density[list(heads)] = its.repeat_interleave(len(heads) // len(its))

        with without_autocast(q):
            self.run(q, k, v, ShardedCall(spec, True, q.shape[1], k.shape[1], note))
        return self._ranks.summed(density)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, call: ShardedCall) -> AttentionOutput:
        ranks, Hq, Hkv = self._ranks, q.shape[1], k.shape[1]
        queries, keys = lengths(q, k, v, call, self._all_ranks, scheme=self)
        if call.sequences is not None:
            call.sequences.check_fits(q.shape[0], sum(queries), sum(keys), causal=call.spec.causal)
        parts = shares(Hq, Hkv, ranks.size, self._loads(Hq), self.parts)
        if ranks.size > 1:
            refuse_apart(_innermost(self.attention), split=ranks.size > Hkv)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if call.with_lse else None
        begin = partial(Arriving.of, ranks, q, k, v, queries, keys)
        leaving: list[Transfer] = []
        coming = begin(parts[0])
        for i, part in enumerate(parts):
            here, heads = coming, part[ranks.rank].queries
            if i + 1 < len(parts):
                coming = begin(parts[i + 1])
            output = self._attend_in(heads, Hq, here, call)
            if call.note is not None:
                call.note(heads, output)
            _wait(leaving)  # outputs of the part before, which have travelled meanwhile: their memory is free now
            leaving = [back(ranks, part, queries, output.out, out)]
            if lse is not None and output.lse is not None:
                leaving.append(back(ranks, part, queries, output.lse.to(lse.dtype), lse))
            del here, output
        _wait(leaving)
        return AttentionOutput(out, lse)

    def _attend_in(self, heads: Heads, Hq: int, here: Arriving, call: ShardedCall) -> AttentionOutput:
        """Attention to whole sequences, or to those of the inner scheme's shard, in the heads that arrive."""
        if (heads, Hq) not in self._of_heads:
            self._of_heads[heads, Hq] = _for(self.attention, heads, Hq)
        attention, call = self._of_heads[heads, Hq], evolve(call, spec=of_heads(call.spec, heads, Hq))
        here.wait()
        if isinstance(attention, Scheme):
            return attention.run(here.q, here.k, here.waited_v(), call)
        if call.sequences is None:
            return _attend(attention, here.q, here.k, here.waited_v, here.v.shape[3], call)
        v = here.waited_v()
        out = here.q.new_zeros((*here.q.shape[:3], v.shape[3]))
        parts = call.sequences.parts(here.q, here.k, v, call.spec)
        for span, part in zip(call.sequences.spans, parts, strict=True):
            if part is not None:
                q, k, its_v, spec = part
                span.rows(out).copy_(
                    _attend(attention, q, k, partial(_here, its_v), v.shape[3], evolve(call, spec=spec)).out
                )
        return AttentionOutput(out, None)

    def _loads(self, Hq: int) -> list[float]:
        if not isinstance(self.density, HeadValues):
            return [1.0] * Hq
        if len(self.density.values) != Hq:
            raise ValueError(f"'density' must have one entry per query head ({Hq}): {len(self.density.values)}")
        loads: list[float] = self.density.values.tolist()
        return loads

    def shard(self, x: Tensor, dim: int = 2, *, before: int = 0, causal: bool = True) -> Tensor:
        if isinstance(self.attention, Scheme):
            x = self.attention.shard(x, dim, before=before, causal=causal)
        if x.shape[dim] < self._ranks.size:
            raise ValueError(f"{x.shape[dim]} tokens are too few for {self._ranks.size} ranks. Use fewer.")
        return x.tensor_split(self._ranks.size, dim)[self._ranks.rank]


def _here(x: Tensor) -> Tensor:
    return x


def _attend(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Later, Dv: int, call: ShardedCall) -> AttentionOutput:
    """Attention of whole sequences; whether it is dense follows from all heads of the call."""
    dense = is_dense(pipeline, q, k, Dv, call, M=q.shape[2], N=k.shape[2])
    return attend_whole(pipeline, q, k, v, call, dense=dense)


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _for(attention: AnyPipeline | Scheme, heads: Heads, of: int) -> AnyPipeline | Scheme:
    """`attention` for some query heads."""
    if isinstance(attention, Scheme):
        return evolve(attention, attention=_for(attention.attention, heads, of))
    return of_heads(attention, heads, of)


def _innermost(attention: AnyPipeline | Scheme) -> AnyPipeline:
    """The pipeline inside all schemes."""
    return _innermost(attention.attention) if isinstance(attention, Scheme) else attention
