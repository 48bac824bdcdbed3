"""A pipeline of one layer that attends to what it chose some steps ago."""

from __future__ import annotations

from typing import Any, Unpack, final

from attrs import frozen
from torch import Tensor

from blocksparse.attention_spec import Asked
from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.layers.kept_choices import KeptChoices
from blocksparse.pipeline import Pipeline


@final
@frozen(eq=False)
class Keeping:
    """A pipeline whose choices last, and which tells a recorder, if there is one, the density and age of each."""

    pipeline: Pipeline[Any, Any, Any]
    layer: int
    choices: KeptChoices
    recorder: DensityRecorder | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> Tensor:
        kept = self.choices.attend(self.layer, self.pipeline, q, k, v, **asked)
        if self.recorder is None:
            return kept.out
        if kept.mask is None or kept.age is None:
            self.recorder.saw_dense(self.layer, "little work")
            return kept.out
        density, sizes = kept.mask.density(), {"q_len": q.shape[2], "k_len": k.shape[2]}
        density = density.repeat_interleave(q.shape[1] // density.shape[1], 1)
        self.recorder.saw_sparse(self.layer, density, **sizes, causal=asked.get("causal", True))
        self.recorder.saw_age(self.layer, kept.age)
        return kept.out
