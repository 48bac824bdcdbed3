"""A record of what the attention calls of a model did, layer by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from threading import Lock
from typing import Unpack, final

import torch
from attrs import Factory, define, field, frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.layers.head_groups import Attention, LayerTrace
from blocksparse.spec import AttentionOptions, AttentionSpec
from blocksparse.values import Trace

_COUNTING = Lock()  # several threads may run one model


@final
@define(eq=False)
class DensityRecorder:
    """Record of attention calls: the density of sparse calls, and the reasons of dense calls.

    The host waits for the GPU when a density is read, never when it is recorded. Layers are transformers'
    `layer_idx`; attention modules without one count as layer -1.
    """

    _sparse: dict[int, int] = field(factory=lambda: defaultdict(int), init=False)
    _dense: dict[int, Counter[str]] = field(factory=lambda: defaultdict(Counter), init=False)
    _kept: dict[int, Tensor] = field(factory=dict, init=False, repr=False)  # [Hq] float64, sum of density * pairs
    _pairs: dict[int, Tensor] = field(factory=dict, init=False, repr=False)  # [Hq] float64 on the CPU
    _ages: dict[int, Counter[int]] = field(factory=lambda: defaultdict(Counter), init=False, repr=False)

    def saw(
        self,
        layer: int,
        trace: LayerTrace,
        *,
        q_len: int,
        k_len: int,
        causal: bool = True,
        window: int | None = None,
    ) -> None:
        """Record a call for the last `q_len` of `k_len` tokens: its density, or why it was dense.

        Of a mask that is reused its age is recorded too.
        """
        if trace.dense_because is not None:
            self.saw_dense(layer, trace.dense_because)
            return
        self.saw_sparse(layer, trace.density(), q_len=q_len, k_len=k_len, causal=causal, window=window)
        if isinstance(trace, Trace) and trace.age is not None:
            with _COUNTING:
                self._ages[layer][trace.age] += 1

    def saw_sparse(
        self,
        layer: int,
        density: Tensor,
        *,
        q_len: int,
        k_len: int,
        causal: bool = True,
        window: int | None = None,
    ) -> None:
        """Record a sparse call for the last `q_len` of `k_len` tokens, and its density `[B, Hq]`."""
        pairs = q_len * (2 * k_len - q_len + 1) // 2 if causal else q_len * k_len
        if window is not None:  # the query at position p sees window of its p + 1 tokens, if there are so many
            beyond, first = max(k_len - window, 0), max(k_len - q_len - window, 0)
            pairs -= (beyond * (beyond + 1) - first * (first + 1)) // 2
        kept = density.sum(0) * pairs
        of_heads = torch.full(kept.shape, len(density) * pairs, dtype=torch.float64, device="cpu")
        with _COUNTING:
            self._sparse[layer] += 1
            for sums, more in ((self._kept, kept), (self._pairs, of_heads)):
                sums[layer] = _added(sums[layer], more) if layer in sums else more

    def choice_ages(self) -> dict[int, Counter[int]]:
        """Number of sparse calls of each layer by the age of their choice in steps, where choices are kept."""
        return {layer: Counter(ages) for layer, ages in self._ages.items()}

    def saw_dense(self, layer: int, reason: str) -> None:
        """Record a dense call and its reason."""
        with _COUNTING:
            self._dense[layer][reason] += 1

    def sparse_calls(self) -> dict[int, int]:
        """Number of sparse calls of each layer."""
        return dict(self._sparse)

    def dense_calls(self) -> dict[int, Counter[str]]:
        """Number of dense calls of each layer, by reason."""
        return {layer: Counter(reasons) for layer, reasons in self._dense.items()}

    def density(self) -> Tensor:
        """The mean density of the sparse calls, `[layers, Hq]` float64 on the CPU; NaN for a layer without any.

        Calls are weighted by their number of (query, key) pairs in all entries of the batch, so that the chunks of
        a prompt have the density of the whole prompt, and the prompts of a batch that of single calls.
        """
        layers = 1 + max((*self._sparse, *self._dense), default=-1)
        heads = max((kept.shape[0] for kept in self._kept.values()), default=0)
        density = torch.full((layers, heads), float("nan"), dtype=torch.float64, device="cpu")
        for layer, kept in self._kept.items():
            if layer >= 0:
                density[layer, : kept.shape[0]] = self._of_heads(layer)
        return density

    def _of_heads(self, layer: int) -> Tensor:
        """The mean density of each head of a layer, `[Hq]` float64 on the CPU."""
        return self._kept[layer].cpu() / self._pairs[layer]

    def mean_density(self) -> float:
        """The mean density over the layers that attended and their heads; 1 for layers without a sparse call.

        Layers of a hybrid model that have no attention do not count, nor do modules without a layer (-1), such
        as a vision tower, if others have one. 1 if nothing was recorded.
        """
        layers = {*self._sparse, *self._dense}
        layers = layers - {-1} or layers
        each = [float(self._of_heads(x).mean()) if x in self._kept else 1.0 for x in layers]
        return sum(each) / len(each) if each else 1.0

    def table(self) -> str:
        """A line per layer: sparse calls, their density (mean, and range over heads), dense calls by reason."""
        lines = [f"{'layer':>5}  {'sparse':>6}  {'density':>7}  {'heads':<13}  dense"]
        for layer in sorted({*self._sparse, *self._dense}):
            mean, heads = "", ""
            if layer in self._kept:
                density = self._of_heads(layer)
                mean, heads = f"{density.mean():.3f}", f"{density.min():.3f} - {density.max():.3f}"
            dense = ", ".join(f"{n} x {why}" for why, n in self._dense.get(layer, Counter[str]()).most_common())
            lines.append(f"{layer:>5}  {self._sparse.get(layer, 0):>6}  {mean:>7}  {heads:<13}  {dense or '-'}")
        return "\n".join(lines)

    def clear(self) -> None:
        """Delete all records."""
        for recorded in (self._sparse, self._dense, self._kept, self._pairs, self._ages):
            recorded.clear()


def _added(x: Tensor, y: Tensor) -> Tensor:
    """The sum of `x` and `y`, each of which may have more heads: a model of two decoders has two layers 0."""
    heads = max(len(x), len(y))
    x, y = (pad(each, (0, heads - len(each))) for each in (x, y))
    return x + y


@final
@frozen(eq=False)
class RecordedAttention:
    """The attention of one layer, with a record of the density of each call, or of why it was dense.

    It is called like a `Pipeline`.
    """

    attention: Attention
    layer: int
    recorder: DensityRecorder
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`."""
        return attend(self._call, q, k, v, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self.trace(q, k, v, **spec.arguments()).output.out

    def trace(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> LayerTrace:
        """Make the same call with the same arguments, and return every value of it."""
        trace, sizes = self.attention.trace(q, k, v, **options), {"q_len": q.shape[2], "k_len": k.shape[2]}
        causal, window = options.get("causal", True), options.get("window")
        self.recorder.saw(self.layer, trace, **sizes, causal=causal, window=window)
        return trace
