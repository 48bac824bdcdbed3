"""Mean pooling over the channels that turn within a range of speeds (Prism, arXiv 2602.08426)."""

from __future__ import annotations

import math
from functools import partial
from math import lcm
from numbers import Real
from typing import final

from attrs import converters, field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import Rule, block_size, maybe_whole, optional, positive, real, whole
from blocksparse.geometry import Grid
from blocksparse.kernels.moving.band_channels import band_channels
from blocksparse.kernels.multiplying.block_products import block_products
from blocksparse.kernels.scoring.block_mean import block_mean
from blocksparse.kernels.scoring.block_softmax import block_softmax
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import Scorer

part_of_all = Rule(
    "two numbers (begin, end) from 0 to 1, of which the second is greater",
    lambda x: isinstance(x, tuple) and len(x) == 2 and all(isinstance(each, Real) for each in x),
    lambda x: 0 <= x[0] < x[1] <= 1,
)


@final
@frozen(cache_hash=True)
class RotaryBandScorer(Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of the product of a block's mean query and mean key, over some pairs of channels.

    Rotary embeddings turn channel `i` with channel `i + D / 2`, the first pairs fastest. The means of fast pairs
    cancel within a block, and those of slow pairs do not; this scorer uses one band of pairs. The logits are `q .
    k` over the band's channels, over the root of their number and the temperature.

    Args:
        band: where the band begins and ends, as shares of the `D / 2` pairs; pairs that it cuts belong to it. With
            a head dim of 128, (0, 0.5) are the 32 fastest pairs.
        block: slots per block, on both sides unless `k_block` is given.
        k_block: slots per key block.
        temperature: what the logits are divided by. None measures it per head: by how much smaller the means of
            the band are than those of all channels (root mean squares over all blocks and channels),
            multiplied by the root of the band's share of channels. It is measured over all blocks of a call, so
            that a choice made with it depends a little on later tokens and on how a prompt is chunked.
    """

    band: tuple[float, float] = field(validator=part_of_all)
    block: int = field(default=128, converter=whole, validator=block_size)
    k_block: int | None = field(default=None, converter=maybe_whole, validator=optional(block_size), kw_only=True)
    temperature: float | None = field(
        default=None, converter=converters.optional(real), validator=optional(positive), kw_only=True
    )

    keeps_history = True
    takes_paged_keys = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: GlobalPermutation,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> BlockMass:
        """Score the blocks.

        Raises:
            ValueError: the head dim is odd.
        """
        D = q.shape[3]
        if D % 2:
            raise ValueError(f"'RotaryBandScorer' needs pairs of channels, and the head dim is odd: {D}")
        first, end = math.floor(self.band[0] * (D // 2)), math.ceil(self.band[1] * (D // 2))
        grid = Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.k_block or self.block)
        queries = block_mean(q, grid.q_block, lead=grid.q_lead, index=permutation.q_index)  # [B, Hq, rows, D]
        if history is None:
            keys = block_mean(k, grid.k_block, index=permutation.key_slots)  # [B, H, cols, D]
        else:
            keys = history.blocks("mean", k, permutation, grid.k_block, partial(block_mean, block=grid.k_block))
        share = 2 * (end - first) / D
        mine, its = band_channels(queries, keys, first, end, self.temperature)
        logits = block_products(mine, its, grid)
        mass, _ = block_softmax(logits, grid, scale=spec.scale / math.sqrt(share))
        return BlockMass(mass, grid)  # [B, Hq, rows, cols]

    def alignment(self, causal: bool) -> int:
        if self.temperature is None:
            raise ValueError(
                "'RotaryBandScorer' without 'temperature' measures it over all blocks of a call: give one"
            )
        return lcm(self.block, self.k_block or 1)
