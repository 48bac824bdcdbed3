"""The masks of partial blocks that flash-attn-4 calls, in its own language, CuTe.

This module imports CuTe, so only code that has found flash-attn-4 may import it.
"""

import cutlass
import cutlass.cute as cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def key_not_after_query(batch, head, q_place, k_slot, lengths, positions):
    """Whether the key in a slot stands at or before the query in a place.

    `positions` are two int32 tensors `[B, Hq, places]` and `[B, Hq, slots]` of original positions.
    """
    q_at = scalar_to_ssa(positions[0][batch[0], head[0], q_place[0]], cutlass.Int32)
    k_at = scalar_to_ssa(positions[1][batch[0], head[0], k_slot[0]], cutlass.Int32)
    return k_at <= q_at


@cute.jit
def causal(batch, head, q_place, k_slot, lengths, positions):
    """The same if keys and queries stand in original order, and the queries are the last of the keys' tokens."""
    return k_slot <= q_place + scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
