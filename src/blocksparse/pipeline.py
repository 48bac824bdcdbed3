"""The four stages in order and nothing else; and the trace of one call."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar, final

import torch
from attrs import Factory, field, frozen, validators
from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.dense_attention import dense_attention
from blocksparse.executors.executor import Executor
from blocksparse.inputs import check_inputs
from blocksparse.opaque_call import OpaqueCall, attend
from blocksparse.permuters.permutation import GlobalPermutation, Permutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.grid import Grid
from blocksparse.scorers.scorer import Scorer
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector

_log = logging.getLogger(__name__)

PermutationT = TypeVar("PermutationT", bound=Permutation)
ScoresT = TypeVar("ScoresT", bound=BlockScores)
MaskT = TypeVar("MaskT", bound=BlockMask)


@final
@frozen(eq=False)
class Trace(Generic[PermutationT, ScoresT, MaskT]):
    """Every value of one call. What is measured here is computed on demand, row by row."""

    q: Tensor  # [B, Hq, M, D]
    k: Tensor  # [B, Hkv, N, D]
    v: Tensor  # [B, Hkv, N, Dv]
    scale: float
    permutation: PermutationT
    scores: ScoresT
    mask: MaskT
    output: AttentionOutput

    @property
    def visited(self) -> BlockMask:
        """The blocks that were computed: the mask, what an early stop left of it, or all of a dense call."""
        return self.mask if self.output.visited is None else self.output.visited

    def density(self) -> Tensor:
        """Work done, as a share of dense attention's, per query head, `[B, Hq]`. See `BlockMask.density`."""
        density = self.visited.density()
        return density.repeat_interleave(self.q.shape[1] // density.shape[1], dim=1)

    def covered_mass(self) -> Tensor:
        """Share of the true attention mass that lies on kept pairs, mean over queries, `[B, Hq]`."""
        total = self.q.new_zeros(self.q.shape[:2], dtype=torch.float64)
        for row in range(self.visited.grid.rows):
            weight, allowed = self._dense_row(row)
            total += weight.where(allowed, 0.0).sum((-1, -2))
        return total / self.q.shape[2]

    def error(self) -> Tensor:
        """Relative L1 distance of the output from dense attention's, `sum|o - o'| / sum|o'|`, `[B, Hq]`."""
        distance = self.q.new_zeros(self.q.shape[:2], dtype=torch.float64)
        norm = torch.zeros_like(distance)
        values = self.v.repeat_interleave(self.q.shape[1] // self.v.shape[1], dim=1).float()
        for row in range(self.visited.grid.rows):
            query = self.visited.queries(row)
            dense = torch.matmul(self._dense_row(row)[0], values).double()
            index = query.unsqueeze(-1).expand(*query.shape, dense.shape[-1])
            distance += (self.output.out.gather(2, index).double() - dense).abs().sum((-1, -2))
            norm += dense.abs().sum((-1, -2))
        return distance / norm

    def _dense_row(self, row: int) -> tuple[Tensor, Tensor]:
        """Dense attention weights of one row of the mask, and which pairs are kept, `[B, Hq, m, N]` each."""
        query, allowed = self.visited.queries(row), self.visited.pairs(row)
        rows = self.q.gather(2, query.unsqueeze(-1).expand(*query.shape, self.q.shape[-1])).float()
        keys = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], dim=1).float()
        logits = torch.matmul(rows, keys.transpose(-1, -2)) * self.scale
        if self.visited.grid.causal:
            last = query + (self.k.shape[2] - self.q.shape[2])
            future = torch.arange(keys.shape[2], device=keys.device) > last.unsqueeze(-1)
            logits = logits.masked_fill(future, float("-inf"))
        return logits.softmax(-1), allowed


@final
@frozen(eq=False)
class Pipeline(Generic[PermutationT, ScoresT, MaskT]):
    """Sparse prefill attention: order tokens, score blocks, select blocks, attend.

        Pipeline(SegmentKeySort(S=256), MeanPoolScorer(), TopCdf(0.9), TritonExecutor())(q, k, v)

    A pipeline is its own configuration; its repr can be pasted back. To torch.compile a call is one node.
    """

    permuter: Permuter[PermutationT] = field(validator=validators.instance_of(Permuter))
    scorer: Scorer[PermutationT, ScoresT] = field(validator=validators.instance_of(Scorer))
    selector: Selector[ScoresT, MaskT] = field(validator=validators.instance_of(Selector))
    executor: Executor[PermutationT, MaskT] = field(validator=validators.instance_of(Executor))
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

        Args:
            attn_mask: always None; the selector makes the mask.
            causal: query `i` sees keys up to position `N - M + i` (bottom-right aligned).
            scale: of the logits; `1 / sqrt(D)` unless given.

        Raises:
            TypeError, ValueError: the inputs are not what a pipeline, or its executor, can run.
        """
        _refuse_mask(attn_mask)
        scale = check_inputs(q, k, v, causal=causal, scale=scale)
        return attend(self._call, q, k, v, causal=causal, scale=scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        if reason := self.executor.dense_because(q, k):
            _log.debug("dense attention runs: %s", reason)
            return dense_attention(q, k, v, causal=causal, scale=scale)
        # Unlike in a trace, nobody holds the scores while the executor runs.
        permutation = self.permuter(q, k, causal=causal, scale=scale)
        mask = self.selector(self.scorer(q, k, permutation, causal=causal, scale=scale))
        return self.executor(q, k, v, permutation, mask, scale=scale).out

    def trace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> Trace[PermutationT, ScoresT, MaskT]:
        """The same call, with every value on the way. Takes what a plain call takes and costs the same time."""
        _refuse_mask(attn_mask)
        scale = check_inputs(q, k, v, causal=causal, scale=scale)
        permutation = self.permuter(q, k, causal=causal, scale=scale)
        scores = self.scorer(q, k, permutation, causal=causal, scale=scale)
        mask = self.selector(scores)
        if self.executor.dense_because(q, k) is None:
            output = self.executor(q, k, v, permutation, mask, scale=scale)
        else:
            output = AttentionOutput(
                dense_attention(q, k, v, causal=causal, scale=scale), None, _everything(q, k, mask)
            )
        return Trace(q, k, v, scale, permutation, scores, mask, output)


def _refuse_mask(attn_mask: None) -> None:
    if attn_mask is not None:
        raise TypeError(
            "a pipeline takes no attention mask, its selector makes one; slice padding off q, k and v, "
            "and for windows or packing use dense attention (integrations.transformers does so by itself)"
        )


def _everything(q: Tensor, k: Tensor, mask: BlockMask) -> BlockMask:
    """What dense attention visits: every block that is reachable in original order."""
    sizes = mask.grid
    grid = Grid.of(q, k, GlobalPermutation(), q_block=sizes.q_block, k_block=sizes.k_block, causal=sizes.causal)
    return BlockMask(grid.reachable.expand(q.shape[0], q.shape[1], -1, -1), grid)
