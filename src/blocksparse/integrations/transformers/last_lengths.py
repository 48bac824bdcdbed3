"""The lengths of packed prompts, which the host reads once for all layers of a forward pass."""

from __future__ import annotations

from typing import final
from weakref import ref

from attrs import define, field
from torch import Tensor

from blocksparse.batch.sequences import Sequences


@final
@define(eq=False)
class LastLengths:
    """Makes `Sequences` of `cu_seq_lens_q` and `cu_seq_lens_k`, and keeps them for the later layers of the pass.

    transformers gives every layer the same two tensors. To read one, the host waits for a GPU. What is written
    into a tensor between two passes does not always change its version, above all not in `torch.inference_mode`.
    So a layer that does not come after the last one belongs to another pass, for which both are read again.
    """

    _last: tuple[int, list[tuple[ref[Tensor], int]], Sequences] | None = field(default=None, init=False)

    def of(self, layer: int, *ends: Tensor) -> Sequences:
        """The sequences that end there, in the queries and, if two tensors are given, in the keys."""
        last = self._last  # read once: other threads may replace it
        if last is not None and last[0] < layer and same(last[1], ends):
            sequences = last[2]
        else:
            sequences = Sequences.from_cu_seqlens(*ends)
        self._last = layer, [(ref(x), version(x)) for x in ends], sequences
        return sequences


def same(known: list[tuple[ref[Tensor], int]], ends: tuple[Tensor, ...]) -> bool:
    """Whether these are the very tensors, unchanged. Weak references are compared by what their tensors hold."""
    return len(known) == len(ends) and all(
        at() is x and before == version(x) for (at, before), x in zip(known, ends, strict=True)
    )


def version(x: Tensor) -> int:
    """A number that changes when an op writes to the tensor; inference tensors have none."""
    return 0 if x.is_inference() else x._version
