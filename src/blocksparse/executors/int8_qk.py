"""The option of `TritonExecutor` that rounds queries and keys to int8."""

from __future__ import annotations

from typing import Literal, NamedTuple, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.rounding.int8_tokens import int8_keys, int8_queries
from blocksparse.kernels.rounding.quantize import SMOOTHED_BY, smoothing_mean
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.validators import flag, one_of


class Int8Operands(NamedTuple):
    """The rounded queries and keys, their scales, and what smoothing subtracted from the logits."""

    q: Tensor  # [B, Hq, M, D] int8
    k: Tensor  # [B, copies * Hk, N, D] int8
    q_scale: Tensor  # [B, Hq, M] fp32
    k_scale: Tensor  # [B, copies * Hk, N] fp32
    k_copy: Tensor | None  # [B|1, Hq|1, rows] int32, the copy of k that a row reads; None when there is one
    taken: Tensor | None  # [B, Hq, M] fp32, what smoothing subtracted from every logit of a query


@final
@frozen
class Int8QK:
    """Logits from int8 queries and keys (SageAttention; SpargeAttn 3.5).

    Args:
        scales: `"token"` has one scale for each query and each key, so that later tokens change no bit of earlier
            rows. `"block"` has one for each block of the mask, as SageAttention and SpargeAttn do; later tokens of
            its own block then change how a row is rounded, but not to which keys it attends.
        smooth_k: subtract the mean key from all keys first. This shifts all logits of a query alike, which softmax
            ignores, and `lse` is corrected. When causal, the mean is that of the first 128 tokens, and rows of
            blocks with a query that does not see all of these read keys that are not smoothed.
    """

    scales: Literal["token", "block"] = field(default="token", validator=one_of("token", "block"))
    smooth_k: bool = field(default=True, validator=flag)

    def operands(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, grid: Grid, scale: float
    ) -> Int8Operands:
        """Round `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]` on their way into slots."""
        mean = k_copy = None
        plain_below, shared = 0, self.scales == "block"
        if self.smooth_k:
            mean = smoothing_mean(k, grid.causal).squeeze(2)
            if grid.causal and grid.k_len - grid.q_len < SMOOTHED_BY - 1:
                k_copy = (grid.q_first[..., 0] < SMOOTHED_BY - 1).int()
                # In original order, only keys up to here are read by rows that take keys which are not smoothed.
                in_order = permutation.q_index is None
                plain_below = min(SMOOTHED_BY - 2 + grid.q_block, grid.k_len) if in_order else grid.k_len
        queries, q_scale, taken = int8_queries(
            q,
            permutation.q_index,
            grid.q_block,
            grid.q_lead,
            shared=shared,
            mean=mean,
            scale=scale,
            plain=k_copy,
        )
        keys, k_scale = int8_keys(
            k, permutation.key_slots, grid.k_block, shared=shared, mean=mean, plain_below=plain_below
        )
        return Int8Operands(queries, keys, q_scale, k_scale, k_copy, taken)
