"""What attends in one layer: its pipeline, prompt by prompt, or dense attention where the pipeline cannot run."""

from __future__ import annotations

from collections import Counter
from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.inputs import UnsupportedError
from blocksparse.executors.dense_attention import dense_attention
from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.integrations.serving.prefills import Prefills
from blocksparse.layers.schedule import LayerPipeline


@final
@frozen(eq=False)
class LayerAttention:
    """Attends in one layer to the sparse prompts of a batch, and records it."""

    pipeline: LayerPipeline
    layer: int
    recorder: DensityRecorder | None

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, prefills: Prefills, *, scale: float
    ) -> None:
        """Attend the sparse rows of `query` to pages, and write the same rows of `out`.

        Args:
            query: `[tokens, Hq, D]`, of the whole batch.
            keys: the cache of this layer, `[pages, Hkv, page_size, D]`.
            values: `[pages, Hkv, page_size, Dv]`.
            out: `[tokens, Hq, Dv]`.
        """
        rows = prefills.tokens.take(out)
        q, into = (x.transpose(0, 1)[None] for x in (prefills.tokens.take(query), rows))  # [1, Hq, M, D]
        k, v = prefills.table.gather(keys, values)
        parts = prefills.sequences.parts(q, k, v, causal=True)
        for span, part in zip(prefills.sequences.spans, parts, strict=True):
            assert part is not None  # a prompt without queries is not sparse
            span.rows(into).copy_(self._attend(*part, scale))
        prefills.tokens.put(out, rows)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        try:
            if self.recorder is None:
                return self.pipeline(q, k, v, scale=scale)
            trace = self.pipeline.trace(q, k, v, scale=scale)
        except UnsupportedError as error:
            self._saw_dense(error.because)
            return dense_attention(q, k, v, AttentionSpec(scale=scale))
        if trace.dense_because is not None:
            self._saw_dense(trace.dense_because)
        else:
            self.recorder.saw_sparse(self.layer, trace.density(), q_len=q.shape[2], k_len=k.shape[2])
        return trace.output.out

    def _saw_dense(self, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.saw_dense(self.layer, reason)


def record_dense(
    recorder: DensityRecorder | None,
    layer: int,
    reasons: Counter[str],
    prefills: Prefills | None,
    because: str | None,
) -> None:
    """Record the requests of a batch that are dense in a layer.

    Args:
        reasons: of the requests that are dense in every layer.
        prefills: the others.
        because: why these are dense too in this layer, if they are.
    """
    if recorder is None:
        return
    found = Counter(reasons)
    if because is not None and prefills is not None:
        found[because] += len(prefills.sequences.spans)
    for reason, requests in found.items():
        for _ in range(requests):
            recorder.saw_dense(layer, reason)
