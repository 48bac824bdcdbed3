"""`KeyHistory`: what scorers remember of the keys of a prompt, so that a chunk does not start over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.check.validators import Rule, count, shown
from blocksparse.order.permutation import GlobalPermutation, Permutation


@final
class KeyHistory:
    """Scorer results for earlier keys, reused across chunks of one prompt or batch in one layer.

        history = KeyHistory()
        for start in range(0, N, 2048):
            chunk, so_far = slice(start, start + 2048), slice(start + 2048)
            out = pipeline(q[:, :, chunk], k[:, :, so_far], v[:, :, so_far], history=history)

    Store a history next to the KV cache of its layer. Each call receives all keys and values so far, but scorers
    process only blocks that are new or were incomplete. The result equals that of a call without a history, bit
    for bit. Keys in the history must not change. Call `rewind` after keys were rejected or rewritten, and before a
    call is repeated. A causal call whose queries begin before the end of the history raises an error, because its
    keys are usually those of another layer. On a CPU, histories swapped between layers are detected by their last
    key. On a GPU this check would synchronize, so the caller must keep histories apart. Mean keys need `4 D` bytes
    per block and KV head: 1/128 of a half-precision KV cache with blocks of 128 tokens. Means of cells
    of 8 tokens, as in `auto`, need 1/16.

    A history is mutable and not part of a pipeline. If prompts branch, give each branch a `copy.copy`, which
    shares memory.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._kind: tuple[Any, ...] = ()  # what all keys have in common
        self._last: Tensor | None = None  # [B, Hkv, D], on a CPU: the last key that it has seen
        self._whole: dict[tuple[str, int], Tensor] = {}  # [B, Hkv, whole blocks, ...] by name and tokens per block

    def __repr__(self) -> str:
        return f"<KeyHistory of {self._tokens} tokens>"

    @property
    def tokens(self) -> int:
        """Number of keys in this history."""
        return self._tokens

    def rewind(self, tokens: int) -> None:
        """Forget all keys but the first `tokens`; with 0 it is as new. It may have seen fewer.

        Raises:
            TypeError, ValueError: `tokens` is not a whole number, at least 0.
        """
        count.check(tokens=tokens)
        if tokens < self._tokens:
            self._tokens, self._last = tokens, None
        whole = {(name, block): x[:, :, : tokens // block] for (name, block), x in self._whole.items()}
        self._whole, self._kind = (whole, self._kind) if self._tokens else ({}, ())

    def check_follows(self, q: Tensor, k: Tensor) -> None:
        """Refuse a causal call of `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]` whose chunk it has already seen.

        Raises:
            ValueError: the first of the M queries stands before the end of the keys that it has seen.
        """
        start = k.shape[2] - q.shape[2]
        if start < self._tokens:
            raise ValueError(
                f"'history' has seen {self._tokens} keys, and the queries of this call begin at key {start}. Each "
                f"layer and each prompt needs its own KeyHistory. Call rewind({max(start, 0)}) first if keys "
                "were rejected or rewritten, or if this call is repeated."
            )

    def blocks(
        self, name: str, k: Tensor, permutation: Permutation, block: int, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Result of `compute(k)`, with earlier complete blocks from memory: `[B, Hkv, cols, ...]`.

        This is what scorers call. The result must not be written to.

        Args:
            name: name of the results. Together with `block` it identifies them.
            k: `[B, Hkv, N, D]`, all keys so far.
            permutation: that of the call. It must leave keys in place.
            block: tokens per block.
            compute: gives, of `[B, Hkv, n, D]`, an entry for each block, `[B, Hkv, ceil(n / block), ...]`. It
                follows from the keys of the block alone. It gets the keys from the beginning of a block on.

        Raises:
            ValueError: keys are moved, are fewer than it has seen or of another kind; or a CUDA graph is captured.
        """
        kind = self._check(k, permutation)
        N, known = k.shape[2], self._whole.get((name, block))
        if known is None:
            found = compute(k)
        elif (seen := known.shape[2] * block) == N:
            found = known
        else:
            found = torch.cat((known, compute(k[:, :, seen:])), dim=2)
        # Another dict, since a copy of this history has the one that was here. Nothing changes if `compute` fails.
        self._whole = {**self._whole, (name, block): found[:, :, : N // block]}
        if not k.is_cuda and self._tokens < N:
            self._last = k[:, :, -1].clone()
        self._tokens, self._kind = N, kind
        return found

    def _check(self, k: Tensor, permutation: Permutation) -> tuple[Any, ...]:
        """Reject keys that do not extend this history. Return what they have in common."""
        if permutation.k_index is not None:
            raise ValueError(
                "'history' needs keys in original order, but this permutation moves them. Blocks then "
                "change from chunk to chunk. Call without 'history', or use a permuter that leaves keys in place."
            )
        B, Hkv, N, D = k.shape
        kind = B, Hkv, D, k.dtype, k.device
        if self._kind not in ((), kind):
            raise ValueError(
                f"'history' is of other keys: (B, Hkv, D, dtype, device) were {self._kind}, and are now {kind}. "
                "Each layer and each prompt needs its own KeyHistory."
            )
        if self._tokens > N:
            raise ValueError(
                f"'history' has seen {self._tokens} keys, and there are {N} now. Call rewind(tokens) after keys "
                "were rejected or rewritten. Each layer and each prompt needs its own KeyHistory."
            )
        same = self._last is None or torch.equal(self._last.nan_to_num(), k[:, :, self._tokens - 1].nan_to_num())
        if not same:
            raise ValueError(
                f"'history' has seen other keys: key {self._tokens - 1} has changed since. Each layer and each "
                "prompt needs its own KeyHistory. Call rewind(tokens) after keys were rewritten."
            )
        if k.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "'history' grows with every call, and a CUDA graph repeats one. Capture calls without it."
            )
        return kind


History = KeyHistory | None
"""What a call knows of earlier keys."""


def of_key_blocks(
    name: str,
    k: Tensor,
    permutation: GlobalPermutation,
    block: int,
    compute: Callable[..., Tensor],
    history: History,
) -> Tensor:
    """`compute(k, block, index=...)` of keys in slot order, an entry for each block: `[B, H, cols, ...]`.

    What a history knows is not computed again. Arguments are those of `KeyHistory.blocks`.
    """
    if history is None:
        return compute(k, block, index=permutation.key_slots)
    return history.blocks(name, k, permutation, block, lambda keys: compute(keys, block))


a_history = Rule("a KeyHistory or None", lambda x: x is None or isinstance(x, KeyHistory))


def one_for_each(history: object, sequences: Sequences | None) -> Sequence[History]:
    """The histories of a call: one, or one for each of its sequences; None where there is none."""
    if history is None:
        return [None] * (1 if sequences is None else len(sequences.spans))
    if sequences is None:
        a_history.check(history=history)
        return [cast(KeyHistory, history)]
    if not isinstance(history, Sequence) or not all(isinstance(each, KeyHistory) for each in history):
        raise TypeError(
            f"'history' must be a sequence of KeyHistory, one for each sequence, or None: {shown(history)}. "
            "Make a list of them."
        )
    if len(history) != len(sequences.spans):
        raise ValueError(f"'history' must have an entry per sequence ({len(sequences.spans)}): {len(history)}")
    if len(set(map(id, history))) != len(history):
        raise ValueError(
            "'history' must have a separate KeyHistory for each sequence: two are the same. "
            "Make one for each prompt."
        )
    return list(history)
