"""`auto`: the choice that tasks taught, for readers who do not want to choose; and `AutoChoice`, which explains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, final, get_args

from attrs import frozen
from torch import Tensor

from blocksparse.executors.auto import AutoExecutor, Choice
from blocksparse.executors.executor import Executor
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.pipeline import Pipeline
from blocksparse.presets.sparge import sparge
from blocksparse.presets.xattention import xattention
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.by_causality import ScorerByCausality
from blocksparse.selectors.band import Band
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.by_causality import SelectorByCausality
from blocksparse.validators import one_of

Quality = Literal["careful", "balanced", "fast"]


class _Settings(NamedTuple):
    """Causal: the share of antidiagonal mass and the band. Not causal: SpargeAttn's tau and theta."""

    mass: float
    band: int
    tau: float
    theta: float


# Measured, see docs/how-to-choose.md; not causal: the authors' defaults, and two settings between which video lies.
_SETTINGS: Mapping[Quality, _Settings] = {
    "careful": _Settings(0.95, 128, 0.98, 0.6),
    "balanced": _Settings(0.9, 128, 0.95, 0.5),
    "fast": _Settings(0.8, 64, 0.9, 0.3),
}
_BLOCK = 64  # blocks of 64 keep less than blocks of 128 where they hold the same mass


def auto(
    quality: Quality = "balanced",
    *,
    order: Permuter[GlobalPermutation] | None = None,
    executor: Executor[GlobalPermutation, BlockMask] | None = None,
) -> Pipeline[GlobalPermutation, BlockMass, BlockMask]:
    """Choose by causality, length and device, as measured with tasks; `AutoChoice.of` says what and why.

    A causal call, as in language models, takes antidiagonal scores in blocks of 64, with a thin band. Another
    call, as in models of images and video, takes `sparge`. `AutoExecutor` takes dense attention where that is
    little work, and the fastest executor of the device.

    Args:
        quality: "careful" keeps more, "fast" less.
        order: a permuter, `HilbertOrder(grid)` for images and video; `Identity()` if None. See `sparge`.
        executor: `AutoExecutor()` if None.
    """
    one_of(*get_args(Quality)).check(quality=quality)
    mass, band, tau, theta = _SETTINGS[quality]
    causal, otherwise = xattention(mass, block=_BLOCK), sparge(tau, theta, order=order)
    return Pipeline(
        otherwise.permuter,
        ScorerByCausality(causal.scorer, otherwise.scorer),
        SelectorByCausality(causal.selector | Band(band), otherwise.selector),
        AutoExecutor() if executor is None else executor,
    )


@final
@frozen(eq=False)
class AutoChoice:
    """What `auto` does in one call, and why. Its text is one sentence.

        print(AutoChoice.of("balanced", q, k, v))
    """

    preset: str  # as Python
    because: str
    density: float  # mean over heads; 1 where attention is dense
    runs: Choice  # by which executor, or densely

    @classmethod
    def of(
        cls, quality: Quality, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> AutoChoice:
        """Of a call with `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`, which is made."""
        executor = AutoExecutor()
        trace = auto(quality, executor=executor).trace(q, k, v, causal=causal, scale=scale)
        mass, band, tau, theta = _SETTINGS[quality]
        if causal:
            preset = f"xattention({mass}, block={_BLOCK}) | Band({band})"
            because = "the call is causal, and no other preset found more in long texts at its density"
        else:
            preset = f"sparge({tau}, {theta})"
            because = "the call is not causal, as in images and video, where tokens in a block are alike or are not"
        runs = executor.choose(trace.q, trace.k, trace.v, trace.mask)
        return cls(preset, because, float(trace.density().mean()), runs)

    def __str__(self) -> str:
        return f"{self.preset}, because {self.because}; density {self.density:.3f}; {self.runs}"
