"""The base class of the ways to spread one call of attention over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Unpack

from attrs import Factory, field, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blocksparse.custom_op import OpaqueCall, node
from blocksparse.distributed.call import Call, checked
from blocksparse.distributed.ranks import Ranks
from blocksparse.execute.executor import AttentionOutput
from blocksparse.inputs import check_inputs
from blocksparse.launch.torch_modes import is_transformed, without_autocast
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.spec import Asked, AttentionSpec


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

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """Attend this rank's `q` `[B, Hq, M, D]` to the keys and values of all ranks: `[B, Hq, M, Dv]`.

        Args:
            k, v: this rank's keys `[B, Hkv, N, D]` and values `[B, Hkv, N, Dv]`. Ranks may have unequal numbers of
                tokens.
            asked: `causal`, `scale`, `softcap`, `sinks` and `remaining`, as of a `Pipeline`. The queries of all
                ranks are the last ones of all keys. No scheme knows a `window`.

        Raises:
            TypeError, ValueError: the inputs of this rank are refused, ranks differ, or the scheme does not fit.
            RuntimeError: another rank has refused its inputs, or does not answer within the time that its process
                group waits.
        """
        if is_transformed():
            q, k, v, scale = check_inputs(q, k, v, causal=False, scale=asked.get("scale"))
            return node(self._call, q, k, v, scale, asked)
        q, k, v, spec = checked(q, k, v, ranks=self._ranks, **asked)
        return self._call(q, k, v, spec)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> AttentionOutput:
        """Make the same call, and return the lse of this rank's queries beside their output.

        The stages always run, as in `Pipeline.with_lse`; `visited` is None.
        """
        q, k, v, spec = checked(q, k, v, ranks=self._ranks, **asked)
        with without_autocast(q):
            return self.run(q, k, v, Call(spec, True, q.shape[1], k.shape[1]))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self.run(q, k, v, Call(spec, False, q.shape[1], k.shape[1])).out

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        """Attention of checked inputs; `q` and `k` may have some heads of the whole call."""
        try:
            return self._run(q, k, v, call)
        except Exception:
            self._ranks.settle()
            raise

    @abstractmethod
    def _run(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        """The same; it may leave transfers under way if it fails."""

    @abstractmethod
    def shard(self, x: Tensor, dim: int = 2, *, before: int = 0, causal: bool = True) -> Tensor:
        """This rank's tokens of `x`, which has those of all ranks along its dimension `dim`.

        It cuts where the scheme wants shards to be cut: `shard(torch.arange(N), 0)` are the positions of this
        rank's tokens.

        Args:
            before: how many keys stand before the first token of `x`: `N - M` if there are fewer queries than
                keys.
            causal: whether calls will be causal; some pipelines can be cut for one kind of call only.

        Raises:
            ValueError: there are too few tokens for so many ranks, or the pipeline cannot be cut.
        """
