"""What the ranks must agree on before they send anything: the sizes and options of a call."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Unpack, final

from attrs import frozen
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.distributed.ranks import Ranks
from blocksparse.execute.executor import AttentionOutput
from blocksparse.inputs import check_inputs
from blocksparse.launch.torch_modes import DTYPES
from blocksparse.layers.head_groups import Heads
from blocksparse.spec import Asked, AttentionSpec

_SAME = ("B", "Hq", "Hkv", "D", "Dv", "dtype", "causal", "scale", "kind of call", "options of the scheme")


@final
@frozen(eq=False)
class Call:
    """A call of attention, of which each rank has a part."""

    spec: AttentionSpec  # with the sinks of the heads that this rank has
    with_lse: bool  # then the stages always run; a plain call may be dense where the executor says so
    Hq: int  # heads of the whole call; a rank may have fewer of them
    Hkv: int
    # Gets some heads of this rank and their output of all tokens, part by part, where heads are spread.
    note: Callable[[Heads, AttentionOutput], None] | None = None
    sequences: Sequences | None = None  # prompts that share the tokens of all ranks


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: Ranks,
    sequences: Sequences | None = None,
    **asked: Unpack[Asked],
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """The inputs of this rank in the form that stages take.

    If they are refused, the other ranks are told, so that none of them waits for this one.

    Raises:
        TypeError, ValueError: the inputs are refused.
    """
    try:
        # Whether there are enough keys is a question of the whole call: of one rank there may be fewer.
        q, k, v, scale = check_inputs(q, k, v, causal=False, scale=asked.get("scale"), sequences=sequences)
        spec = AttentionSpec.of(q.shape[1], scale, asked)
        if spec.window is not None:
            raise ValueError(
                f"the call has a sliding window of {spec.window} tokens, and no scheme knows windows: spread "
                "heads instead (tensor parallel), or call without"
            )
        if q.device != ranks.device:
            raise ValueError(
                f"q, k and v are on {q.device}, and this rank sends from {ranks.device}: move them with .to(), or "
                "make that the current device first"
            )
    except Exception:
        ranks.told([0] * (len(_SAME) + 3))
        raise
    return q, k, v, spec


def lengths(
    q: Tensor, k: Tensor, v: Tensor, call: Call, ranks: Ranks, *, options: str = ""
) -> tuple[list[int], list[int]]:
    """How many queries and how many keys each rank has.

    Raises:
        RuntimeError: another rank has refused its inputs, or does not answer.
        ValueError: the ranks differ in what must be the same, or a causal call has more queries than keys.
    """
    (B, Hq, M, D), (_, Hkv, N, _) = q.shape, k.shape
    bits = struct.unpack("<q", struct.pack("<d", call.spec.scale))[0]
    same = (
        B, Hq, Hkv, D, v.shape[3], DTYPES.index(q.dtype), int(call.spec.causal), bits, int(call.with_lse),
        zlib.crc32(f"{options} {call.spec.softcap} {call.spec.sinks!r} {call.spec.remaining}".encode()),
    )  # fmt: skip
    them = ranks.told([1, M, N, *same])
    for rank, (agreed, *_) in enumerate(them):
        if not agreed:
            raise RuntimeError(
                f"rank {rank} of mesh dimension {ranks.dim!r} refused its inputs, and its own error says why"
            )
    for rank, (_, _, _, *its) in enumerate(them):
        if differ := [name for name, x, y in zip(_SAME, them[0][3:], its, strict=True) if x != y]:
            raise ValueError(
                f"the ranks of mesh dimension {ranks.dim!r} must make one call with the same {', '.join(differ)}: "
                f"rank {rank} differs from rank 0 there"
            )
    queries, keys = [row[1] for row in them], [row[2] for row in them]
    if call.spec.causal and sum(queries) > sum(keys) and call.sequences is None:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, the queries being the last ones: "
            f"Nq={sum(queries)}, Nk={sum(keys)} over all ranks; pass the cached keys too"
        )
    return queries, keys
