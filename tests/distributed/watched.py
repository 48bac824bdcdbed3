"""An executor that remembers which pairs it was given; and calls on ranks compared with one process."""

from __future__ import annotations

from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.distributed.scheme import Scheme
from blocksparse.testing import assert_within_budget
from tests.specs import asked, kept_pairs

PermutationT = TypeVar("PermutationT", bound=bs.Permutation)
MaskT = TypeVar("MaskT", bound=bs.BlockMask)
QKV = tuple[Tensor, Tensor, Tensor]


@attrs.frozen(eq=False)
class Watched(bs.Executor[PermutationT, MaskT]):
    """Attends as `inner` does. Tokens are recognised by their queries and keys, all of which differ."""

    inner: bs.Executor[PermutationT, MaskT]
    q: Tensor  # those of all ranks
    k: Tensor
    pairs: Tensor  # [B, Hq, M, N] bool: what was attended to so far

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: bs.AttentionSpec) -> list[str]:
        return []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskT, spec: bs.AttentionSpec, out: Tensor | None = None
    ) -> bs.AttentionOutput:
        heads = [self._places(self.q, q[:, h, 0])[0] for h in range(q.shape[1])]
        first_q = self._places(self.q, q[:, 0, 0])[1]
        first_k = self._places(self.k, k[:, 0, 0])[1]
        for row in range(mask.grid.rows):
            queries, pairs = mask.queries(row), mask.pairs(row)
            for b in range(q.shape[0]):
                for h, head in enumerate(heads):
                    at = queries[b, h] + first_q
                    assert not self.pairs[b, head, at, first_k : first_k + k.shape[2]].any(), "attended twice"
                    self.pairs[b, head, at, first_k : first_k + k.shape[2]] = pairs[b, h]
        return self.inner(q, k, v, mask, spec, out)

    def _places(self, whole: Tensor, one: Tensor) -> tuple[int, int]:
        """The head and the token of `whole` `[B, H, N, D]` that `one` `[B, D]` is."""
        _, head, token = (whole == one[:, None, None]).all(-1).nonzero()[0].tolist()
        return head, token


def compare(make: Any, pipeline: Any, qkv: QKV, *, causal: bool = True, lse: bool = True) -> None:
    """Assert that a scheme, made by `make(pipeline)`, gives this rank what one process gives for its queries."""
    q, k, v = qkv
    M, N = q.shape[2], k.shape[2]
    before = N - M if causal else 0
    pairs = torch.zeros(*q.shape[:3], N, dtype=torch.bool)
    scheme: Scheme = make(attrs.evolve(pipeline, executor=Watched(pipeline.executor, q, k, pairs)))
    mine = scheme.shard(torch.arange(M), 0, before=before, causal=causal)
    local = (scheme.shard(q, before=before, causal=causal), *(scheme.shard(x, causal=causal) for x in (k, v)))
    assert torch.equal(local[0], q[:, :, mine])
    one = pipeline.trace(*qkv, causal=causal)
    truth = bs.ReferenceExecutor()(
        q.double(), k.double(), v.double(), one.visited, asked(one.visited, one.spec.scale)
    )
    outputs = [scheme(*local, causal=causal)]
    kept = pairs.clone()
    if lse:
        pairs.zero_()
        output = scheme.with_lse(*local, causal=causal)
        outputs.append(output.out)
        assert output.lse is not None
        assert output.lse.shape == local[0].shape[:3]
        assert truth.lse is not None
        alone = pipeline.with_lse(*qkv, causal=causal).lse
        assert_within_budget(output.lse, truth.lse[:, :, mine].double(), alone[:, :, mine])
        assert torch.equal(pairs, kept)
    for out in outputs:
        assert out.shape == (*local[0].shape[:3], v.shape[3])
        assert out.dtype == v.dtype
        assert_within_budget(out, truth.out[:, :, mine], one.output.out[:, :, mine])
    want = kept_pairs(one.mask)
    seen = kept.any(-1)  # the queries of this rank, or all queries of its heads
    assert torch.equal(kept, want.where(seen.unsqueeze(-1), False))
    assert seen.any()
    assert_all_work_is_done(seen)


def assert_all_work_is_done(seen: Tensor) -> None:
    """Every query is attended by exactly one rank."""
    count = seen.int()
    torch.distributed.all_reduce(count)
    assert bool((count == 1).all())
