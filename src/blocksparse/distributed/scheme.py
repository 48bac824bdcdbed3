"""The base classes of the ways to spread one call of attention over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blocksparse.check.stage import of_parts
from blocksparse.check.validators import a, flag
from blocksparse.custom_op import OpaqueCall, call_op
from blocksparse.distributed.heads import refuse_apart, shares
from blocksparse.distributed.pieces import Piece, cut, head_tail, in_order, taken
from blocksparse.distributed.ranks import Ranks, ShardedCall, checked
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.execute.executor import AttentionOutput
from blocksparse.inputs import check_inputs
from blocksparse.launch.torch_modes import is_transformed, without_autocast
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.order.permutation import Permuter
from blocksparse.pipeline import Pipeline
from blocksparse.score.scorer import ValueScorer
from blocksparse.spec import AttentionOptions, AttentionSpec


@frozen(eq=False)
class Scheme(ABC):
    """Attention of sequences whose tokens are spread over the ranks of a dimension of a mesh.

    It is called like a pipeline, on every rank at once, with the tokens that this rank has. The queries, put
    together in the order of positions, are the last ones of all keys, as in a call on one rank. Every rank must
    have the same scheme around the same pipeline.
    """

    attention: AnyPipeline | Scheme = field()
    mesh: DeviceMesh = field(repr=False)
    dim: str
    _ranks: Ranks = field(
        init=False, repr=False, default=Factory(lambda self: Ranks(self.mesh, self.dim), takes_self=True)
    )
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    @property
    def _all_ranks(self) -> list[Ranks]:
        """Its ranks, and those of the schemes inside."""
        return [self._ranks, *(self.attention._all_ranks if isinstance(self.attention, Scheme) else ())]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """Attend this rank's `q` `[B, Hq, M, D]` to the keys and values of all ranks: `[B, Hq, M, Dv]`.

        Args:
            k, v: this rank's keys `[B, Hkv, N, D]` and values `[B, Hkv, N, Dv]`. Ranks may have unequal numbers of
                tokens.
            options: `causal`, `scale`, `softcap`, `sinks` and `remaining`, as in a `Pipeline`. The queries of all
                ranks are the last ones of all keys. No scheme knows a `window`.

        Raises:
            TypeError, ValueError: the inputs of this rank are refused, ranks differ, or the scheme does not fit.
            RuntimeError: another rank has refused its inputs, or does not answer within the time that its process
                group waits.
        """
        if is_transformed():
            q, k, v, scale = check_inputs(q, k, v, causal=False, scale=options.get("scale"))
            return call_op(self._call, q, k, v, scale, options)
        q, k, v, spec = checked(q, k, v, options, ranks=self._all_ranks)
        return self._call(q, k, v, spec)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> AttentionOutput:
        """Make the same call, and return the lse of this rank's queries together with their output.

        The stages always run, as in `Pipeline.with_lse`; `visited` is None.
        """
        q, k, v, spec = checked(q, k, v, options, ranks=self._all_ranks)
        with without_autocast(q):
            return self.run(q, k, v, ShardedCall(spec, True, q.shape[1], k.shape[1]))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self.run(q, k, v, ShardedCall(spec, False, q.shape[1], k.shape[1])).out

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: ShardedCall) -> AttentionOutput:
        """Attention of checked inputs; `q` and `k` may have some heads of the whole call."""
        try:
            return self._run(q, k, v, call)
        except Exception:
            self._ranks.settle()
            raise

    @abstractmethod
    def _run(self, q: Tensor, k: Tensor, v: Tensor, call: ShardedCall) -> AttentionOutput:
        """Make the call; it may leave transfers under way if it fails."""

    @abstractmethod
    def shard(self, x: Tensor, dim: int = 2, *, before: int = 0, causal: bool = True) -> Tensor:
        """This rank's tokens of `x`, which has those of all ranks along its dimension `dim`.

        It cuts where the scheme needs shards to be cut. `shard(torch.arange(N), 0)` are the positions of this
        rank's tokens.

        Args:
            before: how many keys stand before the first token of `x`: `N - M` if there are fewer queries than
                keys.
            causal: whether calls will be causal. Some pipelines can be cut for one kind of call only.

        Raises:
            ValueError: there are too few tokens for so many ranks, or the pipeline cannot be cut.
        """


@frozen(eq=False)
class SequenceScheme(Scheme):
    """Every rank attends in all heads with its own queries. It takes a pipeline, not another scheme."""

    head_tail: bool = field(default=False, validator=flag, kw_only=True)

    def __attrs_post_init__(self) -> None:
        a(Pipeline).check(attention=self.attention)

    @property
    def _pipeline(self) -> AnyPipeline:
        assert isinstance(self.attention, Pipeline)
        return self.attention

    def _aligned(self, causal: bool, heads: tuple[int, int] | None = None) -> int:
        """By how many tokens queries may be cut, for each rank to choose as one process would."""
        pipeline = self._pipeline
        try:
            return of_parts(causal, pipeline.permuter, pipeline.scorer, pipeline.selector)
        except ValueError as error:
            raise ValueError(f"{str(error).removesuffix('.')}. {self._hint(heads)}") from error

    def _hint(self, heads: tuple[int, int] | None) -> str:
        by_rows = "a pipeline that chooses in each row of blocks by itself, as auto() does"
        if heads is None:
            return f"Use Ulysses, whose ranks divide the heads, or {by_rows}."
        try:
            shares(*heads, self._ranks.size, [1.0] * heads[0], 1)
            refuse_apart(self._pipeline, split=self._ranks.size > heads[1])
        except ValueError:  # Ulysses would refuse these heads
            return f"Give {by_rows}."
        return "Use Ulysses, which runs this pipeline on whole sequences."

    def _pieces(self, tokens: Sequence[int], before: int, at: int) -> list[list[Piece]]:
        """The pieces of each rank, which has so many tokens."""
        return head_tail(tokens, before, at) if self.head_tail else in_order(tokens, before)

    def shard(self, x: Tensor, dim: int = 2, *, before: int = 0, causal: bool = True) -> Tensor:
        at = self._aligned(causal)
        pieces = cut(x.shape[dim], self._ranks.size, before, at, both_ends=self.head_tail)[self._ranks.rank]
        return torch.cat(taken(x, pieces, dim, before=before), dim)


Later = Callable[[], Tensor]
"""Waits for a tensor that is on its way, and returns it."""


def is_dense(pipeline: AnyPipeline, q: Tensor, k: Tensor, Dv: int, call: ShardedCall, *, M: int, N: int) -> bool:
    """Whether the executor would have the whole call, of `M` queries and `N` keys in all heads, attend densely."""
    if call.with_lse:
        return False
    B, D = q.shape[0], q.shape[3]
    # Shapes, dtype and device are all that an executor may ask for, so these tensors take no memory.
    shapes = (B, call.Hq, M, D), (B, call.Hkv, N, D), (B, call.Hkv, N, Dv)
    all_q, all_k, all_v = (x.new_empty(()).expand(shape) for x, shape in zip((q, k, k), shapes, strict=True))
    return pipeline.dense_because(all_q, all_k, all_v, call.spec) is not None


def attend_whole(
    pipeline: AnyPipeline,
    q: Tensor,
    k: Tensor,
    v: Later,
    call: ShardedCall,
    *,
    dense: bool,
    permuter: Permuter[Any] | None = None,
) -> AttentionOutput:
    """Attention of `q` `[B, Hq, M, D]`, the last queries of a causal call, to `k` `[B, Hkv, N, D]`.

    Blocks are selected before the wait for `v`, unless the scorer needs values. The output has the visited blocks,
    unless it is dense.

    Args:
        permuter: replaces the pipeline's own permuter.
    """
    if dense:
        return AttentionOutput(dense_attention(q, k, v(), call.spec), None)
    if permuter is not None:
        pipeline = evolve(pipeline, permuter=permuter)
    values = v() if isinstance(pipeline.scorer, ValueScorer) else None
    choice = pipeline.choose(q, k, values, **call.spec.arguments())
    output = pipeline.attend(q, k, v() if values is None else values, choice)
    if call.with_lse and output.lse is None:
        raise ValueError(
            f"{type(pipeline.executor).__name__} gives no lse for tensors on {q.device.type}. Call without it, or "
            "choose another executor."
        )
    return replace(output, visit=output.visit or choice.mask)
